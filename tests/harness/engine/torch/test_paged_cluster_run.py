"""`run` over several instances of the torch engine, and what it refuses."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench import SloBenchError
from slo_bench.cli.main import app

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

pytestmark = pytest.mark.torch

RUN = """
systems = ["{system}"]
backend = "torch"
workload = ["{workload}"]
rates = [20.0]
requests = 6
seeds = 1
instances = [2]
num_gpu_blocks = [400]
{more}
"""


def run(
    tmp_path: Path, system: str, more: str = '[server]\nclock = "cpu"', workload: str = "alpaca"
) -> BaseException | None:
    file = tmp_path / "several.toml"
    file.write_text(RUN.format(system=system, workload=workload, more=more))
    arguments = ["run", str(file), "--no-report", "--out", str(tmp_path / "run")]
    return CliRunner().invoke(app, arguments).exception


def test_run_over_prefill_and_decode_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    assert run(tmp_path, "distserve") is None
    (row,) = csv.DictReader((tmp_path / "run" / "cells.csv").read_text().splitlines())
    assert float(row["count_handovers"]) == 6
    assert row["valid"] == "True"


@pytest.mark.parametrize(
    ("system", "more", "says"),
    [
        ("fifo", "", "static batches"),
        ("vllm", "[server]\nworkers = 1", "processes of one instance"),
        ("vllm", "[server]\nstep_log = true", "leave instances at 1"),
        ("vllm", 'gpu = ["cuda:0"]', "on the CPU"),
        ("distserve", "[parameters.distserve]\nnodes = [2]", "distserve.nodes"),
        ("distserve", "[parameters.distserve]\nprefill_tp = [2]", "GPUs"),
        ("llumnix", "", "simulator alone"),
    ],
)
def test_settings_impossible_with_several_processes_are_refused(
    system: str, more: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    problem = run(tmp_path, system, more)
    assert isinstance(problem, SloBenchError)
    assert says in str(problem)


def test_kv_store_without_folders_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path / "home"))
    problem = run(tmp_path, "banaserve", workload="mooncake-conversation")
    assert isinstance(problem, SloBenchError)
    assert "server.kv_store" in str(problem)
