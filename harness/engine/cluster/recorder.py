"""Writes what became of requests into the columns of `Records`, many at a time."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from ...core.decisions import ReleaseReason
from ...core.records import Outcome, Records
from ...core.release import Release
from ...core.state import RequestState

_OUTCOMES = {
    ReleaseReason.DROP: Outcome.DROPPED,
    ReleaseReason.REJECT: Outcome.REJECTED,
    ReleaseReason.OFFLOAD: Outcome.DROPPED,
    ReleaseReason.FAIL: Outcome.FAILED,
}


_ALWAYS = {
    "first_scheduled_s": "first_scheduled_s",
    "first_token_s": "first_token_s",
    "finish_s": "finish_s",
    "output_tokens": "emitted_tokens",
}
# Columns that stay at their defaults on an instance without followers, cache or preemption.
_EVENTFUL = {
    "arrival_s": "arrival_s",
    "queued_s": "queued_s",
    "cached_tokens": "cached_tokens",
    "preemptions_swap": "swaps",
    "preemptions_recompute": "recomputes",
}


class Recorder:
    """Collects ended requests and forgets their objects."""

    def __init__(self, n: int, arrival_s: np.ndarray) -> None:
        self.records = Records.empty(n)
        self.records.arrival_s[:] = self.records.queued_s[:] = arrival_s
        self.ended = 0

    def finished(self, requests: list[RequestState], instance: int, *, eventful: bool) -> None:
        """Those have all their tokens from that instance.

        `eventful`: some may have followed others, been preempted or found a cached prefix.
        """
        if not requests:
            return
        self.ended += len(requests)
        columns = _ALWAYS | _EVENTFUL if eventful else _ALWAYS
        values = zip(*map(attrgetter("id", *columns.values()), requests), strict=True)
        rows = np.array(next(values))
        for name in columns:
            getattr(self.records, name)[rows] = next(values)
        self.records.outcome[rows] = Outcome.FINISHED
        self.records.instance[rows] = instance

    def gone(self, release: Release) -> None:
        """That one will not be served: it has no finish."""
        r, columns = release.request, self.records
        self.ended += 1
        columns.arrival_s[r.id] = r.arrival_s
        columns.queued_s[r.id] = r.queued_s
        columns.outcome[r.id] = _OUTCOMES[release.reason]
        columns.instance[r.id] = r.instance

    def cancelled(self, rows: list[int]) -> None:
        """Rows of requests that never arrived."""
        self.ended += len(rows)
        self.records.arrival_s[rows] = self.records.queued_s[rows] = np.nan
        self.records.outcome[rows] = Outcome.CANCELLED

    def rejected(self, rows: np.ndarray) -> None:
        """Those were refused at the door."""
        self.ended += len(rows)
        self.records.outcome[rows] = Outcome.REJECTED
