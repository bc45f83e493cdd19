"""Ascendra's scheduler by hand: values, budgets, who does not fit; its queue against sorting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo_bench.harness.core.queues.room_queue import RoomQueue
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.policies.ascendra.low_priority import AscendraLp
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import Slo

ROWS = ((0, 48, 1), (0, 32, 1), (0.5, 64, 1), (0.5, 16, 1))
TTFT_SLO_S = [4.0, 3.0, 1.0, 9.0]


@pytest.mark.parametrize(
    ("value", "order"),
    [("edf", [2, 1, 0, 3]), ("sjf", [3, 1, 0, 2]), ("ljf", [2, 0, 1, 3]), ("fcfs", [0, 1, 2, 3])],
)
def test_lp_instance_serves_the_most_valuable_first(value, order, serve_each_way, requests):
    """One at a time; somebody else is under way until all four are there."""
    workload = requests((0, 16, 2), *((0.5, p, o) for _, p, o in ROWS), ttft_slo_s=[9, *TTFT_SLO_S])
    policy = AscendraLp(value=value, max_num_seqs=1, watermark=0.0)
    records = serve_each_way(workload, policy).records
    assert (records.first_scheduled_s[1:].argsort(kind="stable")).tolist() == order


def test_decodes_first_then_as_many_prompt_tokens_as_the_compute_budget_lets_pass(
    serve_each_way, requests
):
    # A step takes 1 s and 10 ms a token; 1.5 s are 50 tokens, one of which the decode takes.
    workload = requests((0, 20, 9), (0.5, 120, 1))
    policy = AscendraLp(step_budget_s=1.5, token_budget=1024, watermark=0.0)
    records = serve_each_way(workload, policy, per_token_s=0.01).records
    # Chunks of 49, 49 and 22 tokens, a decode beside each.
    assert records.first_token_s.tolist() == pytest.approx([1.2, 1.2 + 1.5 + 1.5 + 1.23])


def test_the_compute_budget_is_the_tightest_tpot_slo_in_the_batch(serve_each_way, requests):
    # As above, but nothing is set: C is 1.5 s while the first request decodes, 2 s after it.
    workload = requests((0, 20, 3), (0.5, 200, 1), tpot_slo_s=np.array([1.5, 2.0]))
    policy = AscendraLp(token_budget=1024, watermark=0.0)
    records = serve_each_way(workload, policy, per_token_s=0.01).records
    # 1.2 s alone, two chunks of 49 tokens beside the decode, and 100 and 2 tokens alone.
    second_s = 1.2 + 2 * 1.5
    assert records.finish_s[0] == pytest.approx(second_s)
    assert records.first_token_s[1] == pytest.approx(second_s + 2.0 + 1.02)


def test_without_a_tpot_slo_the_compute_budget_binds_nothing(serve_each_way, requests):
    workload = requests((0, 20, 3), (0.5, 200, 1))
    policy = AscendraLp(token_budget=1024, watermark=0.0)
    records = serve_each_way(workload, policy, per_token_s=0.01).records
    assert records.first_token_s[1] == pytest.approx(1.2 + 1.0 + 2.01)


def test_the_token_budget_counts_decodes(serve_each_way, requests):
    workload = requests((0, 8, 4), (0.5, 40, 1))
    policy = AscendraLp(step_budget_s=60.0, token_budget=16, watermark=0.0)
    # Chunks of 15, 15 and 10 tokens.
    assert serve_each_way(workload, policy).records.first_token_s.tolist() == [1.0, 4.0]
    alone = requests((0, 40, 1))
    assert serve_each_way(alone, policy).records.first_token_s.tolist() == [3.0]
    longer = requests((0, 8, 4), (0.5, 46, 1))
    assert serve_each_way(longer, policy).records.first_token_s.tolist() == [1.0, 5.0]


def test_lp_instance_makes_progress_under_any_compute_budget(serve_each_way, requests):
    policy = AscendraLp(step_budget_s=0.001)
    records = serve_each_way(requests((0, 40, 3), (0.5, 40, 3)), policy).records
    assert (records.outcome == Outcome.FINISHED).all()
    # A block of 16 tokens a step while nobody decodes, and nothing beside decodes.
    assert records.first_token_s.tolist() == [3.0, 7.0]  # 8 tokens in the third step


@pytest.mark.parametrize(("misfit", "waits"), [("skip", False), ("stop", True)])
def test_misfit_skips_a_request_or_stops_the_selection(misfit, waits, serve_each_way, requests):
    # Four blocks: the first holds two, the second wants three, the third one.
    workload = requests((0, 20, 10), (0.5, 40, 1), (0.5, 10, 1), ttft_slo_s=[1.0, 2.0, 3.0])
    policy = AscendraLp(misfit=misfit, step_budget_s=60.0, watermark=0.0)
    records = serve_each_way(workload, policy, num_gpu_blocks=4).records
    long_s, short_s = records.first_scheduled_s[1:]
    assert (short_s >= long_s) == waits
    assert short_s == (10.0 if waits else 1.0)


def test_overdue_drop_drops_overdue_requests(serve_each_way, requests):
    workload = requests((0, 16, 6), (0.5, 16, 1), (0.5, 16, 1), ttft_slo_s=[9.0, 2.0, 9.0])
    policy = AscendraLp(max_num_seqs=1, overdue="drop")
    records = serve_each_way(workload, policy).records
    assert records.outcome.tolist() == [Outcome.FINISHED, Outcome.DROPPED, Outcome.FINISHED]
    kept = serve_each_way(workload, AscendraLp(max_num_seqs=1)).records
    assert (kept.outcome == Outcome.FINISHED).all()


def test_lp_instance_without_slos_equals_vllm(serve_each_way, requests):
    workload = requests(*((0.3 * n, 10 + n, 3) for n in range(9)))
    policy = AscendraLp(step_budget_s=60.0, watermark=0.0, token_budget=64, max_num_seqs=4)
    ours = serve_each_way(workload, policy).records
    theirs = serve_each_way(workload, Vllm(max_num_batched_tokens=64, max_num_seqs=4)).records
    assert ours.finish_s.tolist() == theirs.finish_s.tolist()


@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["comes", "comes", "enters", "goes"]),
            st.integers(0, 9),
            st.integers(1, 12),
            st.integers(0, 14),
        ),
        max_size=200,
    )
)
@settings(max_examples=300, deadline=None)
def test_room_queue_equals_sorting_by_fit_and_value(moves):
    worths, blocks, room = {}, {}, 0
    queue = RoomQueue(worths.__getitem__, blocks.__getitem__, lambda: room)
    for n, (move, worth, size, room) in enumerate(moves):
        if move == "comes":
            r = RequestState(n, 0.0, 1, 1, 1, Slo())
            r.seq = n
            worths[r], blocks[r] = float(worth), size
            queue.push(r)
        elif worths and move == "goes":
            gone = list(worths)[worth % len(worths)]
            queue.remove(gone)
            del worths[gone]
        elif worths:
            order = sorted(worths, key=lambda r: (blocks[r] > room, worths[r], r.seq))
            assert list(queue.ordered()) == order
            assert queue.head() is order[0]
            queue.take_head()
            del worths[order[0]]
        assert queue.live == len(worths)
        assert set(queue) == set(worths)


def test_bad_parameters_are_refused_by_name():
    bad = {"value": "rr", "misfit": "break", "step_budget_s": -1.0, "watermark": -0.1}
    for parameter, value in bad.items():
        with pytest.raises(SloBenchError, match=parameter):
            AscendraLp(**{parameter: value})
