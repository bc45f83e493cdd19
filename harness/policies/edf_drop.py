"""Earliest deadline first; who cannot be in time any more is dropped before it begins.

Source: dropping late work is what Clockwork does (Gujarati et al., OSDI 2020, §4.4), here in
iterations of vLLM (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.decisions import Leave, Why
from ..core.policy import knob
from ..core.state import RequestState
from ..core.view import View
from .edf import EarliestDeadlineFirst, due_s


@dataclass(frozen=True)
class EdfDrop(EarliestDeadlineFirst):
    """A request leaves when even an empty server could no longer prefill it by the moment it is
    due.

    `caution` scales the predicted prefill time: above 1 drops earlier, 0 drops at that moment.
    """

    caution: float = knob(1.0, 0.0, 10.0)

    def leave(self, r: RequestState, view: View) -> Leave | None:
        due = due_s(r)
        if due == float("inf"):
            return None
        prefill_s = view.predict.step_s(0, 0, [(0, r.prompt_tokens)]) if self.caution else 0.0
        return Leave(due - self.caution * prefill_s, Why.DROP)
