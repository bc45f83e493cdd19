"""One queue for all models of a GPU: requests that can be in time go first, by deadline.

Source: Prism (see docs/papers.md), Algorithm 2, whose prefill speeds differ from model to model.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ...core.state import RequestState
from ..shared.moore_hodgson import PrefillJob, in_time

_TICK_S = 1e-6  # prefill times in whole microseconds


class SharedQueue:
    """Requests of several models that wait for one GPU.

    Algorithm 2 leaves open what becomes of those that it takes out of the schedule: they stay,
    behind the others and by deadline, and are looked at again each time.
    """

    def __init__(self) -> None:
        self._jobs: list[PrefillJob] = []  # by deadline, then by order of arrival
        self._job_of: dict[int, PrefillJob] = {}
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[RequestState]:
        return (job.request for job in self._jobs)

    def push(self, r: RequestState, prefill_s: float) -> None:
        """`r` enters; its prompt takes `prefill_s` of the GPU (e = p / c)."""
        self._arrived += 1
        due_s = r.arrival_s + r.slo.ttft_s
        job = PrefillJob(due_s, self._arrived, max(1, round(prefill_s / _TICK_S)), r)
        self._job_of[r.id] = job
        insort(self._jobs, job)

    def remove(self, r: RequestState) -> None:
        """`r` leaves from wherever it stands."""
        job = self._job_of.pop(r.id)
        del self._jobs[bisect_left(self._jobs, job)]

    def ordered(self, now_s: float) -> list[RequestState]:
        """All, the next one first: S, then the others."""
        on_time = in_time(self._jobs, now_s, _TICK_S)
        if len(on_time) == len(self._jobs):
            return [job.request for job in on_time]
        seqs = {job.seq for job in on_time}
        rest = (job.request for job in self._jobs if job.seq not in seqs)
        return [*(job.request for job in on_time), *rest]
