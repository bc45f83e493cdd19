"""`slo-bench observe`: what vLLM, SGLang and Prometheus said, and odd answers."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from typer.testing import CliRunner

from reference.recorded_metrics import in_turn, read_of, recorded, ticking_clock
from slo_bench.cli.commands import observe
from slo_bench.cli.main import app
from slo_bench.tuner.planning import headroom
from slo_bench.workloads.errors import SloBenchError


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Short simulations, and a model to name."""
    monkeypatch.setattr(observe, "_SIMULATED", 200)
    monkeypatch.setattr(headroom, "_BUDGET", 20_000)
    monkeypatch.setattr(observe, "sleep", lambda seconds: None)
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256},
        **{"intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 2048},
    }
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine", "limit", "sets"),
    [
        ("vllm-0.32.0", "vllm", "max_num_seqs = 32", []),
        (
            *("sglang-0.5.23", "sglang", "max_running_requests = 200"),
            ["--set", "max_running_requests=200"],
        ),
    ],
)
def test_observe_recorded_server_metrics(
    name, engine, limit, sets, answering, small, monkeypatch, tmp_path
):
    rows = recorded(name)
    url = answering(lambda path: (200, rows[-1][1]) if path == "/metrics" else (404, ""))
    in_turn(monkeypatch, rows)
    out = tmp_path / "out"
    words = ["observe", url, "--model", small, "--slo", "ttft=1,tpot=0.1", "--duration", "60"]
    done = CliRunner().invoke(app, [*words, *sets, "--interval", "1", "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    estimate = json.loads(done.stdout)
    assert estimate["engine"] == engine
    assert (
        estimate["capacity_band_rps"][0]
        <= estimate["capacity_rps"]
        <= estimate["capacity_band_rps"][1]
    )
    assert estimate["headroom_band"][0] <= estimate["headroom"] <= estimate["headroom_band"][1]
    assert estimate["step_time_factors"][0] <= 1 <= estimate["step_time_factors"][1]
    for change in estimate["changes"]:
        assert change["gain_low"] <= change["gain"] <= change["gain_high"]
    more = next(change for change in estimate["changes"] if change["instances"])
    assert more["gain"] > 1.2
    text = (out / "experiment.toml").read_text()
    assert limit in text
    again = ["run", str(out / "experiment.toml"), "--rates", "2", "--requests", "50"]
    ran = CliRunner().invoke(app, [*again, "--out", str(tmp_path / "run"), "--no-report"])
    assert ran.exit_code == 0, ran.output


def test_observe_asks_for_a_batch_limit_that_it_did_not_see(answering, small, monkeypatch):
    rows = recorded("sglang-0.5.23")
    url = answering(lambda path: (200, rows[-1][1]) if path == "/metrics" else (404, ""))
    in_turn(monkeypatch, rows)
    words = ["observe", url, "--model", small, "--slo", "ttft=1,tpot=0.1", "--duration", "60"]
    done = CliRunner().invoke(app, [*words, "--interval", "1"])
    assert done.exit_code == 0, done.output
    answer = " ".join(done.stdout.split())
    assert "capacity: not simulated" in answer
    assert answer.endswith("--set max_running_requests=N")
    assert not re.search("^(headroom|change|next)", done.stdout, re.MULTILINE)


def test_observe_leaves_out_single_readings_that_fail(answering, small, monkeypatch):
    rows = recorded("sglang-0.5.23")
    url = answering(lambda path: (200, rows[-1][1]) if path == "/metrics" else (404, ""))
    turns = itertools.count()
    good = iter(rows)

    def read(source, time_s):
        if next(turns) % 20 == 7:
            raise SloBenchError("it does not answer: no whole answer within 10 s")
        return read_of(next(good))

    source = "slo_bench.harness.load_generator.metrics_source.MetricsSource.read"
    monkeypatch.setattr(source, read)
    monkeypatch.setattr(observe, "monotonic", ticking_clock())
    words = ["observe", url, "--model", small, "--slo", "ttft=1,tpot=0.1", "--duration", "60"]
    done = CliRunner().invoke(app, [*words, "--interval", "1"])
    assert done.exit_code == 0, done.output
    printed = " ".join(done.stdout.split())
    assert re.search(r"note: \d of \d+ readings are left out: it does not answer", printed)


def test_observe_ends_where_most_readings_fail(answering, small, monkeypatch):
    rows = recorded("sglang-0.5.23")
    url = answering(lambda path: (200, rows[-1][1]) if path == "/metrics" else (404, ""))
    turns = itertools.count()

    def read(source, time_s):
        if next(turns):
            raise SloBenchError("gone")
        return read_of(rows[0])

    monkeypatch.setattr("slo_bench.harness.load_generator.metrics_source.MetricsSource.read", read)
    monkeypatch.setattr(observe, "monotonic", ticking_clock())
    done = CliRunner().invoke(app, ["observe", url, "--model", small, "--slo", "ttft=1"])
    assert str(done.exception) == "gone"


def prometheus(rows, labels=""):
    """Answers of a Prometheus server that has these readings."""
    series = {}
    for time_s, text in rows:
        for line in text.splitlines():
            name, label_text, value = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line).groups()
            metric = dict(re.findall(r'(\w+)="([^"]*)"', f"{label_text or ''},{labels}"))
            key = json.dumps({"__name__": name, **metric})
            series.setdefault(key, []).append([time_s, value])
    matrix = [{"metric": json.loads(key), "values": values} for key, values in series.items()]
    result = {"status": "success", "data": {"resultType": "matrix", "result": matrix}}

    def answer(path):
        if path.startswith("/api/v1/query_range?"):
            return 200, json.dumps(result)
        if path == "/api/v1/query?query=time()":
            scalar = {"resultType": "scalar", "result": [rows[-1][0], str(rows[-1][0])]}
            return 200, json.dumps({"status": "success", "data": scalar})
        return (200, "prometheus_build_info 1\n") if path == "/metrics" else (404, "")

    return answer


@pytest.mark.slow
def test_observe_prometheus_restricted_to_an_instance(answering, small):
    url = answering(prometheus(recorded("vllm-0.32.0"), 'instance="10.0.0.1:8000"'))
    words = ["observe", url, "--model", small, "--slo", "ttft=1,tpot=0.1"]
    done = CliRunner().invoke(app, [*words, "--only", "instance=10.0.0.1:8000"])
    assert done.exit_code == 0, done.output
    for begin in ("observed:", "load:", "SLO: TTFT ≤ 1 s", "latencies:", "server:", "change "):
        assert re.search(rf"^{begin}", done.stdout, re.MULTILINE), begin
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) <= 24
    begins = [line.partition(" ")[0] for line in lines]
    assert begins.index("capacity:") < begins.index("headroom:") < begins.index("next:")
    assert begins.index("next:") >= len(lines) - 2
    other = CliRunner().invoke(app, [*words, "--only", "instance=10.0.0.2:8000"])
    assert isinstance(other.exception, SloBenchError)
    assert "has no metrics of vLLM or SGLang with instance=10.0.0.2:8000" in str(other.exception)


