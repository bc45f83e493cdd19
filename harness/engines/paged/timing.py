"""A measurement beside one of something that never changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of a batch or copy, and of its reference right before and after it."""

    seconds: float
    reference_s: float

    @property
    def ratio(self) -> float:
        """What the speed of the machine at that moment has less to do with."""
        return self.seconds / self.reference_s
