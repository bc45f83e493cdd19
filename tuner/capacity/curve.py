"""Estimates the rate at which attainment crosses a target, from runs at a few rates near it.

The tail of a queue's waiting time falls about exponentially, at a pace that is linear in the load
it has to spare. The log of the share that misses a bound is therefore nearly a straight line over
the rate; so is the logit of attainment, which is the same where few miss and bends where many do:

    logit A(λ) = logit(target) − slope · (log λ − log capacity),    slope > 0

It is fitted by maximum quasi-likelihood to the runs near the crossing, where a straight line is
a good approximation, with the capacity itself as a parameter. Requests of one run
are not independent, so the variance is `dispersion` times the binomial one: the larger of what the
scatter between runs shows and what batch means within the runs show. Runs of drawn workloads are
corrected by a control variate first (`control.py`). The interval holds every
capacity whose profile quasi-likelihood passes the F test (P. McCullagh & J. A. Nelder, Generalized
Linear Models, 2nd ed. 1989, sections 4.5, 9.2; D. A. Williams, Interval estimation of the median
lethal dose, Biometrics 42, 1986).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from ...harness.results.stationarity import MOST_GROWTH, grows, keeps_up
from .control import control_sums, corrected, dispersion_within
from .level_samples import LevelSample, wilson_interval

CONFIDENCE = 0.95
# A little wider than 0.975: a search stops where the interval happens to be narrow. On servers,
# where runs are few and short, 0.98 covered 86 to 95 %.
QUANTILE, REAL_QUANTILE = 0.98, 0.99
WIDE_LOGITS = 3.0  # the slope is looked for among levels so far from the target
NEAR_LOGITS = 1.5  # and the crossing among these: odds to miss within a factor of 4.5
_SLOPE_DOUBT = 0.3  # the near slope is within a factor of e^0.3 of the wide one, more or less
_WIDE_SLOPES = np.array([0.5, 4000.0])  # the range in which a slope is looked for
_NEAR_SLOPES = np.exp(4 * _SLOPE_DOUBT * np.array([-1.0, 1.0]))  # likewise, times the wide one
_SLOPES = 41  # of the grid
_POINTS = 81  # of the capacity grid
_MARGIN = 0.03  # by which it reaches beyond the lowest and highest rate
_LEAST_FREEDOM = 4


@dataclass(frozen=True)
class CapacityLevel:
    """All runs at one rate, of which the invalid ones count for nothing.

    `most_growth`: growth of the backlog, as a share of the arrivals, up to which the system keeps
    up. A capacity may be so much too high, so a rough search allows more and needs shorter runs.
    `beta`: the coefficient of the control variate, from this level and those near it.
    """

    rate_rps: float
    samples: tuple[LevelSample, ...]
    most_growth: float = MOST_GROWTH
    beta: float = 0.0

    @cached_property
    def control_sums(self) -> tuple[float, float]:
        """What this level adds to the regression on the control variate."""
        return control_sums(self.valid)

    @cached_property
    def valid(self) -> tuple[LevelSample, ...]:
        """Runs from which something can be concluded."""
        return tuple(sample for sample in self.samples if sample.valid)

    @property
    def invalid_because(self) -> str | None:
        """Why the last invalid run was none to judge by; None if all were."""
        reasons = [sample.invalid_because for sample in self.samples if not sample.valid]
        return reasons[-1] if reasons else None

    @property
    def requests(self) -> int:
        """Total requests of all runs."""
        return sum(sample.requests for sample in self.samples)

    @cached_property
    def judged(self) -> tuple[LevelSample, ...]:
        """The valid runs that are long enough for a verdict, or else all valid ones, corrected by
        their control variate.
        """
        settled = tuple(sample for sample in self.valid if sample.settled)
        return corrected(settled or self.valid, self.beta)

    @cached_property
    def met(self) -> float:
        """Counted requests of the judged runs that met their SLO."""
        met = sum(sample.met for sample in self.judged)
        return min(max(met, 0), self.counted)

    @cached_property
    def counted(self) -> int:
        """Counted requests of the judged runs."""
        return sum(sample.counted for sample in self.judged)

    @property
    def attainment(self) -> float:
        """Share of the counted requests that met their SLO; NaN without a valid run."""
        return self.met / self.counted if self.counted else math.nan

    @cached_property
    def attainment_interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval for as many independent requests as the runs are worth."""
        return wilson_interval(self.attainment, self.counted / dispersion_within(self.judged))

    @cached_property
    def growing(self) -> bool:
        """Whether the backlog grows; the rate is then above capacity, whatever the attainment."""
        return bool(self.valid) and grows(self.judged)

    @cached_property
    def sustained(self) -> bool:
        """Whether settled runs show that the system keeps up with the load."""
        settled = any(sample.settled for sample in self.valid)
        return settled and keeps_up(self.judged, self.most_growth)

    def passes(self, target: float) -> bool | None:
        """Whether attainment reaches the target, by what was run so far.

        None: undecided, because the runs are too short for a system that is overloaded to miss its
        SLOs, and none of them shows that it is. A system that starts empty flatters, so a run that
        misses the target has failed, however short it is.
        """
        if self.growing or self.attainment < target:
            return False
        return True if self.sustained else None


