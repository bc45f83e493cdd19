"""Several models on shared GPUs, from settings to rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.slo import parse_slo

SETTINGS: dict[str, Any] = {
    "systems": ["prism", "muxserve", "qlm", "static-partition"],
    "models": "fleet(llama-3.1-8b*2, llama-3.2-1b, active_s=20, idle_s=20)",
    "workload": "azure-conv",
    "gpu": "h100-80g",
    "gpus": 2,
    "rates": [4.0],
    "duration_s": 30.0,
    "slo": "ttft=1; llama-3.2-1b:ttft=0.2",
    "seeds": 1,
}


def test_run_of_several_models_has_a_row_for_each_system(tmp_path: Path) -> None:
    result = Experiment(**SETTINGS).run(tmp_path / "run", jobs=1)
    rows = result.rows()
    assert [row["system"] for row in rows] == SETTINGS["systems"]
    assert {row["model"] for row in rows} == {"3 models"}
    assert {row["gpus"] for row in rows} == {2}
    for row in rows:
        assert row["finished"] == row["requests"]
        assert 0 < row["mfu"] < 1
        assert 0 < row["kv_cache_usage_peak"] < 1
    by_system = {row["system"]: row["attainment"] for row in rows}
    assert by_system["qlm"] < by_system["prism"]
    again = Experiment.load(tmp_path / "run" / "experiment.toml").run(tmp_path / "again", jobs=1)
    assert again.rows() == rows


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"systems": ["vllm"]}, "vllm serves one model"),
        ({"models": None}, "say which"),
        ({"rates": None}, "give rates"),
        ({"tp": 2}, "tp is for one model"),
        ({"router": "round-robin"}, "router is for one model"),
        ({"models": "fleet(llama-3.1-9b)"}, r"llama-3\.1-9b"),
        ({"models": "fleet(llama-3.1-70b)"}, "needs 4 GPUs"),
    ],
)
def test_multi_model_plan_refuses_impossible_settings(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SloBenchError, match=says):
        Experiment(**{**SETTINGS, "systems": ["prism"], **changes}).plan()


def test_derive_slo_prints_slos_of_each_model() -> None:
    arguments = ["derive-slo", "--models", "fleet(llama-3.1-8b*2, llama-3.2-1b)", "--rate", "2"]
    arguments += ["--duration", "120"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    entries = parse_slo(result.output.strip()).entries
    assert [entry.class_name for entry in entries] == ["llama-3.2-1b", "llama-3.1-8b"]
    assert all(set(entry.bounds) == {"ttft", "tpot"} for entry in entries)
    wrong = CliRunner().invoke(app, [*arguments, "--bound", "e2e"])
    assert wrong.exit_code != 0
