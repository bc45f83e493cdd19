"""No system idles while somebody waits; those that fill batches leave no seat to who would fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference import plain
from reference.plain import PlainInstance
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.engine.simulator import static
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-3-8b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model


class SmallMemory:
    """Llama on an A100 with few blocks."""

    num_cpu_blocks, block_size, swap_s_per_block = 32, 16, 0.0004
    tp = pp = dp = lanes = 1
    kv_offload_gib = kv_disk_gib = 0.0
    state_slots = None
    model = PLACEMENT.model

    def __init__(self, num_gpu_blocks: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks


CONTINUOUS = [
    *("vllm", "vllm-v0", "vllm-swap", "sarathi", "edf", "orca", "fastertransformer", "sglang"),
    *("adaptivellm", "ascendra-lp", "prism-queue"),
]
STATIC = ["fifo", "sjf", "ljf", "s3", "slo-odbs", "slo-dbs", "odbs"]
SMALL_BATCHES = {"max_num_seqs", "max_batch", "max_running_requests"}


def small(name, batch):
    system = SYSTEMS[name]
    return system.with_parameters(**dict.fromkeys(SMALL_BATCHES & set(system.parameters()), batch))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rate = draw(st.sampled_from([1.0, 5.0, 40.0]))
    return Workload(
        np.cumsum(rng.exponential(1 / rate, n)),
        rng.integers(1, 400, n),
        rng.integers(1, 100, n),
        ttft_slo_s=rng.uniform(0.05, 3, n),
    )


class Busy:
    """When the device computes, as the engine books it."""

    def __init__(self, monkeypatch, engine):
        self.spans = []
        booked = engine.occupy

        def occupy(stages, now_s, duration_s):
            end_s = booked(stages, now_s, duration_s)
            self.spans.append((now_s, end_s))
            return end_s

        monkeypatch.setattr(engine, "occupy", occupy)

    def pauses(self):
        """Before, between and after its work."""
        ends = [-np.inf, *(end for _, end in self.spans)]
        begins = [*(begin for begin, _ in self.spans), np.inf]
        return [(a, b) for a, b in zip(ends, begins, strict=True) if b > a + 1e-9]


@pytest.mark.parametrize("name", [*CONTINUOUS, *STATIC])
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    workload=workloads(), blocks=st.sampled_from([70, 130, 400]), batch=st.sampled_from([2, 7, 64])
)
def test_no_request_waits_while_the_device_is_idle(name, workload, blocks, batch):
    with pytest.MonkeyPatch.context() as monkeypatch:
        busy = Busy(monkeypatch, static if name in STATIC else plain)
        system, placement = small(name, batch), SmallMemory(blocks)
        records = simulate(
            workload, system, placement, STEP_TIME, overlong_requests="reject", engine=PlainInstance
        ).records
    done = records.outcome == Outcome.FINISHED
    assert done.any() or (records.outcome == Outcome.REJECTED).all()
    arrival_s, finish_s = records.arrival_s[done], records.finish_s[done]
    for begin_s, end_s in busy.pauses():
        here = (arrival_s < end_s - 1e-9) & (finish_s > begin_s + 1e-9)
        assert not here.any()


@pytest.mark.parametrize(
    "name", ["vllm", "vllm-v0", "sarathi", "edf", "prism-queue", "ascendra-lp"]
)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    workload=workloads(), blocks=st.sampled_from([70, 130, 400]), batch=st.sampled_from([2, 7, 64])
)
def test_no_request_that_fits_waits_after_an_admission(name, workload, blocks, batch):
    """After each admission: no seat, no blocks, or no tokens for who is next; where the policy
    passes over who does not fit, no blocks for anybody.
    """
    refill = PlainInstance._enter_who_fits

    def checked(self, limits):
        again = refill(self, limits)
        batch_now = len(self.decoding) + len(self.prefilling) + len(self.pending_free)
        pending = sum(r.target_tokens - r.kv_tokens for r in self.prefilling)
        room = limits.token_budget - (len(self.decoding) if limits.mixed_batches else 0)
        growth_blocks = self._growth(limits) if limits.mixed_batches or not self.prefilling else 0
        free = self.kv_manager.free - growth_blocks - limits.watermark_blocks
        if not self.waiting.live:
            return again
        need = self.kv_manager.blocks
        r = self._next_waiting()
        whole = limits.chunked or not pending or pending + r.target_tokens <= room
        seat = batch_now < limits.max_seqs and pending < room
        assert not (seat and whole and need(r.target_tokens) <= free), r
        if name == "ascendra-lp" and seat and need(r.target_tokens) > free + growth_blocks:
            assert all(need(other.target_tokens) > free for other in self.waiting)
        return again

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(PlainInstance, "_enter_who_fits", checked)
        system = dataclasses.replace(small(name, batch), prefix_cache=False)
        simulate(
            workload,
            system,
            SmallMemory(blocks),
            STEP_TIME,
            overlong_requests="reject",
            engine=PlainInstance,
        )
