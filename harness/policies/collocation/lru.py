"""Collocation with least-recently-used eviction in place of its Algorithm 3.

Source: the LRU baseline of "SLO-Aware KV Cache Management for Collocated LLM-Embedding Services"
(§3.4; see docs/papers.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.policy import Key
from ...core.state import RequestState
from ...core.view import View
from .policy import Collocation


@dataclass(frozen=True)
class CollocationLru(Collocation):
    """Every decode step touches all KV of the batch, so that recency is the moment of entry: the
    first to enter is evicted first, without exceptions.
    """

    def victim_key(self, r: RequestState, view: View) -> Key:
        return r.first_scheduled_s

    def protected(self, r: RequestState, view: View) -> bool:
        return False

    def eviction_cost_s(self, r: RequestState, view: View) -> float:
        return r.first_scheduled_s
