"""`slo-bench tune placement` as it is typed."""

import json

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.predictors.device_map import read_device_map

UELLM = ["tune", "placement", "--model", "chatglm2-6b", "--topology", "uellm", "--host-ms", "30"]


def typed(*arguments):
    return CliRunner().invoke(app, [*UELLM, *map(str, arguments)])


def test_tune_placement_prints_methods_and_draws_the_map():
    shown = typed("--reserve-gib", 12)
    assert shown.exit_code == 0
    assert "28 layers of chatglm2-6b on 2 of 4 devices (balanced, exact optimum)" in " ".join(
        shown.output.split()
    )
    assert "the paper's procedure, mended" in shown.output
    assert "█" in shown.output
    assert "not used: with one more, a pass takes " in " ".join(shown.output.split())


def test_tune_placement_writes_json_map_and_page(tmp_path):
    out, page = tmp_path / "map.json", tmp_path / "map.html"
    shown = typed("--reserve-gib", 12, "--json", "--out", out, "--html", page, "--lanes", 1)
    report = json.loads(shown.output)
    assert report["chosen"] == "exact"
    best = report["answers"][0]
    assert best["fits"]
    assert best["gap"] == 0
    written = read_device_map(str(out))
    assert list(written.layers) == [s["last_layer"] - s["first_layer"] + 1 for s in best["stages"]]
    assert written.lanes == 1
    plain = json.loads(out.read_text())
    assert len(plain["accelerate"]) == 32
    assert "VLLM_PP_LAYER_PARTITION" in plain["vllm"]["environment"]
    html = page.read_text()
    assert "<svg" in html
    assert html.count("<rect") >= 6  # four devices, two of them filled
    assert "http" not in html.split("<svg")[1].split("</svg>")[0]


@pytest.mark.slow
def test_tune_placement_morphling_tells_the_cost_of_its_tests(tmp_path):
    out = tmp_path / "map.json"
    shown = typed("--method", "morphling", "--tests", 1, "--out", out)
    assert "in which nothing is served" in " ".join(shown.output.split())
    assert read_device_map(str(out)).ready_s > 15


def test_run_accepts_the_map_written_by_tune_placement(tmp_path):
    out = tmp_path / "map.json"
    typed("--reserve-gib", 12, "--out", out, "--lanes", 1)
    load = ["-s", "fifo", "-w", "alpaca", "--rates", "1", "--requests", "20", "--seeds", "1"]
    place = ["--model", "chatglm2-6b", "--device-map", str(out), "--slo", "e2e=300"]
    where = ["--out", str(tmp_path / "run"), "--no-report", "--jobs", "1"]
    ran = CliRunner().invoke(app, ["run", *load, *place, *where])
    assert ran.exit_code == 0, ran.output
    rows = (tmp_path / "run" / "cells.csv").read_text()
    assert "rtx-3090@350w" in rows


def test_map_reserves_memory_for_the_longest_request(tmp_path):
    out = tmp_path / "map.json"
    shown = typed("--workload", "azure-code", "--out", out)
    assert "fits beside the layers: azure-code" in " ".join(shown.output.split())
    load = ["-s", "vllm", "-w", "azure-code", "--rates", "0.2", "--requests", "300"]
    place = ["--model", "chatglm2-6b", "--device-map", str(out), "--slo", "e2e=300"]
    where = ["--out", str(tmp_path / "run"), "--no-report", "--jobs", "1", "--seeds", "1"]
    ran = CliRunner().invoke(app, ["run", *load, *place, *where])  # overlong requests are an error
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--mode", "hr"], "unknown mode 'hr'"),
        (["--method", "guess"], "--method must be one of exact, helr, even, optuna or morphling"),
        (["--gpu", "l4"], "leave --gpu and --devices out"),
        (["--reserve-gib", "22"], "28 layers do not fit"),
        (["--reserve-gib", "-1"], "reserve must be at least 0"),
        (["--out", "map.toml"], "--out must be a file .json"),
        (["--latency-weight", "0", "--device-weight", "0"], "both 0"),
        (["--method", "even", "--reserve-gib", "17", "--out", "x.json"], "does not fit"),
    ],
)
def test_tune_placement_refuses_wrong_arguments(tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    shown = typed(*arguments)
    assert shown.exit_code != 0
    error = str(shown.exception) if shown.exception else ""
    assert problem in error + shown.output
    assert not list(tmp_path.iterdir())


def test_tune_placement_times_the_given_splits():
    command = ["tune", "placement", "--model", "chatglm2-6b", "--topology", "uellm-3090-v100"]
    command += [
        "--batch",
        "1",
        "--context",
        "100",
        "--host-ms",
        "28",
        "--kv-tokens",
        "200",
        "--json",
    ]
    published = {"14,14": 11.19, "17,11": 13.09, "20,8": 14.85, "24,4": 17.23, "27,1": 22.55}
    splits = [word for text in published for word in ("--split", text)]
    rows = json.loads(CliRunner().invoke(app, [*command, *splits]).stdout)
    for row in rows:  # UELLM, Table 2-1
        assert row["tokens_per_s"] == pytest.approx(published[row["split"]], rel=0.1)
        assert row["latency_ms"] == pytest.approx(1000 / row["tokens_per_s"])
    for wrong, reason in (("14,13", "with the sum 28"), ("28", "2 numbers"), ("-1,29", "sum 28")):
        done = CliRunner().invoke(app, [*command, f"--split={wrong}"])
        assert (done.exit_code, reason in str(done.exception)) == (1, True) or reason in done.output
    done = CliRunner().invoke(app, [*command, "--split", "28,0", "--out", "map.json"])
    assert "not --out" in f"{done.exception}{done.output}"
