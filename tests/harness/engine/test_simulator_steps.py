"""Leaping and stepping give identical records, for every stock system, under KV pressure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference.examples import examples
from reference.plain import PlainInstance
from reference.workloads import assert_same, workloads
from slo_bench.harness.core.decisions import (
    Admission,
    NextQueue,
    PreemptionMode,
    ReleaseReason,
    Timeout,
)
from slo_bench.harness.core.policy import Policy
from slo_bench.harness.core.records.request_records import Outcome, Records
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.sarathi import Sarathi
from slo_bench.harness.policies.systems import SYSTEMS, System
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.predictors.placement import PipelineStage, Placement
from slo_bench.predictors.specs import gpu, link, model
from slo_bench.predictors.staged import staged_step_time
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-3-8b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model


@dataclass(frozen=True)
class SmallMemory:
    """A placement with as few blocks as the test wants; everything else is Llama on an A100."""

    num_gpu_blocks: int
    num_cpu_blocks: int = 32
    pp: int = 1
    dp: int = 1
    kv_offload_gib: float = 0.0
    kv_disk_gib: float = 0.0
    state_slots: int | None = None
    block_size: int = 16
    swap_s_per_block: float = 0.0004
    model: object = dataclasses.field(default_factory=lambda: PLACEMENT.model)
    tp: int = 1

    @property
    def lanes(self):
        return self.pp


@dataclass(frozen=True)
class Deadlines(Policy):
    """Earliest TTFT deadline first; drops who is late; turns away what is long."""

    def admit(self, r, view):
        return Admission.REJECT if r.prompt_tokens > 500 else Admission.ADMIT

    def queue_key(self, r, view):
        return r.arrival_s + r.slo.ttft_s

    def victim_key(self, r, view):
        return -(r.arrival_s + r.slo.ttft_s)

    def timeout(self, r, view):
        return Timeout(r.arrival_s + r.slo.ttft_s, ReleaseReason.DROP)


@dataclass(frozen=True)
class SwapInBatches(Vllm):
    """Swaps, and brings the swapped back only when nobody runs."""

    def preemption_mode(self, r, view):
        return PreemptionMode.SWAP

    def next_queue(self, view):
        if view.n_swapped and view.n_decoding < 2:
            return NextQueue.SWAPPED
        return NextQueue.NONE if view.n_swapped else NextQueue.WAITING


def stock(name: str) -> Callable[[int], System]:
    def small(batch: int) -> System:
        system = SYSTEMS[name]
        values = {
            k: batch for k in system.parameters() if k.startswith("max_") and "tokens" not in k
        }
        if name == "sarathi":
            values["chunk_tokens"] = 64
        if name == "vllm":
            values["max_num_batched_tokens"] = 128
        if name == "sglang":
            values["chunked_prefill_tokens"] = 128
        if name == "prism-queue":
            values["max_num_batched_tokens"] = 128
        if name == "ascendra-lp":
            values |= {"token_budget": 64, "step_budget_s": 0.02}
        return system.with_parameters(**values)

    return small


CONTINUOUS = [
    n for n, s in SYSTEMS.items() if isinstance(s.policy, Policy) and not (s.sharing or s.cluster)
]
CASES = {name: stock(name) for name in CONTINUOUS}
for way in ("recompute", "stall"):
    CASES[f"vllm-swap-{way}"] = lambda n, way=way: SYSTEMS["vllm-swap"].with_parameters(
        max_num_seqs=n, host_full=way
    )
for name, parameters in (
    ("vllm-swap", {"overlap_swap": True}),
    ("adaptivellm", {"overlap_swap": True}),
    ("adaptivellm", {"chunk_tokens": 96}),
    ("adaptivellm", {"chunk_tokens": 96, "overlap_swap": True}),
):
    CASES[f"{name}-{'-'.join(parameters)}"] = lambda n, name=name, parameters=parameters: SYSTEMS[
        name
    ].with_parameters(max_num_seqs=n, **parameters)
CASES["adaptivellm-by-the-letter"] = lambda n: SYSTEMS["adaptivellm"].with_parameters(
    max_num_seqs=n, groups="mean-priority"
)
CASES["ascendra-lp-drop"] = lambda n: SYSTEMS["ascendra-lp"].with_parameters(
    max_num_seqs=n, value="ljf", overdue="drop", step_budget_s=0.005
)
CASES["ascendra-lp-stop"] = lambda n: SYSTEMS["ascendra-lp"].with_parameters(
    max_num_seqs=n, value="sjf", misfit="stop"
)
CASES["prism-slack"] = lambda n: SYSTEMS["prism-queue"].with_parameters(
    max_num_seqs=n, max_num_batched_tokens=64, victim="slack", caution=2.0, buffer=0.0
)
CASES["prism-drop"] = lambda n: SYSTEMS["prism-queue"].with_parameters(max_num_seqs=n, late="drop")
CASES["deadlines"] = lambda n: System("deadlines", Deadlines())
CASES["swap-in-batches"] = lambda n: System("swap", SwapInBatches(max_num_seqs=n))
CASES["vllm-ahead"] = lambda n: System(
    "vllm", Vllm(max_num_batched_tokens=128, max_num_seqs=n, async_scheduling=True)
)
CASES["vllm-ahead-cached"] = lambda n: dataclasses.replace(
    CASES["vllm-ahead"](n), prefix_cache=True
)
CASES["sarathi-cached"] = lambda n: System(
    "sarathi", Sarathi(chunk_tokens=64, max_num_seqs=n), prefix_cache=True
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(),
    blocks=st.sampled_from([70, 90, 130, 400]),
    num_cpu_blocks=st.sampled_from([0, 20, 400]),
    batch=st.sampled_from([2, 7, 64]),
    instances=st.sampled_from([1, 1, 2]),
    pp=st.sampled_from([1, 1, 1, 2]),
)
def test_leaping_equals_stepping(case, workload, blocks, num_cpu_blocks, batch, instances, pp):
    system = CASES[case](batch)
    placement = SmallMemory(blocks * pp, num_cpu_blocks * pp, pp)
    router = "least-loaded" if instances > 1 else None
    results = [
        simulate(
            workload,
            system,
            placement,
            STEP_TIME,
            instances=instances,
            router=router,
            overlong_requests="reject",
            engine=engine,
        )
        for engine in (None, PlainInstance)
    ]
    leapt, stepped = (r.records for r in results)
    assert_same(leapt, stepped)
    assert_lossless(workload, leapt)
    gaps = [r.gaps for r in results]
    assert gaps[0].count.sum() == gaps[1].count.sum()
    if len(gaps[1].gap_s):
        assert gaps[0].mean_s() == pytest.approx(gaps[1].mean_s())
        assert gaps[0].quantile_s(0.99) == pytest.approx(gaps[1].quantile_s(0.99), rel=0.01)


UNLIKE = Placement(
    PLACEMENT.model,
    gpu("a100-80g"),
    pp=3,
    split=(
        PipelineStage(gpu("a100-80g"), 20, link("node")),
        PipelineStage(gpu("l4"), 4, link("sys"), layer_extra_s=0.0002),
        PipelineStage(gpu("a100-40g"), 8),
    ),
)


@pytest.mark.parametrize("case", ["vllm", "sarathi"])
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(),
    blocks=st.sampled_from([70, 130, 400]),
    lanes=st.sampled_from([1, 2, 3]),
    batch=st.sampled_from([2, 7, 64]),
)
def test_leaping_equals_stepping_on_stages_that_are_not_alike(case, workload, blocks, lanes, batch):
    placement = dataclasses.replace(UNLIKE, fixed_num_gpu_blocks=blocks * lanes, fixed_lanes=lanes)
    steps = staged_step_time(placement).model
    system = CASES[case](batch)
    results = [
        simulate(workload, system, placement, steps, overlong_requests="reject", engine=engine)
        for engine in (None, PlainInstance)
    ]
    assert_same(*(r.records for r in results))
    assert_lossless(workload, results[0].records)
    totals = results[0].totals
    assert 0 < totals.gpu_busy_s <= lanes * totals.makespan_s * (1 + 1e-9)


def assert_lossless(workload: Workload, records: Records) -> None:
    """Every request ends once, gives what was asked, and time goes forward."""
    done = records.outcome == Outcome.FINISHED
    gone = np.isin(records.outcome, [Outcome.REJECTED, Outcome.DROPPED, Outcome.CANCELLED])
    assert (done | gone).all()
    np.testing.assert_array_equal(records.output_tokens[done], workload.output_tokens[done])
    assert (records.output_tokens[gone] == 0).all()
    assert (records.first_scheduled_s[done] >= records.arrival_s[done]).all()
    assert (records.first_token_s[done] > records.first_scheduled_s[done]).all()
    assert (records.finish_s[done] >= records.first_token_s[done]).all()


def test_step_comparison_workload_preempts_swaps_stalls_and_shares_prefixes():
    """The cases above do preempt, swap, stall and share prefixes (else they prove little)."""
    rng = np.random.default_rng(3)
    n = 60
    workload = Workload(
        np.cumsum(rng.exponential(0.01, n)), rng.integers(50, 200, n), rng.integers(50, 300, n)
    )
    preemptions = {}
    for case in ("vllm", "vllm-v0", "vllm-swap", "sarathi", "sglang"):
        placement = SmallMemory(90, 40)
        records = simulate(workload, CASES[case](64), placement, STEP_TIME).records
        preemptions[case] = (
            int(records.preemptions_swap.sum()),
            int(records.preemptions_recompute.sum()),
        )
    swapped = {case: swaps for case, (swaps, _) in preemptions.items() if swaps}
    assert list(swapped) == ["vllm-swap"]
    assert swapped["vllm-swap"] > 10
    assert all(
        recomputed > 10 for case, (_, recomputed) in preemptions.items() if case not in swapped
    )
