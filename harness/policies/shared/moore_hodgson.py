"""Moore-Hodgson order: as many requests as possible have their first token in time.

Source: Moore, "An n Job, One Machine Sequencing Algorithm for Minimizing the Number of Late Jobs"
(Management Science, 1968), as Prism (see docs/papers.md) uses it in Algorithm 2.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import compress
from typing import Any, NamedTuple

from ...core.state import RequestState
from ...core.view import View

_ROUNDING_S = 1e-9
_PLACE_BITS = 32
_PLACES = (1 << _PLACE_BITS) - 1


class PrefillJob(NamedTuple):
    """A prefill: when it is due and the tokens it takes. Compares by `due_s`, then `seq`."""

    due_s: float
    seq: int
    tokens: int
    request: RequestState


def in_time(jobs: Sequence[PrefillJob], start_s: float, s_per_token: float) -> list[PrefillJob]:
    """The most jobs of `jobs` (sorted) that can all be in time, one after the other from `start_s`.

    Of all such sets the one with the least work; of equally long jobs the last due is left out.
    """
    longest: list[int] = []  # of those kept, negated: tokens, and place in `jobs` below them
    keep = bytearray(b"\1") * len(jobs)
    tokens = 0
    for index, (due_s, _, job_tokens, _) in enumerate(jobs):
        heappush(longest, -(job_tokens << _PLACE_BITS) - index)
        tokens += job_tokens
        if start_s + tokens * s_per_token > due_s:
            packed = -heappop(longest)
            tokens -= packed >> _PLACE_BITS
            keep[packed & _PLACES] = 0
    return list(compress(jobs, keep))


def slack_s(selected: Iterable[PrefillJob], start_s: float, s_per_token: float) -> float:
    """Seconds by which the start may slip with all of `selected` still in time."""
    least_s, tokens = math.inf, 0
    for due_s, _, job_tokens, _ in selected:
        tokens += job_tokens
        spare_s = due_s - tokens * s_per_token
        if spare_s < least_s:
            least_s = spare_s
    return least_s - start_s


class InTimeQueue:
    """Requests in progress first, then all that can be in time by deadline, then all others by
    deadline.

    The plan is made anew only when it may have changed. While all requests of a largest set of
    least work are in time, the set stays valid, however late and slow the start; without its first,
    once that has begun, it is one for the rest; and with a newcomer, if all are still in time, it
    is one for all. A request that could not be in time even alone changes nothing. Of equally long
    jobs the last due counts as the longest, so that the set is unique. `job` describes a request;
    its deadline is -inf for a request in progress (it was preempted) and inf without an SLO.
    """

    def __init__(
        self,
        view: View,
        job: Callable[[RequestState], PrefillJob],
        s_per_token: Callable[[], float],
    ) -> None:
        self._view, self._job, self._s_per_token = view, job, s_per_token
        self._jobs: dict[RequestState, PrefillJob] = {}
        self.live = 0
        self._under_way: list[PrefillJob] = []
        self._under_way_tokens = 0
        self._endless: list[PrefillJob] = []
        self._due: list[PrefillJob] = []  # those with a deadline ahead
        self._late: list[PrefillJob] = []  # requests past their deadline
        self._plan: list[PrefillJob] = []  # of `_due`, the next one last
        self._plan_tokens = 0
        self._new: dict[RequestState, PrefillJob] = {}  # of `_due`, not looked at yet
        self._planned = False  # is `_plan` one, for `_due` without `_new`?
        self._start_s = 0.0
        self._slack_s = 0.0  # at least so much may the start slip
        self._rate = 0.0
        self._head: RequestState | None = None

    def push(self, r: RequestState) -> None:
        """Add `r` to the queue."""
        r.version += 1
        self.live += 1
        self._jobs[r] = job = self._job(r)
        insort(self._list_of(job), job)
        if job.due_s == -math.inf:
            self._under_way_tokens += job.tokens
        elif job.due_s < math.inf:
            self._new[r] = job

    def _list_of(self, job: PrefillJob) -> list[PrefillJob]:
        if job.due_s == -math.inf:
            return self._under_way
        return self._due if job.due_s < math.inf else self._endless

    def remove(self, r: RequestState) -> None:
        """`r` leaves from wherever it stands."""
        r.version += 1
        self.live -= 1
        job = self._jobs.pop(r)
        if job.due_s == -math.inf:
            self._under_way_tokens -= job.tokens
        if not _discard(self._list_of(job), job):
            _discard(self._late, job)
        if self._new.pop(r, None) is not None:
            return
        if self._plan and self._plan[-1] is job:
            self._plan.pop()
            self._plan_tokens -= job.tokens
            self._start_s += job.tokens * self._rate
        elif _discard(self._plan, job, key=_last_first):
            self._planned = False  # another request may be in time instead

    def take_head(self) -> None:
        """The request that `head` has just named leaves."""
        assert self._head is not None
        self.remove(self._head)

    def head(self) -> RequestState:
        """The next request; the queue must not be empty."""
        if self.live == 1:
            self._head = next(iter(self._jobs))
        elif self._under_way:
            self._head = self._under_way[0].request
        else:
            if self._due:
                self._replan()
            if self._plan:
                self._head = self._plan[-1].request
            else:
                left = self._endless[:1] or [*self._late[:1], *self._due[:1]]
                self._head = min(left).request
        return self._head

    def _replan(self) -> None:
        now_s, rate = self._view.now_s, self._s_per_token()
        start_s = now_s + rate * (self._view.remaining_prefill_tokens + self._under_way_tokens)
        if self._planned and self._still_planned(start_s, rate):
            return
        due = self._due
        passed = bisect_left(due, (now_s,))
        for job in due[:passed]:
            insort(self._late, job)
        del due[:passed]
        self._plan = in_time(due, start_s, rate)
        self._slack_s = slack_s(self._plan, start_s, rate)
        self._plan.reverse()
        self._plan_tokens = sum(job.tokens for job in self._plan)
        self._start_s, self._rate = start_s, rate
        self._new.clear()
        self._planned = True

    def _still_planned(self, start_s: float, rate: float) -> bool:
        """Take the newcomers into the plan; False if it must be made anew."""
        slipped_s = start_s - self._start_s
        nobody_left_out = len(self._plan) + len(self._new) == len(self._due)
        if not nobody_left_out and (slipped_s < -_ROUNDING_S or rate < self._rate):
            return False
        if slipped_s < 0 and not nobody_left_out:
            start_s, slipped_s = self._start_s, 0.0
        spare_s = self._slack_s - slipped_s if rate == self._rate else -math.inf
        new = [job for job in self._new.values() if start_s + job.tokens * rate <= job.due_s]
        if new:
            tokens = sum(job.tokens for job in new)
            self._plan_tokens += tokens
            end_s = start_s + self._plan_tokens * rate
            spare_s = min(spare_s - tokens * rate, min(new).due_s - end_s)
            if len(new) < len(self._plan):
                for job in new:
                    insort(self._plan, job, key=_last_first)
            else:
                self._plan = sorted([*self._plan, *new], reverse=True)
        if spare_s < _ROUNDING_S:
            spare_s = slack_s(reversed(self._plan), start_s, rate)
        self._new.clear()
        self._start_s, self._slack_s, self._rate = start_s, spare_s, rate
        self._planned = spare_s >= _ROUNDING_S
        return self._planned

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._jobs))

    def ordered(self) -> Iterator[RequestState]:
        """All waiting requests in queue order, the next first."""
        self._replan()
        planned = set(self._plan)
        rest = sorted([*self._late, *(job for job in self._due if job not in planned)])
        order = (self._under_way, reversed(self._plan), self._endless, rest)
        return (job.request for group in order for job in group)

    def overtaken_s(self) -> float:
        """Never by time alone: the engine looks again when something happens."""
        return math.inf


def _last_first(job: PrefillJob) -> tuple[float, int]:
    return -job.due_s, -job.seq


def _discard(
    jobs: list[PrefillJob], job: PrefillJob, key: Callable[[PrefillJob], Any] | None = None
) -> bool:
    """Take it out of a list sorted by `key`, if it is there."""
    index = bisect_left(jobs, job if key is None else key(job), key=key)
    if index < len(jobs) and jobs[index] is job:
        del jobs[index]
        return True
    return False
