"""Exports: against the real packages where they are installed, else fakes with their interface."""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from slo_bench import Experiment, SloBenchError
from slo_bench.cli.main import app
from slo_bench.harness.results.run_folder import read_rows
from slo_bench.reports.compare.comparing import read_results
from slo_bench.reports.exports import export
from slo_bench.reports.exports.grafana import dashboard
from slo_bench.reports.live import LiveReport
from slo_bench.workloads.source import load_source

REQUESTS = 20

LOADGEN = """\
================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Mode     : PerformanceOnly
Completed samples per second    : 4.25
Completed tokens per second: 1203.50
Result is : VALID
  Performance constraints satisfied : Yes

================================================
Additional Stats
================================================
99.00 percentile latency (ns)   : 9500000000
99.90 percentile latency (ns)   : 11000000000
Completed tokens per second                 : 1203.50
Mean First Token latency (ns)               : 200000000
99.00 percentile first token latency (ns)   : 450000000
99.00 percentile time to output token (ns)   : 12500000
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    settings = {"systems": ("vllm", "sarathi"), "rates": [2], "seeds": 1, "requests": REQUESTS}
    Experiment(**settings, records="csv").run(folder, jobs=1)
    return folder


def signals(lines):
    """Spans and metrics of OTLP/JSON objects."""
    spans, metrics = [], []
    for document in lines:
        for resource in document.get("resourceSpans", ()):
            spans += [s for scope in resource["scopeSpans"] for s in scope["spans"]]
        for resource in document.get("resourceMetrics", ()):
            metrics += [m for scope in resource["scopeMetrics"] for m in scope["metrics"]]
    return spans, metrics


def check_otel(lines, run):
    spans, metrics = signals(lines)
    rows = read_rows(run / "cells.csv")
    names = [span["name"] for span in spans]
    assert sum(name.startswith("chat ") for name in names) == len(rows) * REQUESTS
    assert names.count("decode") == sum(row["finished"] for row in rows)
    by_id = {(span["traceId"], span["spanId"]) for span in spans}
    assert len(by_id) == len(spans)
    parents = {(s["traceId"], s["parentSpanId"]) for s in spans if "parentSpanId" in s}
    assert parents <= by_id
    assert all(int(s["startTimeUnixNano"]) <= int(s["endTimeUnixNano"]) for s in spans)
    (attainment,) = [m for m in metrics if m["name"] == "slo_bench.attainment"]
    values = [point["asDouble"] for point in attainment["gauge"]["dataPoints"]]
    assert values == [row["attainment"] for row in rows]


def test_export_otel_to_a_file(run, tmp_path):
    file = tmp_path / "otel.jsonl"
    assert str(file) in export(run, "otel", str(file))
    lines = file.read_text().splitlines()
    check_otel([json.loads(line) for line in lines], run)
    with pytest.raises(SloBenchError, match="requests of 2 cells of a run, which came at the same"):
        load_source(file)
    file.write_text(lines[0])  # of one cell
    assert len(load_source(file).make()) == REQUESTS  # as any server's spans


def test_export_otel_conforms_to_its_schema(run, tmp_path):
    pytest.importorskip("opentelemetry.proto")
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as of_metrics
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as of_spans

    file = tmp_path / "otel.jsonl"
    export(run, "otel", str(file))
    for line in file.read_text().splitlines():
        document = json.loads(line)
        kind = of_spans.ExportTraceServiceRequest
        if "resourceMetrics" in document:
            kind = of_metrics.ExportMetricsServiceRequest
        ParseDict(document, kind())  # refuses what is not in the schema


def test_export_otel_to_a_collector(run):
    posts = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            posts.append((self.path, self.headers["content-type"], json.loads(body)))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert url in export(run, "otel", url)
        server.shutdown()
    assert {path for path, _, _ in posts} == {"/v1/traces", "/v1/metrics"}
    assert {kind for _, kind, _ in posts} == {"application/json"}
    check_otel([body for _, _, body in posts], run)
    with pytest.raises(SloBenchError, match="no collector takes OTLP"):
        export(run, "otel", url)


@pytest.mark.filterwarnings("ignore")  # of the package and of what it imports
def test_export_mlflow_writes_runs(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'ml.db'}"
    monkeypatch.chdir(tmp_path)
    try:
        mlflow.set_tracking_uri(uri)
        mlflow.search_experiments()
    except mlflow.exceptions.MlflowException as error:  # mlflow-skinny without a database
        pytest.skip(str(error))
    assert "2 cells" in export(run, "mlflow", uri)
    client = mlflow.MlflowClient(uri)
    (experiment,) = [
        candidate for candidate in client.search_experiments() if candidate.name == "slo-bench"
    ]
    logged = client.search_runs([experiment.experiment_id])
    rows = {row["cell"]: row for row in read_rows(run / "cells.csv")}
    cells = {
        logged_run.info.run_name: logged_run
        for logged_run in logged
        if logged_run.info.run_name in rows
    }
    assert cells.keys() == rows.keys()
    for name, logged_run in cells.items():
        assert logged_run.data.metrics["attainment"] == rows[name]["attainment"]
        assert logged_run.data.params["system"] == rows[name]["system"]
    (whole,) = [logged_run for logged_run in logged if logged_run.info.run_name == "small"]
    files = {artifact.path for artifact in client.list_artifacts(whole.info.run_id)}
    assert {"report.html", "experiment.toml", "cells.csv"} <= files


@pytest.mark.filterwarnings("ignore")
def test_export_wandb_writes_runs(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert "2 cells" in export(run, "wandb")
    kept = list((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(kept) >= 2


class FakeRun:
    """What an export asks of a run, of either tool."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.calls.append(("end", self.name))

    def log(self, metrics):
        self.calls.append(("log", self.name, metrics))

    def log_artifact(self, artifact):
        self.calls.append(("artifact", self.name, artifact.files))

    def finish(self):
        self.calls.append(("end", self.name))


