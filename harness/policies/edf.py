"""Earliest deadline first, with vLLM's batches.

Source: Liu & Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
Environment" (J. ACM 1973), on vLLM's iterations (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.counters import OVERTAKES
from ..core.policy import Key
from ..core.state import RequestState
from ..core.view import View
from .vllm import Vllm


def due_s(r: RequestState) -> float:
    """The first moment by which an SLO wants something of `r`; never, if it wants nothing."""
    return min(r.arrival_s + min(r.slo.ttft_s, r.slo.e2e_s), r.slo.deadline_s)


@dataclass(frozen=True)
class EarliestDeadlineFirst(Vllm):
    """Earliest deadline first; the request with the latest deadline is preempted.

    The deadline is the earliest moment that the SLO names: first token, end, or deadline.
    """

    def mechanisms(self) -> dict[str, str]:
        return {OVERTAKES: "requests that began before older ones"}

    def queue_key(self, r: RequestState, view: View) -> Key:
        return due_s(r)

    def victim_key(self, r: RequestState, view: View) -> Key:
        return -due_s(r)
