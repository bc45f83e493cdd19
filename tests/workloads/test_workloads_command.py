import csv
import json

import pytest
from typer.testing import CliRunner

from slo_bench.cli.commands.workload import app, histogram
from slo_bench.workloads import fetch as fetching
from slo_bench.workloads.errors import SloBenchError, UnknownNameError


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})


def test_workload_show_prints_figures_and_histograms():
    result = run("show", "azure-conv", "-n", "2000")
    assert result.exit_code == 0, result.output
    for piece in ("2,000 requests", "Azure/AzurePublicDataset", "p99", "output tokens", "█"):
        assert piece in result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    begin = next(place for place, line in enumerate(lines) if line.startswith("azure-conv ("))
    assert "█" not in "".join(lines[begin:])
    assert "2,000 requests" in " ".join(lines[-3:])


def test_workload_show_json_prints_only_json():
    result = run("show", "mix(a=alpaca:1,b=arxiv:1)", "--models", "zipf(2)", "-n", "300", "--json")
    figures = json.loads(result.stdout)
    assert figures["requests"] == 300
    assert {group["name"] for group in figures["classes"]} == {"a", "b"}
    assert len(figures["models"]) == 2
    assert "arxiv" in figures["origin"]


def test_workload_show_of_sessions_and_of_a_closed_loop():
    shown = run("show", "alpaca", "--sessions", "sessions", "-n", "200").output
    assert "sessions" in shown
    assert "shared prefixes" in shown
    assert "closed loop" in run("show", "alpaca", "--arrivals", "concurrency(4)").output


def test_workload_make_writes_what_show_reads(tmp_path):
    path = tmp_path / "w.csv"
    result = run("make", "arena", "--rate", "2", "-n", "50", "--slo", "ttft=1", "--out", str(path))
    assert result.exit_code == 0, result.output
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 50
    assert {row["ttft_slo_s"] for row in rows} == {"1.0"}
    assert json.loads(run("show", str(path), "--json").stdout)["requests"] == 50


def test_workload_make_replay_speed_scales_times(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n8,2,2\n")
    run("make", str(trace), "--replay-speed", "4", "--out", str(tmp_path / "fast.csv"))
    assert "2.0,2,2" in (tmp_path / "fast.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("show", "sharegtp"), UnknownNameError),
        (("show", "alpaca", "--rate", "-1"), SloBenchError),
        (("make", "alpaca", "-n", "5", "--out", "x.csv"), SloBenchError),
        (("fetch", "nothing"), UnknownNameError),
    ],
)
def test_workload_errors_reach_the_main_command(arguments, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(run(*arguments).exception, kind)
    assert not list(tmp_path.iterdir())


def test_workload_fetch_prints_only_the_path_on_stdout(monkeypatch, tmp_path):
    def fetched(original, progress):
        progress(5, 10)
        return fetching.Fetched(tmp_path / original.file_name, "ab" * 32, False, True)

    monkeypatch.setattr(fetching, "fetch", fetched)
    result = run("fetch", "alpaca")
    assert result.stdout.strip() == str(tmp_path / "alpaca_data.json")
    assert "no checksum is known" in result.stderr


def test_workload_fetch_without_a_name_lists_all():
    listed = run("fetch").output
    assert all(name in listed for name in fetching.originals())


def test_histogram_by_hand():
    lines = histogram([1, 2, 3, 9], width=10)
    assert [line.split("%")[0].split() for line in lines] == [
        ["1", "-", "1", "25.0"],
        ["2", "-", "3", "50.0"],
        ["4", "-", "7", "0.0"],
        ["8", "-", "15", "25.0"],
    ]
    assert [line.count("█") for line in lines] == [5, 10, 0, 5]
