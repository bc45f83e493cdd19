"""Collocation with one part left out or replaced, at a time.

Source: the baselines of §3.4.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.counters import REJECTIONS
from ...core.decisions import Timeout
from ...core.policy import Key
from ...core.state import RequestState
from ...core.view import View
from .collocation_policy import Collocation


@dataclass(frozen=True)
class CollocationLru(Collocation):
    """Collocation with least-recently-used eviction in place of its Algorithm 3.

    Source: the LRU baseline of §3.4. Every decode step touches all KV of the batch, so that
    recency is the moment of entry: the first to enter is evicted first, without exceptions.
    """

    def victim_key(self, r: RequestState, view: View) -> Key:
        return r.first_scheduled_s

    def protected(self, r: RequestState, view: View) -> bool:
        return False

    def eviction_cost_s(self, r: RequestState, view: View) -> float:
        return r.first_scheduled_s


@dataclass(frozen=True)
class CollocationOpen(Collocation):
    """Collocation without admission control: quota and eviction alone.

    Neither Algorithm 1 nor the reservation for high priority. A request enters if its prompt and
    the embedder's quota fit; none is rejected.
    """

    def mechanisms(self) -> dict[str, str]:
        admission = {"deferrals", "preemptions_for_priority", REJECTIONS}
        return {k: v for k, v in super().mechanisms().items() if k not in admission}

    def fits(self, r: RequestState, view: View) -> bool:
        return True

    def _lacking(self, r: RequestState, view: View) -> float:
        return 0.0

    def _victims(self, view: View, lacking: float) -> list[RequestState]:
        return []  # no request is preempted to admit another

    @property
    def drop_rule(self) -> str:
        return ""

    def timeout(self, r: RequestState, view: View) -> Timeout | None:
        return None
