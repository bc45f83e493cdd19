"""Prism's queue of a GPU that several models share."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from slo_bench.harness.core.state import RequestState
from slo_bench.harness.policies.prism.shared_queue import SharedQueue
from slo_bench.harness.policies.shared.moore_hodgson import in_time
from slo_bench.workloads.request import Slo


def _queue(jobs: list[tuple[float, float, float]]) -> SharedQueue:
    """From (arrival, TTFT SLO, prefill time)."""
    queue = SharedQueue()
    for i, (arrival_s, slo_s, prefill_s) in enumerate(jobs):
        queue.push(RequestState(i, arrival_s, 100, 10, 10, Slo(ttft_s=slo_s)), prefill_s)
    return queue


def _scheduled(queue: SharedQueue, now_s: float) -> list[RequestState]:
    """S: the largest set that can have their first tokens in time, in order."""
    return [job.request for job in in_time(queue._jobs, now_s, 1e-6)]


def test_shared_queue_postpones_the_longest_where_one_would_be_late() -> None:
    # By deadline 0 (3 s), 1 (2 s), 2 (2 s). After 2 the clock stands at 7 > 6: 0 goes out.
    queue = _queue([(0, 4, 3), (0, 5, 2), (0, 6, 2)])
    assert [r.id for r in _scheduled(queue, 0.0)] == [1, 2]
    assert [r.id for r in queue.ordered(0.0)] == [1, 2, 0]  # it stays, behind the others
    assert [r.id for r in _scheduled(queue, 3.5)] == [2]


def test_shared_queue_counts_times_of_each_model() -> None:
    # The same deadline: the model with the slower prefill is the longer job and goes out.
    queue = _queue([(0, 1, 0.9), (0, 1, 0.4), (0, 1, 0.5)])
    assert [r.id for r in _scheduled(queue, 0.0)] == [1, 2]


def test_shared_queue_remove_takes_the_request_out() -> None:
    queue = _queue([(0, 4, 3), (0, 5, 2)])
    queue.remove(next(iter(queue)))
    assert [r.id for r in queue] == [1]
    assert len(queue) == 1


def test_shared_queue_request_without_slo_is_never_late() -> None:
    queue = _queue([(0, float("inf"), 3), (1, 5, 2)])
    assert [r.id for r in queue.ordered(0.0)] == [1, 0]


def _most_in_time(jobs: list[tuple[float, float, float]]) -> int:
    most_met = 0
    for order in permutations(jobs):
        now_s, met = 0.0, 0
        for arrival_s, slo_s, prefill_s in order:
            if now_s + prefill_s <= arrival_s + slo_s + 1e-9:
                now_s += prefill_s  # who would be late is served after all others
                met += 1
        most_met = max(most_met, met)
    return most_met


_WHOLE_MS = st.integers(1, 40).map(lambda ms: ms / 1000)
_HALF_MS = st.integers(1, 40).map(lambda ms: (ms + 0.5) / 1000)  # no deadline is met to the dot
_JOBS = st.tuples(st.just(0.0), _HALF_MS, _WHOLE_MS)


@settings(max_examples=60, deadline=None)
@given(st.lists(_JOBS, min_size=1, max_size=6))
def test_no_order_has_more_first_tokens_in_time_than_the_shared_queue(
    jobs: list[tuple[float, float, float]],
) -> None:
    assert len(_scheduled(_queue(jobs), 0.0)) == _most_in_time(jobs)


@settings(max_examples=25, deadline=None)
@given(st.lists(_JOBS, min_size=7, max_size=9))
def test_no_subset_of_nine_in_time_is_larger_than_the_shared_queues(
    jobs: list[tuple[float, float, float]],
) -> None:
    """A set can be in time if it can by deadline: so it is enough to try subsets."""
    by_deadline = sorted(jobs, key=lambda job: job[0] + job[1])
    most_met = 0
    for chosen in range(1 << len(jobs)):
        clock_s, fits = 0.0, True
        for i, (arrival_s, slo_s, prefill_s) in enumerate(by_deadline):
            if chosen >> i & 1:
                clock_s += prefill_s
                fits = fits and clock_s <= arrival_s + slo_s + 1e-9
        if fits:
            most_met = max(most_met, chosen.bit_count())
    assert len(_scheduled(_queue(jobs), 0.0)) == most_met
