"""A request that an instance gives back, or tells of."""

from __future__ import annotations

from typing import NamedTuple

from .decisions import ReleaseReason
from .state import RequestState


class Release(NamedTuple):
    """What became of a request at `time_s`, the clock of its instance."""

    request: RequestState
    reason: ReleaseReason
    time_s: float

    @classmethod
    def finish(cls, r: RequestState) -> Release:
        """The end of `r`, for a process that waits for it."""
        return cls(r, ReleaseReason.FINISH, r.finish_s)
