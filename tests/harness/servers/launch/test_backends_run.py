"""`slo-bench run --backend vllm`: servers started, measured and stopped, everything kept."""

from __future__ import annotations

import csv
import json

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app

pytestmark = pytest.mark.backends


@pytest.fixture
def ran(installed, tiny_model, tmp_path):
    installed("vllm")
    trace = tmp_path / "trace.csv"
    rows = [f"{k * 0.05},{40 + k},{20 + k}" for k in range(12)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    words = ["run", "--backend", "vllm", "--model", str(tiny_model("vllm")), "--system", "vllm"]
    words += ["--system", "edf", "--workload", str(trace), "--replay-speed", "1", "--seeds", "1"]
    words += ["--slo", "e2e=1000", "--server-arg=--no-enable-prefix-caching", "--records", "csv"]
    words += [
        "--sweep",
        "num_gpu_blocks=64",
        "--sweep",
        "block_size=32",
        "--out",
        str(tmp_path / "out"),
        "--no-report",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return tmp_path / "out"


def test_stock_and_patched_are_measured(ran):
    with (ran / "cells.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert [cell["system"] for cell in cells] == ["vllm", "edf"]
    for cell in cells:
        assert cell["backend"] == "vllm"
        assert cell["gpu"] == "cpu"
        assert float(cell["attainment"]) == 1.0
        assert int(cell["server_output_tokens"]) == sum(20 + k for k in range(12))
        assert int(cell["truncated_outputs"]) == 0
        [kept] = (ran / "servers").glob(f"{cell['cell']}.metrics")
        assert "vllm:generation_tokens_total" in kept.read_text()
    assert {path.name for path in (ran / "servers").glob("*.log")} == {"vllm.log", "edf.log"}
    assert "PolicyScheduler" in (ran / "servers" / "edf.log").read_text()
    assert "PolicyScheduler" not in (ran / "servers" / "vllm.log").read_text()
    assert json.loads((ran / "environment.json").read_text())["command"] is not None