@dataclass(frozen=True)
class Crossing:
    """Estimate of the rate at which attainment crosses a target, with its interval."""

    target: float
    rate_rps: float
    low_rps: float
    high_rps: float
    slope: float  # logits of attainment lost per e-fold of rate
    dispersion: float  # variance over that of independent requests
    runs: int  # near the crossing, on which the interval rests
    worth: float  # approximate number of independent misses

    @property
    def relative_half_width(self) -> float:
        """Half the interval's length over the estimate."""
        return (self.high_rps - self.low_rps) / 2 / self.rate_rps

    @property
    def attainment_half_width(self) -> float:
        """By how much the attainment at the estimate may be off the target, about."""
        return self.relative_half_width * self.slope * self.target * (1 - self.target)


@dataclass(frozen=True)
class _Fit:
    log_rate: float
    slope: float
    low: float
    high: float


def crossing(
    levels: Sequence[CapacityLevel], target: float, quantile: float = QUANTILE
) -> Crossing | None:
    """The crossing of `target`; None unless some level passes and some level fails.

    Args:
        levels: at distinct rates, in any order.
        target: attainment, between 0 and 1.
        quantile: of Student's t, at which the interval ends.
    """
    decided = (lv for lv in levels if lv.counted and lv.passes(target) is not None)
    usable = _usable(sorted(decided, key=lambda lv: lv.rate_rps))
    passing = [level.passes(target) for level in usable]
    if not any(passing) or all(passing):
        return None
    wide = _fitted(_wide(usable, target), target)
    near = _near(usable, target, wide)
    runs = [run for level in near if not level.growing for run in level.judged]
    within = dispersion_within(runs)
    fit = _fitted(near, target, wide.slope, within)
    dispersion = max(within, _scatter(runs, target, fit))
    freedom = max(_LEAST_FREEDOM, len(runs) - 2)
    cut = student_t(quantile, freedom) ** 2 / 2 * dispersion
    estimate = _fitted(near, target, wide.slope, dispersion, cut)
    return Crossing(
        target=target,
        rate_rps=math.exp(estimate.log_rate),
        low_rps=math.exp(estimate.low),
        high_rps=math.exp(estimate.high),
        slope=estimate.slope,
        dispersion=dispersion,
        runs=len(runs),
        worth=_worth(near, target, estimate, dispersion),
    )


def _usable(ordered: list[CapacityLevel]) -> list[CapacityLevel]:
    """Levels up to the lowest rate with a growing backlog; higher ones add no information."""
    for place, level in enumerate(ordered):
        if level.growing:
            return ordered[: place + 1]
    return ordered


def _wide(ordered: Sequence[CapacityLevel], target: float) -> list[CapacityLevel]:
    """Levels with an attainment not too far from the target, and one more on either side."""
    logit = math.log(target / (1 - target))
    shares = falling_shares(ordered)
    away = [abs(math.log(share / (1 - share)) - logit) for share in shares]
    first = next(i for i, share in enumerate(shares) if share < target or away[i] <= WIDE_LOGITS)
    last = max(i for i, share in enumerate(shares) if share >= target or away[i] <= WIDE_LOGITS)
    return list(ordered[max(0, first - 1) : last + 2])


