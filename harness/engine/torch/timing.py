"""A measurement together with one of a constant reference in the same round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of a step and of the reference right before and after it; or of a copy alone."""

    seconds: float
    reference_s: float | None = None
