"""The table of plans: one line each, with what is not at its default."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from slo_bench.cli import interrupts
from slo_bench.cli.main import app
from slo_bench.cli.output.plan_output import _listed_files, _screen
from slo_bench.harness.experiments.experiment import Experiment

ROW = {
    "system": "vllm", "gpu": "a100-80g", "gpus": 4, "instances": 2, "tp": 2, "pp": 1, "dp": 1,
    "weight_dtype": "bf16", "kv_dtype": "bf16", "deployment": {},
    "parameters": {"max_num_batched_tokens": 2048}, "usd_per_hour": 13.7,
    "catalogue_usd_per_hour": 13.7, "rate_rps": 10.0, "attainment": 0.9987, "capacity_rps": 14.3,
    "low_rps": 12.0, "high_rps": 14.4, "outcome": "found", "step_time": "fitted",
    "keeps_probability": 0.93,
}  # fmt: skip

QUESTION = "Cheapest GPUs for 10 req/s:"


def lines(*rows):
    written = io.StringIO()
    experiment = Experiment(systems=["vllm"], model="llama-3.1-8b")
    Console(file=written, width=80).print(_screen(QUESTION, rows, experiment, []))
    _, *table, answer = written.getvalue().splitlines()
    assert answer.startswith("Cheapest: ")
    return [line for line in table if not line.startswith("──")]


def test_plan_at_defaults_is_one_line_without_settings():
    _, line = lines(ROW)
    assert " ".join(line.split()) == "4 × a100-80g, 2 × tp2 13.70 99.9 % 14.3 (12–14.4) +43% 93%"


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"parameters": {"max_num_batched_tokens": 8192}}, "max_num_batched_tokens=8192"),
        ({"weight_dtype": "fp8"}, "weight_dtype=fp8"),
        ({"deployment": {"block_size": 32}}, "block_size=32"),
        ({"step_time": "unfitted"}, "a100-80g *"),
    ],
)
def test_plan_shows_what_is_not_at_its_default(changes, shown):
    assert shown in " ".join(lines(ROW | changes)[1:])


def test_plans_of_several_systems_name_theirs():
    _, first, second = lines(ROW, ROW | {"system": "sarathi", "parameters": {}})
    assert "vllm" in first
    assert "sarathi" in second


def test_setting_of_a_plan_stands_below_it_where_the_line_is_full():
    row = ROW | {"gpu": "l40s", "instances": 4, "tp": 1}
    _, line, setting = lines(row | {"parameters": {"max_num_batched_tokens": 8192}})
    assert line.startswith("4 × l40s, ")
    assert setting == "max_num_batched_tokens=8192"


def test_files_of_a_folder_are_listed_after_it():
    files = [Path("plans/launch.sh"), Path("plans/compose.yaml"), Path("plans.html")]
    assert _listed_files(files) == "plans/ (launch.sh, compose.yaml), plans.html"


@pytest.mark.parametrize("kept", [False, True])
def test_interrupted_plan_names_its_folder_only_when_a_level_is_kept(tmp_path, monkeypatch, kept):
    out = tmp_path / "plan"
    ways_on = []

    def interrupted(*_):
        if kept:
            out.mkdir()
        ways_on.append(interrupts._way_on())
        raise KeyboardInterrupt

    monkeypatch.setattr("slo_bench.tuner.planning.plan_search.plan_cheapest", interrupted)
    command = ["plan", "--model", "llama-3.1-8b", "--rate", "1", "--jobs", "1", "--out", str(out)]
    CliRunner().invoke(app, command)
    assert (str(out) in ways_on[0]) is kept
