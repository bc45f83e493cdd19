"""Several models on shared GPUs, from settings to rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.results.read_run import read_run
from slo_bench.reports.figures.levels import combine
from slo_bench.reports.pages.run_page import write_report
from slo_bench.reports.pages.summary_page import careful_lines, unplaced_text
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


def test_models_that_stand_on_no_gpu_are_named(tmp_path: Path) -> None:
    """Two GPUs have no room for 14 models at a time; Prism loads them in turns."""
    crowded = {
        **SETTINGS,
        "systems": ["muxserve", "prism"],
        "models": "fleet(llama-3.1-8b*14)",
        "rates": [8.0],
        "slo": "ttft=1",
    }
    result = Experiment(**crowded).run(tmp_path / "run", jobs=1)
    unplaced = {row["system"]: row["models_unplaced"] for row in result.rows()}
    assert unplaced["muxserve"] > 0
    assert unplaced["prism"] == 0
    cells = combine([read_run(tmp_path / "run")])
    models = "models" if unplaced["muxserve"] > 1 else "model"
    assert unplaced_text(cells) == f"muxserve at 8 req/s: {unplaced['muxserve']} {models}"
    lost = "Models on no GPU, all their requests missed: muxserve"
    assert any(line.startswith(lost) for line in careful_lines(cells))
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "Models on no GPU." in page


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


def test_a_closed_loop_of_several_models_is_refused_as_such(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,model\n0,9,9,a\n1,9,9,b\n")
    models = "assign(llama-3.2-1b, llama-3.1-8b)"
    settings = {"models": models, "workload": str(trace), "requests": 2}
    closed = {"rates": None, "duration_s": None, "arrivals": "concurrency(1)"}
    more = {"slo": "ttft=1", "redraw_arrivals": True, "systems": ["prism"]}
    experiment = Experiment(**{**SETTINGS, **settings, **closed, **more})
    with pytest.raises(SloBenchError, match="leave sessions and concurrency out"):
        experiment.run(tmp_path / "run", jobs=1)


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
