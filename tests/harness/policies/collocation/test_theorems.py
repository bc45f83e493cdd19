"""The collocation paper's theorems 1, 2 and 4 against exhaustive search on small cases.

Theorem 3 is in test_collocation.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo_bench.harness.core.counters import Counters
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.collocation.collocation_policy import Collocation
from slo_bench.harness.policies.systems import SYSTEMS, System
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.request import Slo
from slo_bench.workloads.workload import Workload

BLOCK_SIZE, ANSWER = 16, 64
LEAST_BLOCKS = ANSWER // BLOCK_SIZE + 1  # of a request: the answer, and a prompt


def served(policy: System, blocks: int, *rows: tuple[int, int]) -> Any:
    """Records of requests (prompt, answer) that arrive at once, in this order."""
    where = Placement(model("llama-2-7b"), gpu("a100-80g"), fixed_num_gpu_blocks=blocks)
    prompt, output = np.array(rows).T
    workload = Workload(np.zeros(len(rows)), prompt, output)
    return simulate(workload, policy, where, step_time(where).model).records


# ---------------------------------------------------------------- theorem 1


@pytest.mark.slow
@settings(max_examples=15)
@given(
    blocks=st.lists(st.integers(LEAST_BLOCKS, 30), min_size=3, max_size=5),
    memory=st.integers(30, 70),
)
def test_theorem_1_best_order_solves_the_knapsack(blocks, memory):
    """Theorem 1 by its reduction: answers are equally long and only those that start at once are in
    time, so the most tokens in time, over all orders, are the fullest knapsack.
    """
    rows = [(n * BLOCK_SIZE - ANSWER, ANSWER) for n in blocks]
    best = 0
    for order in itertools.permutations(range(len(rows))):
        records = served(SYSTEMS["orca"], memory, *(rows[k] for k in order))
        started = records.first_scheduled_s < np.nanmin(records.finish_s)
        assert (records.finish_s[started] < 1.9 * np.nanmin(records.finish_s)).all()
        best = max(best, sum(blocks[k] for k, now in zip(order, started, strict=True) if now))
    sums = {sum(part) for n in range(6) for part in itertools.combinations(blocks, n)}
    assert best == max(total for total in sums if total <= memory)


# ---------------------------------------------------------------- theorem 2


@pytest.mark.parametrize("memory", [20, 25, 40])
def test_reservations_never_overflow_for_any_arrival_order(memory):
    """Every order of every choice of three out of four kinds of requests, with true lengths."""
    kinds = [(8, 60), (100, 30), (200, 100), (16, 250)]
    exact = System("exact", Collocation(safety_ratio=0.0, speculative_share=0.0))
    current = System("current", exact.policy.with_parameters(counts="current"))
    overflows = 0
    for rows in itertools.product(kinds, repeat=3):
        assert not served(exact, memory, *rows).preemptions_recompute.any()
        overflows += bool(served(current, memory, *rows).preemptions_recompute.any())
    assert overflows  # memory is short: to the letter, which counts what is held now


# ---------------------------------------------------------------- theorem 4


class Predict:
    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        return 0.0

    def output_tokens(self, r):
        return r.max_output_tokens

    output_tokens_p90 = output_tokens


@dataclass
class Running:
    """A view of a batch."""

    batch: list[RequestState]
    policy_state: Any
    counters: Counters
    now_s: float = 0.0
    n_waiting: int = 0
    decode_kv_tokens: int = 0
    total_blocks: int = 10_000
    block_size: int = 1
    predict: Predict = field(default_factory=Predict)

    @property
    def n_running(self):
        return len(self.batch)

    n_decoding = n_running

    def running(self):
        return self.batch

    def emitted_tokens(self, r):
        return r.emitted_tokens

    def held_blocks(self, r):
        return r.blocks


POLICY = Collocation(counts="current", recompute_weight=0.0, completion_tokens=0, epsilon_s=1e-4)


def costs_of_eviction(held: list[tuple[int, float]], needed: int) -> tuple[float, float, int]:
    """Cost of Algorithm 3 and the least cost of any set of victims, and Algorithm 3's victims.

    `held`: blocks and cost in seconds of each running request, all of one priority.
    """
    batch = []
    for row, (blocks, cost) in enumerate(held):
        slack_s = POLICY.slack_weight / cost - POLICY.epsilon_s
        r = RequestState(row, 0.0, blocks, 100, 100, Slo(e2e_s=slack_s))
        r.blocks = blocks
        batch.append(r)
    view: Any = Running(batch, POLICY.new_state(), Counters(POLICY.mechanisms()))
    cost_s = {r.id: POLICY.eviction_cost_s(r, view) for r in batch}
    victims = POLICY._victims(view, needed)
    assert sum(r.blocks for r in victims) >= needed
    least = min(
        sum(cost_s[r.id] for r in chosen)
        for n in range(1, len(batch) + 1)
        for chosen in itertools.combinations(batch, n)
        if sum(r.blocks for r in chosen) >= needed
    )
    return sum(cost_s[r.id] for r in victims), least, len(victims)


@given(
    held=st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 100.0)), min_size=1, max_size=8),
    share=st.floats(0.01, 1.0),
)
def test_eviction_cost_is_at_most_victims_times_the_least_cost(held, share):
    """The bound that holds: a victim costs no more than the dearest of any set that suffices."""
    needed = max(1, int(share * sum(blocks for blocks, _ in held)))
    cost, least, victims = costs_of_eviction(held, needed)
    assert cost <= victims * least * (1 + 1e-6)


@pytest.mark.parametrize("n", [2, 4, 8, 12])
def test_theorem_4_eviction_bound_is_reached_with_one_priority(n):
    """Against theorem 4, whose ratio O(log k) would be a constant for k = 1: sizes are ignored."""
    small_ones, one_large = [(1, 1.0)] * n, (n, 1.001)
    cost, least, victims = costs_of_eviction([*small_ones, one_large], n)
    assert victims == n
    assert cost / least == pytest.approx(n, rel=0.01)
