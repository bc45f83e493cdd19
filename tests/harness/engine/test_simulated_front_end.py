"""Requests pass the front end of the instance that they are sent to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slo_bench.harness.engine.cluster.cluster import Cluster
from slo_bench.harness.engine.compiled_core import core_is_compiled
from slo_bench.harness.engine.simulator.simulate import simulate, simulate_blocks
from slo_bench.harness.policies.systems import system
from slo_bench.predictors.operators.assembly import default_step_time
from slo_bench.predictors.operators.front_end import FrontEnd
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.workloads.blocks import WorkloadBlocks
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-3-8b"), gpu("a100-80g"))
STEP_TIME = default_step_time(PLACEMENT).model
PASSED = FrontEnd("a server", request_s=0.5, latency_s=0.25, token_s=1e-3)
PASSING_S = 0.25 + 16e-3


def served(workload, **settings):
    result = simulate(workload, system("vllm"), PLACEMENT, STEP_TIME, **settings)
    return result.records


def together(n):
    tokens = np.full(n, 16)
    return Workload(np.zeros(n), tokens, tokens)


def test_a_lone_request_is_later_by_the_front_end():
    plain, passed = (served(together(1), front_end=passed) for passed in (None, PASSED))
    for name in ("first_token_s", "finish_s"):
        later_s = getattr(passed, name)[0] - getattr(plain, name)[0]
        assert later_s == pytest.approx(0.5 + PASSING_S)


@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])  # apart, and together
@pytest.mark.parametrize("instances", [1, 2])
def test_requests_queue_at_the_front_end_of_each_instance(router, instances):
    records = served(together(4), instances=instances, router=router, front_end=PASSED)
    queued = np.round((records.ttft_s - PASSING_S) / 0.5)
    assert queued.max() == 4 / instances


def test_a_request_that_follows_another_passes_alone():
    workload = Workload(
        np.zeros(2), np.full(2, 16), np.full(2, 16), follows=np.array([-1, 0]), think_s=np.zeros(2)
    )
    records = served(workload, front_end=PASSED)
    assert records.ttft_s[1] == pytest.approx(records.ttft_s[0], rel=0.05)
    without_prompt_s = records.finish_s[0] - 16e-3
    assert records.arrival_s[1] == pytest.approx(without_prompt_s)  # not before the answer is there


def closed_loop(clients, n=300):
    rng = np.random.default_rng(clients)
    prompts, outputs = rng.integers(1, 6000, n), rng.integers(1, 20, n)
    return Workload(np.zeros(n), prompts, outputs, concurrency=clients)


@pytest.mark.parametrize("clients", [1, 4, 30])
@pytest.mark.parametrize(
    "settings", [{}, {"instances": 2}, {"instances": 3, "router": "least-loaded"}]
)
def test_clients_of_a_closed_loop_have_one_request_each(clients, settings):
    passed = replace(PASSED, token_s=0.0)
    records = served(closed_loop(clients), front_end=passed, **settings)
    moments = np.sort(records.arrival_s)
    began = np.searchsorted(moments, moments, side="right")
    ended = np.searchsorted(np.sort(records.finish_s), moments, side="right")
    assert (began - ended).max() == clients


@pytest.mark.skipif(core_is_compiled(), reason="compiled methods cannot be replaced")
def test_a_closed_loop_on_one_instance_is_the_same_among_others(monkeypatch):
    load = closed_loop(16)
    alone = served(load, front_end=PASSED)
    monkeypatch.setattr(Cluster, "_apart", lambda cluster: False)
    records = served(load, front_end=PASSED)
    for name in ("arrival_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(getattr(records, name), getattr(alone, name), rtol=1e-12)


def test_requests_in_blocks_pass_it_too():
    n = 50
    arrival_s = np.sort(np.random.default_rng(0).uniform(0, 60, n))
    load = Workload(arrival_s, np.full(n, 16), np.full(n, 16))
    blocks = []
    simulate_blocks(
        WorkloadBlocks.of(lambda: iter([load.arrival_s]), lambda: iter([load])),
        system("vllm"),
        PLACEMENT,
        STEP_TIME,
        blocks.append,
        front_end=PASSED,
    )
    records = served(load, front_end=PASSED)
    np.testing.assert_array_equal(blocks[0].records.finish_s, records.finish_s)
