"""Baselines that drop who has not begun when its time to first token has passed.

Source: Ascendra (see docs/papers.md), §6.3 and §8.6: in its test of overload all systems drop.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.decisions import Leave, Why
from ...core.state import RequestState
from ...core.view import View
from ..sarathi import Sarathi
from ..vllm import Vllm
from ..vllm_v0 import VllmV0


def when_overdue(r: RequestState) -> Leave | None:
    """Its TTFT has passed."""
    if r.slo.ttft_s == float("inf"):
        return None
    return Leave(r.arrival_s + r.slo.ttft_s, Why.DROP)


@dataclass(frozen=True)
class VllmDrop(Vllm):
    """vLLM V1 that drops the overdue."""

    def leave(self, r: RequestState, view: View) -> Leave | None:
        return when_overdue(r)


@dataclass(frozen=True)
class VllmV0Drop(VllmV0):
    """vLLM 0.2 that drops the overdue."""

    def leave(self, r: RequestState, view: View) -> Leave | None:
        return when_overdue(r)


@dataclass(frozen=True)
class SarathiDrop(Sarathi):
    """Sarathi-Serve that drops the overdue."""

    def leave(self, r: RequestState, view: View) -> Leave | None:
        return when_overdue(r)
