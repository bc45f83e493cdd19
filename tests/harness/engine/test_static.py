"""Static batches by hand: a second an iteration, padded and run until the longest has ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from slo_bench.harness.core.policy import StaticPolicy
from slo_bench.harness.core.records.judging import judge
from slo_bench.harness.policies.fifo import Fifo
from slo_bench.harness.policies.ljf import LongestJobFirst
from slo_bench.harness.policies.sjf import ShortestJobFirst
from slo_bench.harness.policies.systems import System
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.slo import parse_slo


def generated(served, sizes) -> int:
    """Tokens generated, padding included: prefill gives each member of a batch its first."""
    return served.result.totals.decode_tokens + sum(sizes)


def test_one_batch_of_8_8_and_58_generates_174_tokens(serve, requests):
    # UELLM, Fig. 3-3.
    served = serve(requests((0, 10, 8), (0, 10, 8), (0, 10, 58)), Fifo())
    assert generated(served, [3]) == 174
    totals = served.result.totals
    assert totals.padded_tokens == 50 + 50
    assert totals.prefill_tokens == 30
    assert totals.steps == 58
    assert served.records.finish_s.tolist() == [58, 58, 58]  # given back together
    assert served.records.output_tokens.tolist() == [8, 8, 58]


def test_two_batches_of_8_8_and_58_generate_74_tokens(serve, requests):
    served = serve(requests((0, 10, 8), (0, 10, 8), (0.5, 10, 58)), Fifo())
    assert generated(served, [2, 1]) == 74
    totals = served.result.totals
    assert totals.padded_tokens == 0
    assert (totals.prefill_tokens, totals.decode_tokens) == (30, 71)
    assert served.records.first_scheduled_s.tolist() == [0, 0, 8]
    assert served.records.finish_s.tolist() == [8, 8, 66]
    assert totals.busy_s == totals.makespan_s == 66


def test_prompts_are_padded_to_the_longest(serve, requests):
    served = serve(requests((0, 4, 3), (0, 10, 2)), Fifo(), per_token_s=0.1)
    totals = served.result.totals
    assert (totals.prefill_tokens, totals.decode_tokens) == (20, 4)
    assert totals.padded_tokens == 6 + 1
    # One pass over 20 tokens of 3 s, then two over both of 1.2 s.
    assert served.records.finish_s.tolist() == pytest.approx([5.4, 5.4])


def test_tokens_without_padding_are_those_of_the_workload(serve, requests):
    served = serve(requests((0, 7, 5), (0, 30, 1), (1, 2, 9), (1, 3, 3)), Fifo(max_batch=2))
    totals = served.result.totals
    useful = totals.prefill_tokens + totals.decode_tokens - totals.padded_tokens
    assert useful == (7 + 4) + (30 + 0) + (2 + 8) + (3 + 2)


@pytest.mark.parametrize(
    ("policy", "order"),
    [(Fifo, [0, 1, 2, 3]), (ShortestJobFirst, [1, 3, 2, 0]), (LongestJobFirst, [0, 2, 1, 3])],
)
def test_static_policies_order_the_queue(serve, requests, policy, order):
    workload = requests((0, 10, 5), (0, 10, 1), (0, 10, 3), (0, 10, 1))
    scheduled = serve(workload, policy(max_batch=1)).records.first_scheduled_s
    assert scheduled.argsort().tolist() == order
    assert scheduled.tolist() != [0, 0, 0, 0]


def test_static_batch_is_limited_by_memory(serve, requests):
    # Two blocks each, of six.
    workload = requests(*[(0, 16, 16)] * 4)
    served = serve(workload, Fifo(), num_gpu_blocks=6)
    assert served.records.first_scheduled_s.tolist() == [0, 0, 0, 16]
    assert served.result.totals.kv_cache_usage_peak == 1


def test_long_member_makes_every_member_reserve_its_length(serve, requests):
    # With a prompt of 48 in the batch each of three would take four blocks.
    workload = requests((0, 16, 16), (0, 16, 16), (0, 48, 16))
    served = serve(workload, Fifo(), num_gpu_blocks=6)
    assert served.records.first_scheduled_s.tolist() == [0, 0, 16]


def test_static_batch_reserves_the_maximum_output_tokens(serve, requests):
    # Answers end after 2 tokens, but could have had 33: three blocks each.
    workload = requests(*[(0, 15, 2)] * 3, max_output_tokens=[33] * 3)
    assert serve(workload, Fifo(), num_gpu_blocks=6).records.first_scheduled_s.tolist() == [0, 0, 2]


def test_time_between_static_batches_is_idle(serve, requests):
    served = serve(requests((5, 10, 2), (20, 10, 3)), Fifo())
    assert served.records.finish_s.tolist() == [7, 23]
    assert served.result.totals.busy_s == 5
    assert served.result.totals.makespan_s == 23


def test_first_tokens_of_a_static_batch_come_at_its_end(serve, requests):
    served = serve(requests((0, 10, 3), (0, 10, 5), (1, 10, 1), (1, 10, 4)), Fifo(max_batch=2))
    records = served.records
    assert records.first_token_s.tolist() == records.finish_s.tolist() == [5, 5, 9, 9]
    assert records.ttft_s.tolist() == [5, 5, 8, 8]
    assert np.isnan(records.tpot_s).all()  # no time lies between tokens that come at once
    assert not len(served.result.gaps.gap_s)


def test_ttft_slo_is_judged_at_the_end_of_the_static_batch(serve, requests):
    workload = parse_slo("ttft=4,tpot=0.001").apply(
        requests((0, 10, 3), (0, 10, 5)), np.random.default_rng(0)
    )
    assert judge(workload, serve(workload, Fifo()).records).met.tolist() == [False, False]
    alone = judge(workload, serve(workload, Fifo(max_batch=1)).records)
    assert alone.met.tolist() == [True, False]


def test_follow_up_arrives_after_the_end_of_the_static_batch(serve, requests):
    # Whoever follows the first, of 2 tokens, waits for the whole batch of 9.
    workload = requests((0, 10, 2), (0, 10, 9), (0, 10, 1), follows=[-1, -1, 0], think_s=[0, 0, 4])
    records = serve(workload, Fifo()).records
    assert records.arrival_s.tolist() == [0, 0, 9 + 4]
    assert records.finish_s.tolist() == [9, 9, 14]


def test_running_static_batch_counts_as_load_for_the_router(serve, requests):
    system = System("fifo", Fifo(), router="least-loaded")
    # The second finds the first at work, the third finds both done, the fourth the third at work.
    workload = requests((0, 10, 9), (5, 10, 3), (20, 10, 5), (21, 10, 1))
    records = serve(workload, system, instances=2).records
    assert records.instance.tolist() == [0, 1, 0, 1]


def test_closed_loop_successor_goes_to_the_instance_whose_batch_ended(serve, requests):
    system = System("fifo", Fifo(), router="least-loaded")
    workload = requests((0, 10, 9), (0, 10, 3), (0, 10, 3), (0, 10, 3), concurrency=2)
    records = serve(workload, system, instances=2).records
    assert records.instance.tolist() == [0, 1, 1, 1]
    assert records.arrival_s.tolist() == [0, 0, 3, 6]


@dataclass(frozen=True)
class Nobody(StaticPolicy):
    def form_batch(self, waiting, view):
        return []


@dataclass(frozen=True)
class Twice(StaticPolicy):
    def form_batch(self, waiting, view):
        return [waiting[0], waiting[0]]


@pytest.mark.parametrize(
    ("policy", "problem"),
    [(Nobody(), "Nobody.form_batch must choose at least one"), (Twice(), "chose a request twice")],
)
def test_static_policy_that_picks_requests_not_waiting_is_an_error(
    serve, requests, policy, problem
):
    with pytest.raises(SloBenchError, match=problem):
        serve(requests((0, 10, 2), (0, 10, 2)), policy)
