"""compare, gate, explain and sensitivity as they are typed."""

import json
import shutil

import pytest

from slo_bench.harness.experiments.experiment import Experiment

LOAD = {"systems": ["vllm"], "rates": [3.0], "seeds": 2, "requests": (120,), "records": "csv"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A baseline, its copy, a slower one, one of another model."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in {
        "base": {},
        "same": {},
        "slow": {"host_s": (0.004,)},
        "other": {"workload": ("azure-conv",)},
        "failing": {"failures": ("0@1..9",)},
        "both": {"systems": ["vllm", "orca"]},
    }.items():
        Experiment(**{**LOAD, **changes}).run(folder / name, jobs=1)
    return folder


def test_gate_of_equal_runs_passes(slo_bench, runs):
    code, out, _ = slo_bench("gate", runs / "base", runs / "same")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "simulated: llama-3.1-8b on a100-80g"
    assert lines[1].startswith("workload: sharegpt (mean ")
    assert lines[-1].startswith("passed: nothing")


def test_table_that_cannot_be_written_is_told(slo_bench, runs):
    table = runs / "base" / "cells.csv" / "table.md"
    code, _, err = slo_bench("gate", runs / "base", runs / "same", "--markdown", table)
    assert (code, f"cannot write {table}: " in err.replace("\n", "")) == (2, True)


@pytest.mark.slow
def test_gate_of_a_slower_run_fails_with_exit_code_1(slo_bench, runs):
    code, out, _ = slo_bench("gate", runs / "base", runs / "slow", "--metric", "tpot_p50,ttft_p50")
    assert code == 1
    assert "FAIL  tpot_p50 (3 req/s)" in out
    assert "failed: " in out
    code, out, _ = slo_bench(
        "gate", runs / "base", runs / "slow", "--metric", "tpot_p50", "--max-regression", "90%"
    )
    assert code == 0


def test_a_gate_told_to_compare_unlike_conditions(slo_bench, runs):
    code, out, _ = slo_bench("compare", runs / "base", runs / "failing")
    assert (code, "careful: failures differs: none in base, 0@1..9 in failing." in out) == (0, True)
    allowed = ("--allow-different", "failures")
    code, out, _ = slo_bench("gate", runs / "base", runs / "failing", *allowed)
    assert (code, "failures: none → 0@1..9" in out) == (1, True)


@pytest.mark.slow
def test_gate_compare_and_report_name_lost_rows(slo_bench, runs, tmp_path):
    """A copy that was cut off between two rows, or a run that was interrupted."""
    cut = tmp_path / "cut"
    shutil.copytree(runs / "both", cut)
    table = cut / "cells.csv"
    table.write_bytes(b"".join(table.read_bytes().splitlines(keepends=True)[:-1]))
    warning = (
        "cut has 3 of 4 cells: it was interrupted, or rows of cells.csv are lost; continue with "
    )
    warning += f"slo-bench run --resume --out {cut}"
    code, _, err = slo_bench("gate", runs / "both", cut)
    assert (code, "not comparable: " + warning in " ".join(err.split())) == (2, True)
    code, out, _ = slo_bench("compare", runs / "both", cut)
    assert (code, f"careful: {warning}." in " ".join(out.split())) == (0, True)
    code, out, _ = slo_bench("report", cut)
    assert (code, f"careful: {warning}." in out) == (0, True)
    assert warning in (cut / "report.html").read_text("utf-8")
    code, out, _ = slo_bench("run", "--resume", "--out", cut)
    assert (code, "careful" in out) == (0, False)
    assert slo_bench("gate", runs / "both", cut)[0] == 0


def test_gate_json_tells_the_verdict(slo_bench, runs):
    options = ("--metric", "tpot_p50", "--json")
    code, out, _ = slo_bench("gate", runs / "base", runs / "slow", *options)
    verdict = json.loads(out)
    assert (code, verdict["verdict"], verdict["passed"]) == (1, "failed", False)
    (regression,) = verdict["regressions"]
    assert regression["regression"] > 0.05
    assert regression["regression_low"] <= regression["regression"]
    code, out, _ = slo_bench("gate", runs / "base", runs / "other", *options)
    assert code == 2
    assert json.loads(out)["verdict"] == "not comparable"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("base", "other"), "not comparable: workload differs: sharegpt in base, azure-conv in"),
        (("base", "failing"), "failures differs: none in base, 0@1..9 in failing; to compare them"),
        (("base", "base", "--allow-different", "failing"), "unknown condition 'failing'"),
        (("base", "base", "--rates", "9"), "no cell at 9"),
        (("base", "same", "--max-regression", "5"), "is written 5%"),
        (("base", "same", "--metric", "speed"), "unknown metric"),
        (("base", "nowhere"), "there is no"),
        (("base", "same", "--systems", "vllm"), "two names"),
        (("base", "same", "--slo", "ttft=uniform(1,2)"), "fixed bounds"),
    ],
)
def test_gate_that_cannot_judge_exits_2(slo_bench, runs, arguments, why):
    paths = [runs / arguments[0], runs / arguments[1]]
    code, out, err = slo_bench("gate", *paths, *arguments[2:])
    assert code == 2
    assert why in err
    assert "Traceback" not in err + out


