"""Requests that are dropped before they begin because they would be late, and baselines that do so.

Source: Ascendra (see docs/papers.md), §6.3 and §8.6, for the baselines: in its test of overload
all systems drop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.counters import DROPS
from ...core.decisions import ReleaseReason, Timeout
from ...core.policy import Parameters
from ...core.state import RequestState
from ...core.view import View
from ..edf import due_s
from ..sarathi import Sarathi
from ..vllm import Vllm
from ..vllm_v0 import VllmV0

DROPPING = {DROPS: "requests that were dropped before they began"}


def when_overdue(r: RequestState) -> Timeout | None:
    """Drop it when its TTFT SLO has passed."""
    due = r.arrival_s + r.slo.ttft_s
    return None if due == math.inf else Timeout(due, ReleaseReason.DROP)


OVERDUE = "its TTFT SLO has passed before it begins"


class DropsOverdue(Parameters):
    """Drops a request when its TTFT SLO has passed."""

    @property
    def drop_rule(self) -> str:
        return OVERDUE

    def mechanisms(self) -> dict[str, str]:
        return super().mechanisms() | DROPPING

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        return when_overdue(r)


class DropsHopeless(Parameters):
    """Drops a request when even an empty server could not prefill it in time.

    `caution` scales the predicted prefill time: above 1 drops earlier, 0 drops at the deadline.
    """

    caution: float

    @property
    def drop_rule(self) -> str:
        return "it can no longer be prefilled by its first deadline"

    def mechanisms(self) -> dict[str, str]:
        return super().mechanisms() | DROPPING

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        due = due_s(r)
        if due == math.inf:
            return None
        prefill_s = view.predict.step_s(0, 0, ((0, r.prompt_tokens),)) if self.caution else 0.0
        return Timeout(due - self.caution * prefill_s, ReleaseReason.DROP)


@dataclass(frozen=True)
class VllmDrop(DropsOverdue, Vllm):
    """vLLM V1 that drops the overdue."""


@dataclass(frozen=True)
class VllmV0Drop(DropsOverdue, VllmV0):
    """vLLM 0.2 that drops the overdue."""


@dataclass(frozen=True)
class SarathiDrop(DropsOverdue, Sarathi):
    """Sarathi-Serve that drops overdue requests."""
