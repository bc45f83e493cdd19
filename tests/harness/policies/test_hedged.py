"""Hedged requests: when a second copy goes out, which one answers, and what the other cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.hedged import FirstTokens, Hedged
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-3.1-8b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model


def load(arrival_s, prompt_tokens, output_tokens=20, **more) -> Workload:
    n = len(arrival_s)
    return Workload(
        arrival_s=np.array(arrival_s, dtype=float),
        prompt_tokens=np.broadcast_to(np.array(prompt_tokens), n),
        output_tokens=np.broadcast_to(np.array(output_tokens), n),
        **more,
    )


def served(workload: Workload, instances: int = 2, **parameters):
    system = SYSTEMS["hedged"].with_parameters(window=20, **{"budget": 1.0} | parameters)
    return simulate(workload, system, PLACEMENT, STEP_TIME, instances=instances)


def behind_a_long_prompt() -> Workload:
    """Short requests, then one of 60,000 tokens (row 21) and short ones. In turn to three
    instances: row 21 goes to instance 0, as does row 24.
    """
    late_s = [21.0, 21.01, 21.02, 21.03]
    return load([*np.arange(21.0), *late_s], [*[100] * 21, 60_000, 100, 100, 100])


def test_late_request_is_answered_by_the_second_instance():
    """The copy of the long prompt goes to instance 1, that of row 24 to instance 2."""
    plain = served(behind_a_long_prompt(), 3, routing="round-robin", quantile=1.0)
    hedged = served(behind_a_long_prompt(), 3, routing="round-robin")
    assert list(plain.records.instance[21:]) == [0, 1, 2, 0]
    assert list(hedged.records.instance[21:]) == [0, 1, 2, 2]
    assert plain.counts == {"hedges": 0, "hedge_wins": 0, "hedge_tokens": 0}
    assert hedged.counts["hedge_wins"] == 1
    assert hedged.records.ttft_s[24] < 0.5 < plain.records.ttft_s[24]


def test_slower_copy_is_cancelled_and_its_work_counted():
    """The long prompt itself is late, too: its copy ends with the first token of the first."""
    hedged = served(behind_a_long_prompt(), 3, routing="round-robin")
    plain = served(behind_a_long_prompt(), 3, routing="round-robin", quantile=1.0)
    assert hedged.counts["hedges"] == 2
    computed = hedged.totals.prefill_tokens - plain.totals.prefill_tokens
    assert 0 < computed <= 60_000
    assert hedged.counts["hedge_tokens"] == pytest.approx(computed, abs=100)


def test_hedges_stay_within_their_share_of_all_requests():
    workload = load(np.arange(200) * 0.02, 4000)
    free = served(workload, quantile=0.5)
    limited = served(workload, quantile=0.5, budget=0.05)
    assert free.counts["hedges"] > 20
    assert 0 < limited.counts["hedges"] <= 10


def test_cancelled_copies_leave_no_blocks_behind():
    @dataclass(frozen=True)
    class Watched(Hedged):
        def extra_records(self, state, instances):
            left.extend(i.kv_manager.total - i.free_blocks for i in instances)
            assert not state.awaited
            return ()

    left: list[int] = []
    policy = Watched(quantile=0.5, budget=1.0, window=20)
    system = replace(SYSTEMS["hedged"], cluster=policy)
    rng = np.random.default_rng(3)
    workload = load(np.arange(150) * 0.1, rng.integers(1, 8000, 150), rng.integers(1, 200, 150))
    result = simulate(workload, system, PLACEMENT, STEP_TIME, instances=3)
    assert result.counts["hedge_tokens"] > 0
    assert left == [0, 0, 0]


def test_no_hedge_before_a_fifth_of_the_window_was_observed():
    assert served(load([0.0, 0.01, 0.02], [60_000, 100, 100])).counts["hedges"] == 0


def test_stalled_instance_computes_nothing_for_so_long():
    """A request that would end at once waits for the end of the stall of 5 s that began at 10 s."""
    workload = load([9.99, 10.3], 100, output_tokens=[60, 5])
    free = served(workload, instances=1, quantile=1.0)
    stalled = served(workload, instances=1, quantile=1.0, stall_s=5.0, stall_every_s=10.0)
    assert stalled.counts["stalls"] == 1
    longest_s = stalled.records.finish_s.max() - free.records.finish_s.max()
    assert longest_s == pytest.approx(5.0, abs=0.2)


def test_closed_loop_goes_on_once_for_each_request():
    workload = load([0.0] * 60, [100, 20_000] * 30, concurrency=6)
    records = served(workload, instances=3, quantile=0.5).records
    running = [
        ((records.arrival_s <= at_s) & (records.finish_s > at_s)).sum() for at_s in records.finish_s
    ]
    assert np.isfinite(records.finish_s).all()
    assert max(running) <= 6


@settings(max_examples=25, deadline=None)
@given(
    gaps_s=st.lists(st.floats(0.0, 0.5), min_size=30, max_size=60),
    seed=st.integers(0, 2**16),
    instances=st.integers(1, 4),
    quantile=st.sampled_from([0.5, 0.8, 0.95]),
    routing=st.sampled_from(["least-loaded", "round-robin"]),
    stall_s=st.sampled_from([0.0, 3.0]),
)
def test_every_request_is_answered_once_in_full(
    gaps_s, seed, instances, quantile, routing, stall_s
):
    rng = np.random.default_rng(seed)
    n = len(gaps_s)
    workload = load(np.cumsum(gaps_s), rng.integers(1, 8000, n), rng.integers(1, 200, n))
    result = served(
        workload, instances, quantile=quantile, routing=routing, stall_s=stall_s, stall_every_s=4.0
    )
    records, counts = result.records, result.counts
    assert (records.output_tokens == workload.output_tokens).all()
    assert (records.first_token_s > records.arrival_s).all()
    assert (records.finish_s >= records.first_token_s).all()
    assert 0 <= counts["hedge_wins"] <= counts["hedges"] <= n
    assert instances > 1 or not counts["hedges"]
    cached = np.maximum(records.cached_tokens, 0).sum()
    prompts = workload.prompt_tokens.sum() - cached
    recomputed = records.preemptions_recompute.any()
    assert recomputed or prompts <= result.totals.prefill_tokens


@given(
    ttfts_s=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=100),
    window=st.integers(1, 40),
    quantile=st.floats(0.0, 1.0),
)
def test_quantile_is_that_of_the_latest_window(ttfts_s, window, quantile):
    state = FirstTokens()
    for ttft_s in ttfts_s:
        state.observe(ttft_s, window)
    lately_s = sorted(ttfts_s[-window:])
    place = min(len(lately_s) - 1, int(quantile * len(lately_s)))
    assert state.quantile_s(quantile, 1) == lately_s[place]
    assert state.quantile_s(quantile, len(lately_s) + 1) == float("inf")