def falling_shares(ordered: Sequence[CapacityLevel]) -> list[float]:
    """Attainment by rate with its noise pooled away where it rises (isotonic regression).

    Pool adjacent violators: R. E. Barlow et al., Statistical Inference under Order Restrictions,
    1972. Strictly between 0 and 1.
    """
    pools: list[tuple[float, float, int]] = []  # met, counted, levels
    for level in ordered:
        met = 0 if level.growing else level.met
        pools.append((met + 0.5, level.counted + 1.0, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] <= pools[-1][0] * pools[-2][1]:
            last, before = pools.pop(), pools.pop()
            pools.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
    return [met / counted for met, counted, levels in pools for _ in range(levels)]


def _near(ordered: Sequence[CapacityLevel], target: float, wide: _Fit) -> list[CapacityLevel]:
    """Levels with an attainment near the target, always with one that passes and one that fails on
    either side of the crossing.
    """
    away = [math.log(level.rate_rps) - wide.log_rate for level in ordered]
    passing = [level.passes(target) for level in ordered]
    reach = NEAR_LOGITS / wide.slope
    edges = (
        max((d for d, ok in zip(away, passing, strict=True) if ok), default=0.0),
        min((d for d, ok in zip(away, passing, strict=True) if not ok), default=0.0),
    )
    low, high = min(-reach, *edges), max(reach, *edges)
    near = [level for level, d in zip(ordered, away, strict=True) if low <= d <= high]
    failing = [lv for lv, d in zip(ordered, away, strict=True) if 0 < d <= high and not lv.growing]
    # A level with a growing backlog has no attainment; it bounds the capacity where no other level
    # fails.
    return [level for level in near if not (level.growing and failing)]


def _fitted(
    levels: Sequence[CapacityLevel],
    target: float,
    prior_slope: float | None = None,
    doubt: float = 1.0,
    cut: float = 1.0,
) -> _Fit:
    """The capacity and slope of largest quasi-likelihood, and the interval of capacities in which
    it is less by at most `cut`: on a grid, a coarse one and then around what that left.

    A level with a growing backlog has no attainment in the long run: it only says that the capacity
    is lower. Where such a level bounds it, the interval is wider at its low end by the growth that
    `keeps_up` may miss. A `prior_slope` estimated from a wider range is a prior, log-normal with
    `_SLOPE_DOUBT`, because the few runs near the crossing determine its position but hardly its
    slope. `doubt` is the dispersion by which the quasi-likelihood of the runs will be divided.
    """
    log_rate = np.array([math.log(level.rate_rps) for level in levels])
    weight = np.array([not level.growing for level in levels], dtype=float)
    met = weight * [level.met for level in levels]
    missed = weight * [level.counted for level in levels] - met
    bound = min((math.log(level.rate_rps) for level in levels if level.growing), default=math.inf)
    unseen = 0.0 if math.isinf(bound) else 2 * max(level.most_growth for level in levels)
    logit = math.log(target / (1 - target))
    fit = _Fit(0.0, 1.0, 0.0, 0.0)
    low, high = log_rate[0] - _MARGIN, min(log_rate[-1] + _MARGIN, bound)
    gentle, steep = _WIDE_SLOPES if prior_slope is None else prior_slope * _NEAR_SLOPES
    for _ in range(2):
        grid = np.linspace(low, high, _POINTS)
        slopes = np.geomspace(gentle, steep, _SLOPES)
        z = logit - slopes[None, :, None] * (log_rate - grid[:, None, None])
        missing = np.logaddexp(0, z)  # -log of the chance to miss
        likelihood = (z - missing) @ met - missing @ missed
        if prior_slope is not None:
            away = np.log(slopes / prior_slope) / _SLOPE_DOUBT
            likelihood += -doubt / 2 * away * away
        profile = likelihood.max(axis=1)
        best = int(profile.argmax())
        inside = np.flatnonzero(profile >= profile[best] - cut)
        step = grid[1] - grid[0]
        # The middle of equally good ones: between rates where all pass and where none does.
        equal = grid[profile >= profile[best] - 1e-6]
        fit = _Fit(
            log_rate=float(equal.mean()),
            slope=float(slopes[likelihood[best].argmax()]),
            low=float(grid[inside[0]] - step / 2) - unseen,
            high=min(float(grid[inside[-1]] + step / 2), bound),
        )
        low, high = grid[inside[0]] - step, min(grid[inside[-1]] + step, bound)
        likely = np.flatnonzero(likelihood.max(axis=0) >= profile[best] - cut)
        gentle = slopes[max(0, likely[0] - 1)]
        steep = slopes[min(len(slopes) - 1, likely[-1] + 1)]
    return fit


def _scatter(runs: Sequence[LevelSample], target: float, fit: _Fit) -> float:
    """Pearson's estimate of the dispersion from the runs' distances to the fitted curve."""
    logit = math.log(target / (1 - target))
    counted = np.array([run.counted for run in runs], dtype=float)
    met = np.array([run.met for run in runs], dtype=float)
    away = fit.slope * (np.log([run.rate_rps for run in runs]) - fit.log_rate)
    share = 1 / (1 + np.exp(np.clip(away, -30, 30) - logit))
    pearson = (met - counted * share) ** 2 / (counted * share * (1 - share))
    near = np.abs(away) <= WIDE_LOGITS  # farther out the curve is too uncertain for a test
    freedom = int(near.sum()) - 2
    return float(pearson[near].sum() / freedom) if freedom > 0 else 1.0


def _worth(levels: Sequence[CapacityLevel], target: float, fit: _Fit, dispersion: float) -> float:
    """Independent requests that met or missed by chance, in their harmonic sum (n·A·(1 − A))."""
    logit = math.log(target / (1 - target))
    worth = 0.0
    for level in levels:
        if not level.growing:
            away = fit.slope * (math.log(level.rate_rps) - fit.log_rate)
            share = 1 / (1 + math.exp(min(30.0, away - logit)))
            worth += level.counted * share * (1 - share) / dispersion
    return worth


def student_t(probability: float, freedom: int) -> float:
    """Quantile of Student's t from 4 degrees of freedom on, within 0.3 % for 0.9 … 0.99.

    Cornish-Fisher expansion: M. Abramowitz & I. A. Stegun, Handbook of Mathematical Functions,
    26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
