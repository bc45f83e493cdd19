"""Collocation without admission control: quota and eviction alone.

Source: "SLO-Aware KV Cache Management for Collocated LLM-Embedding Services" (see docs/papers.md)
without its Algorithm 1 and without its reservation for high priority.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.decisions import Timeout
from ...core.state import RequestState
from ...core.view import View
from .policy import Collocation


@dataclass(frozen=True)
class CollocationOpen(Collocation):
    """A request enters if its prompt and the embedder's quota fit; none is rejected."""

    def fits(self, r: RequestState, view: View) -> bool:
        return True

    def _lacking(self, r: RequestState, view: View) -> float:
        return 0.0

    def _victims(self, view: View, lacking: float) -> list[RequestState]:
        return []  # no request is preempted to admit another

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        return None