def test_export_mlflow_calls_the_documented_functions(run, monkeypatch):
    calls = []
    fake = types.ModuleType("mlflow")
    fake.exceptions = types.SimpleNamespace(MlflowException=type("E", (Exception,), {}))
    fake.set_tracking_uri = lambda uri: calls.append(("uri", uri))
    fake.get_tracking_uri = lambda: "http://x"
    fake.set_experiment = lambda name: calls.append(("experiment", name))
    fake.start_run = lambda run_name, nested=False: FakeRun(calls, run_name)
    fake.set_tags = lambda tags: None
    fake.log_artifact = lambda path: calls.append(("artifact", path))
    fake.log_params = lambda values: calls.append(("params", values))
    fake.log_metrics = lambda values: calls.append(("metrics", values))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    export(run, "mlflow", "http://x")
    assert calls[:2] == [("uri", "http://x"), ("experiment", "slo-bench")]
    params = [call[1] for call in calls if call[0] == "params"]
    assert [row["system"] for row in params] == ["vllm", "sarathi"]
    metrics = [call[1] for call in calls if call[0] == "metrics"]
    assert all(isinstance(value, float) for figures in metrics for value in figures.values())
    assert calls[-1] == ("end", "small")
    fake.set_experiment = _raises(fake.exceptions.MlflowException("no server\nat all"))
    with pytest.raises(SloBenchError, match=r"^MLflow: no server$"):
        export(run, "mlflow", "http://x")


def test_export_wandb_calls_the_documented_functions(run, monkeypatch):
    calls = []

    class Artifact:
        def __init__(self, name, type):  # noqa: A002
            self.files = []

        def add_file(self, path):
            self.files.append(path.rpartition("/")[2])

    fake = types.ModuleType("wandb")
    fake.Error = type("E", (Exception,), {})
    fake.Artifact = Artifact
    fake.init = lambda **options: FakeRun(calls, options["name"])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert "project mine" in export(run, "wandb", "mine")
    assert [call[0] for call in calls] == ["log", "artifact", "end", "log", "end"]
    assert calls[1][2] == ["report.html", "experiment.toml"]
    fake.init = _raises(fake.Error("no key"))
    with pytest.raises(SloBenchError, match="no key"):
        export(run, "wandb")


