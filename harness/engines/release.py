"""A request that an instance gives back to the router."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.decisions import Why
from ..core.state import RequestState


@dataclass(frozen=True, slots=True)
class Release:
    """Offloaded, dropped, rejected; or finished, where somebody waits for the answer."""

    request: RequestState
    why: Why

    @classmethod
    def finish(cls, r: RequestState) -> Release:
        """`r` is done and somebody waits for it."""
        return cls(r, Why.FINISH)
