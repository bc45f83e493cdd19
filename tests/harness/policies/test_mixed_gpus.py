"""Two kinds of GPU in one cluster: placement, step times, cost, and a router that knows them."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.execution.cells import simulated, workload_of
from slo_bench.predictors.specs import gpu
from slo_bench.workloads.errors import SloBenchError


def experiment(**changes):
    parameters = {"second_instances": 1, "second_gpu": "a100-80g"} | changes
    return Experiment(
        systems=["mixed-gpus"],
        rates=[6.0],
        requests=200,
        seeds=1,
        instances=2,
        gpu="h100-80g",
        parameters={"mixed-gpus": parameters},
    )


def result(**changes):
    (cell,) = experiment(**changes).plan().cells
    workload = workload_of(cell)
    return workload, simulated(cell, workload, None)


def test_each_instance_has_the_gpu_and_the_step_times_of_its_role():
    _, run = result(routing="requests")
    places = [instance.placement for instance in run.instances]
    assert [place.gpu.name for place in places] == ["h100-80g", "a100-80g"]
    assert [instance.role for instance in run.instances] == ["first", "second"]
    records = run.records
    alone = {}
    for kind in ("h100-80g", "a100-80g"):
        single_gpu = Experiment(systems=["vllm"], gpu=kind, rates=[0.01], requests=5, seeds=1)
        (cell,) = single_gpu.plan().cells
        workload = workload_of(cell)
        alone[kind] = float(np.nanmedian(simulated(cell, workload, None).records.tpot_s))
    first = float(np.nanmedian(records.tpot_s[records.instance == 0]))
    second = float(np.nanmedian(records.tpot_s[records.instance == 1]))
    assert first / second == pytest.approx(alone["h100-80g"] / alone["a100-80g"], rel=0.15)


def test_routing_by_step_times_sends_more_to_the_fast_gpu():
    _, counted = result(routing="requests")
    _, timed = result(routing="step-times")
    share = [(run.records.instance == 0).mean() for run in (counted, timed)]
    assert share[1] > share[0]
    assert timed.records.e2e_s.mean() < counted.records.e2e_s.mean()


def test_cost_sums_both_gpu_kinds(tmp_path):
    (row,) = experiment().run(tmp_path / "run").rows()
    expected = gpu("h100-80g").price_per_hour_usd + gpu("a100-80g").price_per_hour_usd
    assert row["cost_usd_per_hour"] == pytest.approx(expected)
    assert row["gpus"] == 2


def test_first_kind_without_an_instance_is_refused():
    with pytest.raises(SloBenchError, match="leave none on h100-80g"):
        result(second_instances=2)