def _raises(error):
    def call(*words, **more):
        raise error

    return call


def test_export_grafana_writes_a_dashboard(run, tmp_path):
    file = tmp_path / "grafana.json"
    done = CliRunner().invoke(
        app, ["export", str(run), "--to", "grafana", "--destination", str(file)]
    )
    assert done.exit_code == 0, done.output
    board = json.loads(file.read_text())
    assert board == dashboard("small")
    served = set(re.findall(r"^(\w+)", LiveReport(run).metrics(), re.MULTILINE))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert {expr.partition("{")[0] for expr in expressions} <= served
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_export_mlperf_writes_summaries(run, tmp_path):
    """The lines that readers of LoadGen's summaries look for."""
    assert "2 cells" in export(run, "mlperf", str(tmp_path))
    for row in read_rows(run / "cells.csv"):
        file = tmp_path / row["cell"] / "mlperf_log_summary.txt"
        summary = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
        summary = {name.strip(): value.strip() for name, value in summary.items()}
        assert summary["Scenario"] == "Server"
        kept = row["ttft_p99_s"] <= 1 and row["tpot_p99_s"] <= 0.15
        assert summary["Result is"] == ("VALID" if kept else "INVALID")
        mean_ns = int(summary["Mean First Token latency (ns)"])
        assert mean_ns == pytest.approx(1e9 * row["ttft_mean_s"], rel=1e-3)
        mean_ns = int(summary["Mean Time per Output Token (ns)"])
        assert mean_ns == pytest.approx(1e9 * row["tpot_mean_s"], rel=1e-3)
        p99_ns = int(summary["99.00 percentile first token latency (ns)"])
        assert p99_ns >= int(summary["50.00 percentile first token latency (ns)"])
        assert summary["ttft_latency (ns)"] == "1000000000"
    with pytest.raises(SloBenchError, match="LoadGen's summary, which has no single requests"):
        read_results(file)


def test_compare_reads_a_loadgen_summary(run, tmp_path):
    other = tmp_path / "mlperf_log_summary.txt"
    other.write_text(LOADGEN)
    words = ["compare", str(run), str(other)]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    *ours, theirs = json.loads(done.output)
    assert theirs == {
        "name": other.name,
        "scenario": "Server",
        "valid": True,
        "samples_per_s": 4.25,
        "tokens_per_s": 1203.5,
        "ttft_mean_s": 0.2,
        "ttft_p99_s": 0.45,
        "tpot_p99_s": 0.0125,
        "e2e_p99_s": 9.5,
        "e2e_p99.9_s": 11.0,
    }
    for row, entry in zip(read_rows(run / "cells.csv"), ours, strict=True):
        assert entry["name"] == row["cell"]
        assert entry["tpot_mean_s"] == pytest.approx(row["tpot_mean_s"], rel=1e-3)
    shown = CliRunner().invoke(app, words)
    assert "450 ms" in shown.output
    assert "without intervals" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    nothing = CliRunner().invoke(app, [*words, "--rates", "99"])
    assert "has no cell at these rates" in str(nothing.exception)
    other.write_text(LOADGEN.replace("4.25", "many"))
    wrong = CliRunner().invoke(app, words)
    assert isinstance(wrong.exception, SloBenchError)
    assert "'many', which is no number" in str(wrong.exception)
    for option in (["--html", "page.html"], ["--slo", "ttft=1"], ["--seed", "4"]):
        refused = CliRunner().invoke(app, [*words, *option])
        assert "only --rates and --json go with it" in str(refused.exception)


def test_export_without_its_package_names_the_install_command(run, tmp_path, monkeypatch):
    for package in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(SloBenchError, match=f"pip install {package}"):
            export(run, package)
    with pytest.raises(SloBenchError, match="cannot be written"):
        export(run, "otel", str(tmp_path / "no" / "file"))
    with pytest.raises(SloBenchError, match="not a run folder"):
        export(tmp_path / "nothing", "otel")
