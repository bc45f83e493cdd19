"""AdaptiveLLM towards deadlines: the nearest goes first, what cannot meet its own is let go.

Source: AdaptiveLLM (see docs/papers.md), §6 (1), which names it as future work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.decisions import Leave, Why
from ..core.policy import Key
from ..core.state import RequestState
from ..core.view import View
from .adaptivellm import AdaptiveLlm


@dataclass(frozen=True)
class AdaptiveLlmDeadlines(AdaptiveLlm):
    """AdaptiveLLM's memory decisions (Algorithm 1) with deadlines for priorities.

    A request is due when its SLO says that its last token must be out (`e2e` after its arrival, or
    its `deadline`); the nearer, the higher its priority. One that has not begun is let go as soon
    as it could not be done in time even by itself. Without such an SLO requests go in the order in
    which they came.
    """

    order: ClassVar[Literal["entry", "cache", "time"]] = "entry"
    reads_lengths: ClassVar[bool] = True

    def due_s(self, r: RequestState) -> float:
        """When the last token must be out; infinite where nobody asks."""
        return min(r.arrival_s + r.slo.e2e_s, r.slo.deadline_s)

    def priority(self, r: RequestState, view: View) -> float:
        """For the mean of a group (Algorithm 2): it grows as the deadline comes near."""
        return 1 / max(1e-3, self.due_s(r) - view.now_s)

    def urgency(self, r: RequestState, view: View) -> Key:
        return (self.due_s(r), r.arrival_s) if self.fair else r.arrival_s

    def keep(self, r: RequestState, view: View) -> Key:
        return (-self.due_s(r), -r.arrival_s) if self.fair else -r.arrival_s

    def leave(self, r: RequestState, view: View) -> Leave | None:
        due_s = self.due_s(r)
        if due_s == float("inf"):
            return None
        decodes = view.predict.output_tokens(r) - 1
        least_s = self._step_s(view, 0, 0, r.prompt_tokens)
        if decodes:
            least_s += decodes * self._step_s(view, 1, r.prompt_tokens)
        return Leave(due_s - least_s, Why.DROP)