def test_compare_writes_text_and_page(slo_bench, runs, tmp_path):
    code, out, _ = slo_bench("compare", runs / "base", runs / "slow", "--html", "page.html")
    assert code == 0
    assert out.splitlines()[0] == "simulated: llama-3.1-8b on a100-80g"
    assert "slow against base" in " ".join(out.splitlines()[-3:])
    assert "Comparison by slo-bench" in (tmp_path / "page.html").read_text()
    code, out, _ = slo_bench("compare", runs / "both", "--systems", "vllm,orca", "--json")
    assert code == 0
    assert {row["metric"] for row in json.loads(out)["rows"]} >= {"attainment", "ttft_p99"}
    code, _, err = slo_bench("compare", runs / "both")
    assert code == 2
    assert "--systems" in err


def test_explain_request_writes_its_stages_and_trace(slo_bench, runs, tmp_path):
    cell = "vllm_rate-3_seed-0"
    code, out, _ = slo_bench(
        "explain", runs / "base", "slowest", "--cell", cell, "--trace", "t.json"
    )
    assert code == 0
    assert "Time by part" in out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    code, out, _ = slo_bench("explain", runs / "base", "5", "--cell", cell, "--json")
    explanation = json.loads(out)
    assert (explanation["request"], explanation["doubt"]) == (5, None)
    for arguments, why in [
        (("5",), "--cell"),
        (("--cell", cell), "--cell and --trace go with a REQUEST"),
        (("5", "--cell", "nobody"), "unknown cell"),
        (("500", "--cell", cell), "from 0 to 119"),
    ]:
        code, _, err = slo_bench("explain", runs / "base", *arguments)
        assert code == 2
        assert why in err


def test_explain_run_folder_prints_json(slo_bench, runs):
    code, out, _ = slo_bench("explain", runs / "both", "--json")
    assert code == 0
    explained = json.loads(out)
    assert explained["decisions"] == []  # nothing was measured
    for reason in explained["reasons"]:
        assert reason["winner"]["attainment"] > reason["runner_up"]["attainment"]
    code, _, err = slo_bench("explain", runs / "base")
    assert code == 2
    assert "takes two systems" in " ".join(err.split())


@pytest.mark.slow
def test_sensitivity_command_writes_crossings(slo_bench, tmp_path):
    small = ("--requests", "60", "--seeds", "2", "-s", "vllm,orca")
    code, out, _ = slo_bench(
        "sensitivity",
        *small,
        "--perturb",
        "host=2",
        "--perturb",
        "step-time=0.8,1.2",
        "--html",
        "s.html",
    )
    assert code == 0
    assert "By capacity" in out
    page = (tmp_path / "s.html").read_text()
    assert 'data-figure="sensitivity"' in page
    code, out, _ = slo_bench(
        "sensitivity",
        *small,
        "--perturb",
        "host=2",
        "--metric",
        "ttft_p99",
        "--rate",
        "3",
        "--json",
    )
    printed = json.loads(out)
    assert [point["value"] for point in printed["points"]] == [2.0]
    assert set(printed["base"]["means"]) == {"vllm", "orca"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--metric", "ttft_p99"), "give --rate"),
        (("--rate", "3"), "leave --rate out"),
        (("--perturb", "moon=1"), "unknown perturbation"),
        (("--perturb", "host", "--perturb", "host=2"), "given twice"),
        (("-s", "vllm"), "two systems"),
        (["--server-version", "vlm-0.7"], "engine"),
        (("--workload", "nothing"), "unknown workload"),
    ],
)
def test_sensitivity_command_refuses_impossible_options(slo_bench, arguments, why):
    code, _, err = slo_bench("sensitivity", "--requests", "20", "--seeds", "1", *arguments)
    assert code == 2
    assert why in err


@pytest.mark.parametrize("command", ["compare", "gate", "explain", "sensitivity"])
def test_help_of_comparing_commands_has_examples(slo_bench, command):
    code, out, _ = slo_bench(command, "--help")
    assert code == 0
    assert f"slo-bench {command}" in out.partition("Examples:")[2]
