"""Verdicts on published figures: from one value a seed to an interval, and to what it says.

The 95 % interval of a mean is by Student's t. A verdict must also hold in each of three disjoint
sets of the seeds, by their means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...tuner.capacity.curve import student_t
from .published_table import PublishedFigure

Verdict = Literal[
    "reproduced",
    "same order",
    "not reproduced",
    "depends on what is assumed",
    "undecided",
    "tells nothing",
    "same policy here",
    "another set-up",
    "not unique",
    "not run",
    "no figure published",
]
VERDICTS: tuple[Verdict, ...] = Verdict.__args__  # type: ignore[attr-defined]
LEAST_SEEDS = 3  # for an interval
SEED_SETS = 3
"""Disjoint sets of seeds that must agree."""

_T = {2: 4.303, 3: 3.182}  # quantile 0.975 with fewer degrees of freedom than `student_t` has
_MOST_SEEDS = 1000  # more seeds than that are no advice
HOLDS: Mapping[Verdict, bool] = {"reproduced": True, "same order": True, "not reproduced": False}
"""Whether the claim holds, by verdicts that say so; the others do not tell."""

RULES = (
    "Verdicts are decided by the 95 % interval over seeds. The tolerance is a tenth of the "
    "published figure; of a comparison, a tenth of the published distance from no difference. "
    "Reproduced: the interval meets the figure ± tolerance and is itself no wider, or lies wholly "
    "within a published bound. Same order: not so, but the comparison or order has the published "
    "direction in the whole interval. Not reproduced: the interval excludes the figure or bound "
    "and does not show the direction, or shows the other. Undecided: fewer than "
    f"{LEAST_SEEDS} seeds, the interval allows several of these, or the means of three disjoint "
    "sets of the seeds do not all say the same. Depends: another value of an assumed setting gives "
    "another verdict. Tells nothing: both sides have the same share in time in every seed, as "
    "where nothing or everything is late. Same policy here: both sides are equal in every cell."
)


@dataclass(frozen=True)
class Interval:
    """The mean of one value a seed, and half of its 95 % interval (infinite: too few seeds)."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half


@dataclass(frozen=True)
class Judgement:
    """A verdict on values over seeds. `remark`: why it is undecided and what would decide it."""

    verdict: Verdict
    remark: str = ""


def judgement(
    series: Sequence[Sequence[float]], decide: Callable[[Sequence[Interval]], Verdict]
) -> Judgement:
    """The verdict on one or more series of values over the same seeds.

    Args:
        series: one value a seed each: a figure, or the steps of an order.
        decide: the verdict on the series' intervals.
    """
    intervals = [interval_over_seeds(values) for values in series]
    overall = decide(intervals)
    n = len(series[0])
    endless = not all(math.isfinite(interval.half) for interval in intervals)
    if endless or overall not in (*HOLDS, "undecided"):
        return Judgement(overall)
    sets = [
        decide([Interval(float(np.mean(values[part::SEED_SETS])), 0) for values in series])
        for part in range(SEED_SETS)
    ]
    if overall == "undecided":
        return Judgement(overall, _seeds_that_decide(intervals, n, decide))
    if any(HOLDS.get(of_set) is not HOLDS[overall] for of_set in sets):
        disagreement = f"three sets of seeds say: {', '.join(sets)}"
        needed = _seeds_that_decide(intervals, n, decide)
        return Judgement("undecided", f"{disagreement}; {needed}")
    return Judgement("same order" if "same order" in sets else overall)


def _seeds_that_decide(
    intervals: Sequence[Interval], n: int, decide: Callable[[Sequence[Interval]], Verdict]
) -> str:
    """With how many seeds a third of them would have a verdict, if means and spread stay."""
    for seeds in range(n + 1, _MOST_SEEDS + 1):
        narrower = math.sqrt(SEED_SETS * n / seeds)
        if decide([Interval(i.mean, i.half * narrower) for i in intervals]) in HOLDS:
            return f"about {seeds} seeds would decide"
    return f"{_MOST_SEEDS:,} seeds would not decide: the mean lies at the limit"


def interval_over_seeds(values: Sequence[float]) -> Interval:
    """Mean and half of its 95 % interval; infinite for too few seeds, or a value without end."""
    mean = float(np.mean(values))
    if len(values) < LEAST_SEEDS or not math.isfinite(mean):
        return Interval(mean, math.inf)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    freedom = len(values) - 1
    return Interval(mean, (_T.get(freedom) or student_t(0.975, freedom)) * error)


def crossing(points: Mapping[float, float], level: float) -> float | None:
    """The first value of an axis at which `points` cross `level`; None where they do not.

    Args:
        points: values by the value of the axis; linear between them.
        level: what is crossed, from either side.
    """
    for (low, before), (high, after) in itertools.pairwise(sorted(points.items())):
        if before != after and min(before, after) <= level <= max(before, after):
            return low + (high - low) * (level - before) / (after - before)
    return None


def verdict(interval: Interval, figure: PublishedFigure | None, null: float | None) -> Verdict:
    """The verdict on a figure, by `RULES`; `null` is the comparison's "no difference"."""
    if figure is None:
        return "no figure published"
    if not math.isfinite(interval.half):
        return "undecided"
    if figure.bound:
        if figure.low <= interval.low and interval.high <= figure.high:
            return "reproduced" if null is None else "same order"
        outside = interval.high < figure.low or figure.high < interval.low
        return "not reproduced" if outside else "undecided"
    meets = (
        interval.high >= figure.low - figure.tolerance
        and interval.low <= figure.high + figure.tolerance
    )
    direction = 0.0  # of the published comparison: up, down, or none
    if null is not None and not figure.low < null < figure.high:
        direction = np.sign(figure.low + figure.high - 2 * null)
        if direction * (interval.mean - null) < -interval.half:
            return "not reproduced"
    if meets and interval.half <= figure.tolerance:
        return "reproduced"
    if null is not None and direction and direction * (interval.mean - null) > interval.half:
        return "same order"
    return "undecided" if meets else "not reproduced"


def order_verdict(steps: Sequence[Interval]) -> Verdict:
    """Every step down in the published order must be one here."""
    if any(step.high < 0 for step in steps):
        return "not reproduced"
    return "same order" if all(step.low > 0 for step in steps) else "undecided"
