"""Time for which GPUs compute: without the time before an instance is ready, and that it waits."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.harness.core.cluster_policy import Failure
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.harness.results.metrics import _usage_by_role
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-3.1-8b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model


def load(*arrival_s: float, prompt_tokens: int = 200) -> Workload:
    return Workload(
        arrival_s=np.array(arrival_s),
        prompt_tokens=np.full(len(arrival_s), prompt_tokens),
        output_tokens=np.full(len(arrival_s), 50),
    )


@pytest.mark.parametrize("instances", [1, 2])
def test_instance_is_not_busy_before_it_is_ready(instances):
    late, early = (
        simulate(load(60.0), SYSTEMS["vllm"], PLACEMENT, STEP_TIME, instances=instances, ready_s=s)
        for s in (50.0, 0.0)
    )
    assert late.records.finish_s == early.records.finish_s
    assert late.totals.gpu_busy_s == pytest.approx(early.totals.gpu_busy_s)
    assert late.totals.busy_s == pytest.approx(early.totals.busy_s)
    assert 0 < late.totals.gpu_busy_s < 2.0


def test_failed_instance_is_not_busy():
    result = simulate(
        load(0.0, 60.0),
        SYSTEMS["vllm"],
        PLACEMENT,
        STEP_TIME,
        failures=[Failure(0, 10.0, 50.0)],
    )
    assert 0 < result.totals.gpu_busy_s < 4.0


def test_prefill_instance_waiting_for_decode_blocks_is_not_busy():
    """Its prompts hold all its blocks until the decode instance has room for them."""
    small = Placement(model("llama-3.1-8b"), gpu("a100-80g"), fixed_num_gpu_blocks=150)
    system = SYSTEMS["distserve"].with_parameters(prefill_instances=1)
    workload = load(*[0.0] * 12, prompt_tokens=1000)
    result = simulate(workload, system, small, STEP_TIME, instances=2)
    prefill, decode = result.instances
    assert (result.records.output_tokens == 50).all()
    prompts_s = 12 * STEP_TIME.step_s(0, 0, ((0, 1000),))
    assert prefill.busy_s > 2 * prompts_s  # it waits for room for most of the run
    gpu_busy_s = result.totals.gpu_busy_s
    assert prompts_s < gpu_busy_s < decode.busy_s + 1.5 * prompts_s


def test_each_role_has_what_a_monitor_shows():
    """Time in which GPUs compute, and memory that is taken whether or not it is in use."""
    system = SYSTEMS["distserve"].with_parameters(prefill_instances=1)
    result = simulate(load(0.0, 5.0, 10.0), system, PLACEMENT, STEP_TIME, instances=2)
    prefill, decode = result.instances
    makespan_s = result.totals.makespan_s
    prompts_s = 3 * STEP_TIME.step_s(0, 0, ((0, 200),))
    assert prefill.gpu_utilisation == pytest.approx(prompts_s / makespan_s, rel=1e-3)
    busy_s = (prefill.gpu_utilisation + decode.gpu_utilisation) * makespan_s
    assert busy_s == pytest.approx(result.totals.gpu_busy_s)
    assert decode.gpu_utilisation > 5 * decode.compute_usage  # steps of one request read weights
    # 0.9 of the memory less the room for activations; three short requests use next to nothing.
    assert 0.85 < prefill.memory_reserved <= 0.9
    assert prefill.memory_reserved == decode.memory_reserved
    weights = PLACEMENT.weight_bytes_per_gpu / PLACEMENT.gpu.memory_bytes
    assert weights < decode.memory_usage < weights + 0.01
    columns = _usage_by_role(result)
    assert columns["gpu_utilisation_mean_decode"] == decode.gpu_utilisation
    assert columns["memory_reserved_mean_prefill"] == prefill.memory_reserved