ODD = {
    "no metrics": lambda path: (404, "not here"),
    "a page": lambda path: (200, "<html>welcome</html>"),
    "other metrics": lambda path: (200, "up 1\n"),
    "a key": lambda path: (401, ""),
    "an error": lambda path: (500, "x" * 100),
    "no numbers": lambda path: (200, "vllm:num_requests_running \x1b]0;owned\x07\n"),
    "another JSON": lambda path: (200, "[]" if "api" in path else ""),
    "a scalar of words": lambda path: (
        200,
        '{"data": {"resultType": "scalar", "result": ["a", 1]}}' if "api" in path else "",
    ),
    "no load": lambda path: (200, "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"),
    "series that are none": lambda path: (
        200,
        '{"data": {"resultType": "scalar", "result": [9, "9"]}}'
        if path.endswith("time()")
        else '{"data": {"resultType": "matrix", "result": [{"metric": 3}]}}',
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_observe_malformed_metrics_is_an_error(name, answering, small):
    url = answering(ODD[name])
    words = ["observe", url, "--model", small, "--duration", "1"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, SloBenchError), done.exception
    assert "\n" not in str(done.exception)


def test_observe_wrong_options_are_refused(small):
    for words, problem in (
        (["http://127.0.0.1:1"], "does not answer"),
        (["ftp://x"], "should look like"),
        (["http://127.0.0.1:1", "--only", "x"], "LABEL=VALUE"),
        (["http://127.0.0.1:1", "--api-key-env", "NOT_SET_AT_ALL"], "is not set"),
    ):
        done = CliRunner().invoke(app, ["observe", *words])
        assert problem in str(done.exception), words


def test_observe_unknown_model_asks_for_the_model_option(answering, small, monkeypatch):
    rows = recorded("vllm-0.32.0")
    url = answering(prometheus(rows))
    done = CliRunner().invoke(app, ["observe", url])
    assert "name it by --model" in str(done.exception)
