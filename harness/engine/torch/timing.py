"""A measurement, and one of something that never changes beside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of a step and of the reference right before and after it; or of a copy alone."""

    seconds: float
    reference_s: float | None = None
