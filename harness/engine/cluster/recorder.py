"""What the instances of one cell did: records of their requests, timeline and sums."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from ...core.decisions import ReleaseReason
from ...core.records import Outcome, Records, Timeline, Totals
from ...core.state import Release, RequestState
from ..loop.instance import EngineInstance
from ..loop.measures import summed

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


def timeline_of(instances: Sequence[EngineInstance]) -> Timeline:
    """Sums over all instances; an instance is empty from the end of its work on."""
    total = sum(i.kv_manager.total for i in instances)
    times, sums = summed([*i.measures.samples, (i.now_s, 0, 0, 0)] for i in instances)
    return Timeline(times, sums[0], sums[1], sums[2] / total)


def totals_of(instances: Sequence[EngineInstance], records: Records) -> Totals:
    """Sums over all instances; GPU time is left unknown (NaN)."""
    measures = [i.measures for i in instances]
    blocks = sum(i.kv_manager.total for i in instances)
    finish_s = records.finish_s
    makespan_s = float(np.nanmax(finish_s)) if np.isfinite(finish_s).any() else 0.0
    block_s = makespan_s * blocks
    return Totals(
        makespan_s=makespan_s,
        busy_s=sum(i.now_s - i.measures.idle_s for i in instances),
        steps=sum(m.steps for m in measures),
        prefill_tokens=sum(m.prefill_tokens for m in measures),
        decode_tokens=sum(m.decode_tokens for m in measures),
        padded_tokens=sum(m.padded_tokens for m in measures),
        kv_cache_usage_peak=sum(m.kv_peak for m in measures) / blocks if blocks else 0.0,
        kv_cache_usage_mean=sum(m.kv_block_s for m in measures) / block_s if block_s else 0.0,
    )
