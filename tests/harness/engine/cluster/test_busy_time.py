"""Time for which GPUs compute: without the time before an instance is ready, and that it waits."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.harness.core.cluster_policy import Failure
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.systems import SYSTEMS
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
