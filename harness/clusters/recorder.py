"""Writes what became of requests into the columns of `Records`, many at a time."""

from __future__ import annotations

import numpy as np

from ..core.decisions import Why
from ..core.records import Outcome, Records
from ..core.state import RequestState
from ..engines.release import Release

_OUTCOMES = {Why.DROP: Outcome.DROPPED, Why.REJECT: Outcome.REJECTED, Why.OFFLOAD: Outcome.DROPPED}


class Recorder:
    """Collects ended requests and forgets their objects."""

    def __init__(self, n: int, arrival_s: np.ndarray) -> None:
        self.records = Records.empty(n)
        self.records.arrival_s[:] = arrival_s
        self.ended = 0

    def finished(self, requests: list[RequestState]) -> None:
        """Those have all their tokens."""
        if not requests:
            return
        self.ended += len(requests)
        rows = np.array([r.id for r in requests])
        columns = self.records
        columns.arrival_s[rows] = [r.arrival_s for r in requests]
        columns.scheduled_s[rows] = [r.scheduled_s for r in requests]
        columns.first_token_s[rows] = [r.first_token_s for r in requests]
        columns.finish_s[rows] = [r.finish_s for r in requests]
        columns.outcome[rows] = Outcome.FINISHED
        columns.tokens_out[rows] = [r.emitted_tokens for r in requests]
        columns.cached_tokens[rows] = [max(r.cached_tokens, 0) for r in requests]
        columns.preemptions_swap[rows] = [r.swaps for r in requests]
        columns.preemptions_recompute[rows] = [r.recomputes for r in requests]
        columns.instance[rows] = [r.instance for r in requests]

    def gone(self, release: Release, now_s: float) -> None:
        """That one will not be served."""
        r, columns = release.request, self.records
        self.ended += 1
        columns.arrival_s[r.id] = r.arrival_s
        columns.finish_s[r.id] = now_s
        columns.outcome[r.id] = _OUTCOMES[release.why]
        columns.instance[r.id] = r.instance

    def cancelled(self, rows: list[int]) -> None:
        """Those never arrived."""
        self.ended += len(rows)
        self.records.arrival_s[rows] = np.nan
        self.records.outcome[rows] = Outcome.CANCELLED

    def rejected(self, rows: np.ndarray) -> None:
        """Those were refused at the door."""
        self.ended += len(rows)
        self.records.outcome[rows] = Outcome.REJECTED
