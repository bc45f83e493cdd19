"""A level of a search is the same cell as in a run."""

import numpy as np
import pytest

from slo_bench.harness.experiments.execution.cells import run_cell, workload_of
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.results.cell_files import Choice
from slo_bench.reports.terminal.capacity_answer import failed_lines
from slo_bench.tuner.capacity import capacity_cells, capacity_checkpoint
from slo_bench.tuner.capacity.capacity_cells import Simulator
from slo_bench.tuner.capacity.search_options import Capacity

ONE = {"systems": ["banaserve"], "workload": "sharegpt"}
SEVERAL = {
    "systems": ["prism"],
    "workload": "sharegpt",
    "models": "fleet(llama-3.1-8b*2, qwen2.5-3b)",
    "gpus": 2,
}


@pytest.mark.parametrize("settings", [ONE, SEVERAL], ids=["one-model", "several-models"])
def test_level_row_equals_the_row_of_its_cell_in_a_run(settings, tmp_path):
    plan = Experiment(**settings, rates=[2.0], requests=40, seeds=1).plan()
    (spec,) = plan.cells
    simulator = Simulator(tmp_path / "search", records="csv")
    workload = workload_of(spec)
    row = simulator.row(spec, workload, simulator.measure(spec, workload, None))
    assert row == pytest.approx(run_cell(spec, tmp_path / "run"), nan_ok=True)
    files = {path.relative_to(tmp_path / "run") for path in (tmp_path / "run").rglob("*.gz")}
    assert files
    for file in files:
        assert (tmp_path / "search" / file).read_bytes() == (tmp_path / "run" / file).read_bytes()


@pytest.mark.parametrize("system", ["vllm", "fastertransformer"])
def test_run_without_a_folder_has_the_times_of_one_whose_state_is_sampled(system, tmp_path):
    (spec,) = Experiment(systems=[system], rates=[2.0], requests=60, seeds=1).plan().cells
    workload = workload_of(spec)
    sampled = Simulator(tmp_path).measure(spec, workload, None).result
    bare = Simulator().measure(spec, workload, None).result
    assert len(bare.timeline.time_s) < 10 < len(sampled.timeline.time_s)
    for name in ("first_scheduled_s", "first_token_s", "finish_s"):
        times_s = getattr(bare.records, name)
        assert times_s == pytest.approx(getattr(sampled.records, name), rel=1e-12)


def test_failed_requests_are_counted_without_those_of_overload():
    faults = ["", "malformed", "status", "time-limit"]
    columns = {
        "status": np.array([200, 200, 429, 400, 500, 200]),
        "fault": Choice(np.array([0, 1, 2, 2, 2, 3]), [*faults, "aborted", "stalled"]),
        "detail": Choice(np.array([0, 1, 0, 2, 2, 0]), ["", "no JSON", "too long"]),
    }
    assert capacity_cells._failed(columns) == {
        "refused": 1,
        "refused_because": "too long",
        "failed": 3,
        "failed_because": "too long",
    }
    assert capacity_cells._failed({}) == {}


def test_capacity_says_first_that_faults_decide_its_interval():
    row = {
        **{"search": "server", "backend": "openai", "target": 0.9, "capacity_rps": 22.7},
        **{"low_rps": 17.6, "high_rps": 24.5, "requests_spent": 1200, "wall_s": 60.0},
        **{"stopped": "done", "levels": [], "failed": 108, "failed_because": "usage"},
    }
    assert failed_lines([row]) == ["server: 108 of 1,200 requests failed (usage)."]
    (line,) = failed_lines([{**row, "faults_decide": True}])
    assert "these faults, not latency, decide the interval of ≥ 0.9" in line
    assert failed_lines([{**row, "failed": 0}]) == []
    surplus = "server: 1,100 of 1,200 answers have more tokens than requested."
    assert failed_lines([{**row, "failed": 0, "surplus_outputs": 1100}] * 2) == [surplus]
    levels = [{"rate_rps": 20.0, "requests": 1000, "failed": failed} for failed in (90, 10)]
    capacity = Capacity(0.9, 22.7, 17.6, 24.5, precise=False)
    assert capacity_checkpoint._faults_decide(capacity, levels[:1])
    assert not capacity_checkpoint._faults_decide(capacity, levels[1:])
