"""Requests that are dropped before they begin because they would be late."""

from __future__ import annotations

import math

from ...core.decisions import Leave, Why
from ...core.state import RequestState
from ...core.view import View
from ..edf import due_s


def when_overdue(r: RequestState) -> Leave | None:
    """Drop it when its TTFT SLO has passed."""
    due = r.arrival_s + r.slo.ttft_s
    return None if due == math.inf else Leave(due, Why.DROP)


class DropsOverdue:
    """Drops a request when its TTFT SLO has passed."""

    def leave(self, r: RequestState, view: View) -> Leave | None:
        return when_overdue(r)


class DropsHopeless:
    """Drops a request when even an empty server could not prefill it in time.

    `caution` scales the predicted prefill time: above 1 drops earlier, 0 drops at the deadline.
    """

    caution: float

    def leave(self, r: RequestState, view: View) -> Leave | None:
        due = due_s(r)
        if due == math.inf:
            return None
        prefill_s = view.predict.step_s(0, 0, ((0, r.prompt_tokens),)) if self.caution else 0.0
        return Leave(due - self.caution * prefill_s, Why.DROP)
