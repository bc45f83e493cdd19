"""The iteration loop by hand: a second an iteration, blocks of 16 tokens, a handful of requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from slo_bench.harness.core.policy import Policy
from slo_bench.harness.policies.fastertransformer import FasterTransformer
from slo_bench.harness.policies.orca import Orca
from slo_bench.harness.policies.sarathi import Sarathi
from slo_bench.harness.policies.sglang import Sglang
from slo_bench.harness.policies.systems import SYSTEMS, System
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.harness.policies.vllm_swap import VllmSwap
from slo_bench.harness.policies.vllm_v0 import VllmV0
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload


def times(served) -> list[tuple[float, float, float]]:
    """(scheduled, first token, finish) of every request."""
    r = served.records
    columns = (r.first_scheduled_s, r.first_token_s, r.finish_s)
    return list(zip(*(c.tolist() for c in columns), strict=True))


def test_vllm_prefills_in_chunks_beside_decodes(serve_each_way, requests):
    workload = requests((0, 20, 3), (0, 10, 2), (2.5, 20, 1))
    served = serve_each_way(workload, Vllm(max_num_batched_tokens=16))
    assert times(served) == [(0, 2, 4), (1, 2, 3), (3, 5, 5)]
    assert served.log in (
        [],
        [
            (0, 0, [(0, 16)]),  # the budget cuts the first prompt
            (0, 0, [(16, 4), (0, 10)]),  # its rest, and the second beside it
            (2, 30, []),
            (1, 21, [(0, 15)]),  # a decode and 15 tokens of the third
            (0, 0, [(15, 5)]),
        ],
    )


# Two prompts of 30 tokens fill two blocks each; when both have 32 tokens in the cache, at 3 s,
# each next token needs a block.
PAIR = ((0, 30, 8), (0, 30, 5))


def test_vllm_preempts_the_last_comer_and_recomputes_it(serve_each_way, requests):
    served = serve_each_way(requests(*PAIR), Vllm(), num_gpu_blocks=4)
    # At 3 s the second, with 3 tokens out, goes; it needs 3 blocks to come back, free at 8 s.
    assert times(served) == [(0, 1, 8), (0, 1, 10)]
    assert served.records.preemptions_recompute.tolist() == [0, 1]
    assert served.records.preemptions_swap.tolist() == [0, 0]
    assert served.log in (
        [],
        [
            (0, 0, [(0, 30), (0, 30)]),
            (2, 60, []),
            (2, 62, []),
            *((1, kv, []) for kv in (32, 33, 34, 35, 36)),
            (0, 0, [(0, 33)]),  # the prompt and the three tokens given; gives the fourth
            (1, 33, []),
        ],
    )
    gaps = served.result.gaps  # ten of 1 s, and the 6 s from the third to the fourth token
    assert gaps.count.sum() == 11
    assert gaps.mean_s() == pytest.approx(16 / 11)
    assert gaps.quantile_s(0.9) == pytest.approx(1)
    assert gaps.quantile_s(0.95) == pytest.approx(6)


def test_swapping_is_charged_both_ways(serve_each_way, requests):
    policy = VllmSwap(watermark=0.0)
    served = serve_each_way(requests(*PAIR), policy, num_gpu_blocks=5, num_cpu_blocks=2)
    # Two blocks of 0.25 s go out in the iteration that begins at 3 s, and come back at 8.5 s.
    assert times(served) == [(0, 1, 8.5), (0, 1, 11)]
    assert served.records.preemptions_swap.tolist() == [0, 1]
    assert served.records.preemptions_recompute.tolist() == [0, 0]
    gaps = served.result.gaps
    assert gaps.count.sum() == 11
    assert gaps.quantile_s(1.0) == pytest.approx(7)  # from 3 s to 10 s
    assert gaps.mean_s() == pytest.approx((7.5 + 10) / 11)


@pytest.mark.parametrize(
    ("swap_s_per_block", "exposed_s"),
    [(0.25, 0.0), (0.5, 0.0), (0.75, 0.5), (1.5, 2.0)],
)
def test_overlapped_swapping_costs_what_exceeds_the_step(
    serve_each_way, requests, swap_s_per_block, exposed_s
):
    """As above: two blocks out beside a step of 1 s, and in again beside another."""
    policy = VllmSwap(watermark=0.0, overlap_swap=True)
    memory = {"num_gpu_blocks": 5, "num_cpu_blocks": 2, "swap_s_per_block": swap_s_per_block}
    served = serve_each_way(requests(*PAIR), policy, **memory)
    assert times(served) == [(0, 1, 8 + exposed_s), (0, 1, 10 + 2 * exposed_s)]
    assert served.records.preemptions_swap.tolist() == [0, 1]


@pytest.mark.parametrize("num_cpu_blocks", [0, 1])
def test_full_host_memory_keeps_the_victim_waiting(serve_each_way, requests, num_cpu_blocks):
    policy = VllmSwap(watermark=0.0, host_full="stall")
    served = serve_each_way(
        requests(*PAIR), policy, num_gpu_blocks=5, num_cpu_blocks=num_cpu_blocks
    )
    # It keeps its two blocks, and goes on when the other has ended.
    assert times(served) == [(0, 1, 8), (0, 1, 10)]
    assert served.records.preemptions_swap.tolist() == [0, 0]
    assert served.records.preemptions_recompute.tolist() == [0, 0]
    assert served.log in (
        [],
        [
            (0, 0, [(0, 30), (0, 30)]),
            (2, 60, []),
            (2, 62, []),
            *((1, kv, []) for kv in (32, 33, 34, 35, 36)),
            (1, 32, []),
            (1, 33, []),
        ],
    )
    assert served.result.gaps.quantile_s(1.0) == pytest.approx(6)


@pytest.mark.parametrize("num_cpu_blocks", [0, 1])
def test_request_does_not_enter_while_its_victim_cannot_be_swapped(
    serve_each_way, requests, num_cpu_blocks
):
    policy = VllmSwap(watermark=0.0)
    load = requests((0, 30, 9), (0, 30, 9))
    served = serve_each_way(load, policy, num_gpu_blocks=4, num_cpu_blocks=num_cpu_blocks)
    # Each takes two blocks and has 9 tokens to come; 18 tokens take two blocks.
    assert times(served) == [(0, 1, 9), (9, 10, 18)]
    both = serve_each_way(load, policy, num_gpu_blocks=4, num_cpu_blocks=2)
    assert [row[0] for row in times(both)] == [0, 0]
    for records in (served.records, both.records):
        assert not records.preemptions_recompute.any()
    assert both.records.preemptions_swap.sum() == 1


def test_full_host_memory_may_recompute_the_victim(serve_each_way, requests):
    policy = VllmSwap(watermark=0.0, host_full="recompute")
    served = serve_each_way(requests(*PAIR), policy, num_gpu_blocks=5)
    assert times(served) == [(0, 1, 8), (0, 1, 10)]
    assert served.records.preemptions_recompute.tolist() == [0, 1]


def test_orca_reserves_the_longest_answer(serve_each_way, requests):
    # Six blocks: the first two ask for 4 and 3 of them, the third for 1 and must wait its turn.
    workload = requests((0, 16, 2), (0, 16, 2), (0, 10, 1), max_output_tokens=[48, 17, 6])
    served = serve_each_way(workload, Orca(), num_gpu_blocks=6)
    assert times(served) == [(0, 1, 2), (2, 3, 4), (2, 3, 3)]
    assert served.log in (
        [],
        [
            (0, 0, [(0, 16)]),
            (1, 16, []),
            (0, 0, [(0, 16), (0, 10)]),
            (1, 16, []),
        ],
    )


def test_orca_mixes_whole_prompts_with_decodes(serve, requests):
    served = serve(requests((0, 16, 4), (1.5, 5000, 1)), Orca(), leaps=False)
    assert served.log == [(0, 0, [(0, 16)]), (1, 16, []), (1, 17, [(0, 5000)]), (1, 18, [])]


@pytest.mark.parametrize("name", ["orca", "fastertransformer"])
def test_reserving_systems_never_preempt(serve, name):
    rng = np.random.default_rng(1)
    output = rng.integers(1, 80, 200)
    workload = Workload(
        np.cumsum(rng.exponential(1.0, 200)),
        rng.integers(1, 100, 200),
        output,
        max_output_tokens=output + rng.integers(0, 30, 200),
    )
    records = serve(workload, SYSTEMS[name], num_gpu_blocks=14).records
    assert not records.preemptions_recompute.any()
    assert not records.preemptions_swap.any()


def test_fastertransformer_admits_no_request_until_its_batch_ends(serve_each_way, requests):
    workload = requests((0, 16, 3), (0, 16, 1), (0, 16, 1))
    served = serve_each_way(workload, FasterTransformer(max_batch=2))
    assert times(served) == [(0, 1, 3), (0, 1, 1), (3, 4, 4)]


def test_sarathi_fills_its_budget_around_the_decodes(serve_each_way, requests):
    served = serve_each_way(requests((0, 20, 4), (0, 50, 2)), Sarathi(chunk_tokens=20))
    assert times(served) == [(0, 1, 4), (1, 4, 5)]
    assert served.log in (
        [],
        [
            (0, 0, [(0, 20)]),
            (1, 20, [(0, 19)]),
            (1, 21, [(19, 19)]),
            (1, 22, [(38, 12)]),
            (1, 50, []),
        ],
    )


@pytest.mark.parametrize(
    "policy", [Sarathi(chunk_tokens=48, max_num_seqs=16), Vllm(48, 16)], ids=["sarathi", "vllm"]
)
def test_no_iteration_exceeds_the_budget(serve, policy):
    rng = np.random.default_rng(2)
    workload = Workload(
        np.cumsum(rng.exponential(5.0, 100)), rng.integers(1, 300, 100), rng.integers(1, 40, 100)
    )
    served = serve(workload, policy, num_gpu_blocks=60, leaps=False)
    tokens = [seqs + sum(n for _, n in chunks) for seqs, _, chunks in served.log]
    assert max(tokens) == 48
    assert served.records.preemptions_recompute.sum() > 0


def test_prefill_first_stalls_decodes(serve_each_way, requests):
    workload = requests((0, 16, 3), (0.5, 16, 1), (1.5, 16, 1))
    stalling = serve_each_way(workload, VllmV0())
    assert times(stalling) == [(0, 1, 5), (1, 2, 2), (2, 3, 3)]
    assert stalling.log in (
        [],
        [(0, 0, [(0, 16)]), (0, 0, [(0, 16)]), (0, 0, [(0, 16)]), (1, 16, []), (1, 17, [])],
    )
    assert stalling.result.gaps.quantile_s(1.0) == pytest.approx(3)
    mixing = serve_each_way(workload, Vllm())
    assert times(mixing) == [(0, 1, 3), (1, 2, 2), (2, 3, 3)]


def test_prefill_first_takes_whole_prompts_within_its_budget(serve, requests):
    policy = VllmV0(max_num_batched_tokens=40)
    workload = requests((0, 30, 1), (0, 20, 1), (0, 20, 1), (0, 90, 1), (0, 1, 1))
    served = serve(workload, policy, leaps=False)
    assert served.log == [
        (0, 0, [(0, 30)]),
        (0, 0, [(0, 20), (0, 20)]),
        (0, 0, [(0, 90)]),  # larger than the budget: alone
        (0, 0, [(0, 1)]),
    ]


def test_the_watermark_keeps_blocks_free_at_entry(serve, requests):
    # 0.25 of 8 blocks: two requests of 3 blocks fill the rest; the third waits.
    workload = requests((0, 40, 2), (0, 40, 2), (0, 10, 2))
    scheduled = serve(workload, VllmV0(watermark=0.25), num_gpu_blocks=8).records.first_scheduled_s
    assert scheduled.tolist() == [0, 0, 2]


def test_max_seqs_bounds_the_batch(serve, requests):
    workload = requests(*[(0, 10, 2)] * 5)
    served = serve(workload, Vllm(max_num_seqs=2), leaps=False)
    assert times(served) == [(0, 1, 2), (0, 1, 2), (2, 3, 4), (2, 3, 4), (4, 5, 6)]


CACHED = (
    (0, 40, 1),  # leaves 32 tokens in the cache
    (9.5, 16, 3),  # alone in the batch from 9.5 to 12.5
    (10, 40, 1),  # shares nothing
    (10.25, 40, 1),  # shares 32 tokens
)
HASHES = [(1, 2), (), (7, 8), (1, 2)]


def test_sglang_serves_the_longest_cached_prefix_first(serve_each_way, requests):
    system = System("one at a time", Sglang(max_running_requests=1), prefix_cache=True)
    served = serve_each_way(requests(*CACHED, prefix_blocks=HASHES), system)
    assert served.records.first_scheduled_s.tolist() == [0, 9.5, 13.5, 12.5]
    assert served.records.cached_tokens.tolist() == [0, 0, 0, 32]
    if served.log:
        assert served.log[-2:] == [(0, 0, [(32, 8)]), (0, 0, [(0, 40)])]


def test_sglang_orders_long_queues_by_arrival(serve_each_way, requests):
    # 141 wait at 13 s. By arrival until 128 are left; then the last comer, whose prefix is cached.
    rows = [(0, 40, 1), (10, 16, 3), *[(10.5, 16, 1)] * 140, (10.75, 40, 1)]
    blocks = [(1, 2), *[()] * 141, (1, 2)]
    system = System("one at a time", Sglang(max_running_requests=1), prefix_cache=True)
    records = serve_each_way(requests(*rows, prefix_blocks=blocks), system).records
    assert records.first_scheduled_s[2:].argsort().tolist() == [*range(13), 140, *range(13, 140)]
    assert records.cached_tokens[-1] == 32


def test_without_a_cache_sglang_is_first_come_first_served(serve_each_way, requests):
    system = System("one at a time", Sglang(max_running_requests=1))
    served = serve_each_way(requests(*CACHED, prefix_blocks=HASHES), system)
    assert served.records.first_scheduled_s.tolist() == [0, 9.5, 12.5, 13.5]
    assert not served.records.cached_tokens.any()


def test_sglang_retracts_the_longest_prompt_of_those_with_fewest_tokens(serve_each_way, requests):
    # At 2 s all have 2 tokens; those of 31 and 15 tokens need a block each and none is free.
    workload = requests((0, 10, 6), (0, 31, 6), (0, 15, 6))
    served = serve_each_way(workload, Sglang(new_token_ratio=0.0), num_gpu_blocks=4)
    assert served.records.preemptions_recompute.tolist() == [0, 1, 0]


def test_sglang_retracts_the_request_with_fewest_output_tokens(serve_each_way, requests):
    # At 6 s the long one has given 6 tokens and needs a block, the short one has given 4.
    workload = requests((0, 60, 10), (1.5, 15, 10))
    served = serve_each_way(workload, Sglang(new_token_ratio=0.0), num_gpu_blocks=6)
    assert served.records.preemptions_recompute.tolist() == [0, 1]


@pytest.mark.parametrize(("max_tokens", "first_scheduled_s"), [(96, 1), (128, 2)])
def test_sglang_reserves_blocks_for_expected_output_tokens(
    serve, requests, max_tokens, first_scheduled_s
):
    # Of 10 blocks one is taken. The second needs 4, and half of what both may still produce:
    # (64 + 96) / 2 tokens are 5 blocks, (64 + 128) / 2 are 6.
    workload = requests((0, 16, 2), (0.5, 64, 1), max_output_tokens=[64, max_tokens])
    served = serve(workload, Sglang(new_token_ratio=0.5), num_gpu_blocks=10)
    assert served.records.first_scheduled_s.tolist() == [0, first_scheduled_s]


def test_recomputation_finds_its_own_prefix_in_the_cache(serve_each_way, requests):
    # As PAIR, but the victim's first block is published: only the rest is computed again.
    system = System("vllm", Vllm(), prefix_cache=True)
    workload = requests((0, 30, 3), (0, 30, 5), prefix_blocks=[(), (4, 5)])
    served = serve_each_way(workload, system, num_gpu_blocks=4)
    # The first ends at 3 s, before anybody needs a third block.
    assert served.records.preemptions_recompute.tolist() == [0, 0]
    longer = requests((0, 30, 4), (0, 30, 5), prefix_blocks=[(), (4, 5)])
    served = serve_each_way(longer, system, num_gpu_blocks=4)
    assert served.records.preemptions_recompute.tolist() == [0, 1]
    assert served.records.cached_tokens.tolist() == [0, 0]  # at the first admission
    if served.log:
        assert served.log[-2:] == [(0, 0, [(16, 17)]), (1, 33, [])]


def test_the_default_policy_is_vllm_v1_without_chunked_blocks(serve_each_way, requests):
    served = serve_each_way(requests(*PAIR), Policy(), num_gpu_blocks=4)
    assert times(served) == [(0, 1, 8), (0, 1, 10)]


@pytest.mark.parametrize("order", ["static", "prefix-cache"])
def test_static_queue_key_that_reads_the_clock_is_an_error(serve_each_way, requests, order):
    @dataclass(frozen=True)
    class Oldest(Policy):
        queue_order = order

        def queue_key(self, r, view):
            return r.arrival_s - view.now_s

    pattern = rf"queue_key of Oldest reads view.now_s, but queue_order is '{order}'.*\"dynamic\""
    with pytest.raises(SloBenchError, match=pattern):
        serve_each_way(requests(*PAIR), Oldest())


def test_dynamic_queue_key_and_other_hooks_may_read_the_clock(serve_each_way, requests):
    @dataclass(frozen=True)
    class Oldest(Policy):
        queue_order = "dynamic"

        def queue_key(self, r, view):
            return r.arrival_s - view.now_s

        def victim_key(self, r, view):
            return view.now_s - r.arrival_s

    served = serve_each_way(requests(*PAIR), Oldest(), num_gpu_blocks=4)
    assert served.records.preemptions_recompute.tolist() == [0, 1]
