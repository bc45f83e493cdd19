"""A level of a search is the same cell as in a run."""

import pytest

from slo_bench.harness.experiments.execution.cells import run_cell, workload_of
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.tuner.capacity.capacity_cells import Simulator

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
