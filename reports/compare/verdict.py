"""From draws to statements: intervals, p-values, and Holm's correction for many of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """Where a difference lies with the confidence asked for; NaN where that cannot be said."""

    low: float
    high: float


NOWHERE = Interval(math.nan, math.nan)


def interval(draws: Floats, confidence: float) -> Interval:
    """Percentile interval of the draws."""
    known = draws[np.isfinite(draws)]
    if len(known) < 0.9 * len(draws):
        return NOWHERE
    tail = (1 - confidence) / 2
    low, high = np.quantile(known, (tail, 1 - tail))
    return Interval(float(low), float(high))


def p_value(difference: float, draws: Floats) -> float:
    """Two-sided probability of so large a difference where there is none.

    The share of draws on the other side of zero, twice. Where no draw is there, the normal tail
    says how far below one draw's share it is, for a correction for many comparisons needs that.
    """
    known = draws[np.isfinite(draws)]
    if not math.isfinite(difference) or len(known) < 0.9 * len(draws):
        return math.nan
    if difference == 0:
        return 1.0
    beyond = int((known <= 0).sum() if difference > 0 else (known >= 0).sum())
    if beyond:
        return min(1.0, 2 * (beyond + 1) / (len(known) + 1))
    resolution = 2 / (len(known) + 1)
    spread = float(known.std(ddof=1))
    if spread == 0:
        return resolution
    return min(resolution, math.erfc(abs(difference) / spread / math.sqrt(2)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979): the chance that even one of those called
    significant is none stays below the level. NaN stays NaN and does not count.
    """
    known = [(p, at) for at, p in enumerate(p_values) if not math.isnan(p)]
    adjusted = list(p_values)
    reached = 0.0
    for rank, (p, at) in enumerate(sorted(known)):
        reached = max(reached, min(1.0, p * (len(known) - rank)))
        adjusted[at] = reached
    return adjusted
