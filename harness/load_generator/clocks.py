"""Offset of another machine's clock, with bounds on its error.

We ask it for its time again and again. Whatever it reads, it read after we asked and before the
answer was here; so each answer bounds the difference, however slow the way there or back, and all
bounds hold together (F. Cristian, Probabilistic clock synchronization, Distributed Computing 3,
1989; K. Marzullo, Maintaining the time in a distributed system, 1984, for their intersection).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

_READINGS = 20


@dataclass(frozen=True)
class ClockReading:
    """Another clock showed `read_s` between `asked_s` and `answered_s` of ours."""

    asked_s: float
    read_s: float
    answered_s: float


@dataclass(frozen=True)
class Offset:
    """The other clock shows our time plus `offset_s`, ± `error_s`."""

    offset_s: float
    error_s: float


def offset_of(readings: Sequence[ClockReading]) -> Offset:
    """Intersect the bounds of all readings."""
    low_s = max(one.read_s - one.answered_s for one in readings)
    high_s = min(one.read_s - one.asked_s for one in readings)
    # Clocks that ran apart meanwhile may leave nothing between; then by how much says it.
    return Offset((low_s + high_s) / 2, abs(high_s - low_s) / 2)


def read_offset(read: Callable[[], float]) -> Offset:
    """Measure the offset of another clock, which `read` reads."""
    readings = []
    for _ in range(_READINGS):
        asked_s = perf_counter()
        read_s = read()
        readings.append(ClockReading(asked_s, read_s, perf_counter()))
    return offset_of(readings)


def error_over(before: Offset, after: Offset) -> float:
    """By how much `before` may be wrong at any moment until `after`, of clocks that run apart
    steadily.
    """
    return max(before.error_s, abs(after.offset_s - before.offset_s) + after.error_s)
