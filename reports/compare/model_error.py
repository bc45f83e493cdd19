"""Whether a difference between simulated systems is larger than the model's error.

Every cell has its attainment by evenly spaced errors of earlier predictions (`predictors.bands`).
Systems of one engine, GPU and parallelism share step times, host times and front end: each error
is drawn once for both, and what is common to them cancels. Errors of different ones are drawn
apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...harness.experiments.execution.cell_bands import HIGH, LOW
from ...harness.results.run_folder import BAND_BASIS, BAND_DRAWS, BAND_LEVEL
from ...predictors.bands import LEVEL
from ...workloads.errors import SloBenchError
from .bootstrap import Interval

Floats = NDArray[np.float64]

HOLDS, INSIDE = "holds in reality", "inside the model's error"
NOTE = (
    f"{INSIDE}: off as earlier predictions were, the two might not differ so; errors that both "
    "share cancel (docs/accuracy.md#bands)."
)
_OF_ATTAINMENT = ("attainment", "goodput_rps")  # the rate is the same


@dataclass(frozen=True)
class ErrorDraws:
    """A figure by evenly spaced errors, the fastest server first.

    `level` is the share of errors between the ends of a band; figures of one `source` have the
    same errors. Values at `low` and `high` may lie beyond.
    """

    source: str
    level: float
    values: Floats
    low: float = -math.inf
    high: float = math.inf


def error_draws(row: Mapping[str, Any], column: str) -> ErrorDraws | None:
    """Those of a figure in a row of cells.csv; None where it has no band.

    Of attainment (and goodput, which is in proportion) as simulated; of others lognormal, between
    the ends of their band.

    Raises:
        SloBenchError: the row's draws are no numbers.
    """
    basis, text = row.get(BAND_BASIS), row.get(BAND_DRAWS)
    if not isinstance(basis, str) or not isinstance(text, str) or not text:
        return None
    try:
        values, level = np.array(text.split(), dtype=np.float64), float(row.get(BAND_LEVEL, LEVEL))
    except ValueError:
        raise SloBenchError(f"{BAND_DRAWS} of cell {row['cell']} must be numbers") from None
    if not len(values) or not ((values >= 0) & (values <= 1)).all() or not 0 < level < 1:
        raise SloBenchError(
            f"{BAND_DRAWS} of cell {row['cell']} must be shares from 0 to 1, {BAND_LEVEL} between"
        )
    draws = ErrorDraws(f"{row.get('model')}, {basis}", level, values)
    if column in _OF_ATTAINMENT:
        return draws
    low, high = (float(row.get(f"{end}{column}", math.nan)) for end in (LOW, HIGH))
    if not 0 < low <= high < math.inf:
        return None
    n, normal = len(values), NormalDist()
    places = np.array([normal.inv_cdf((rank + 0.5) / n) for rank in range(n)])
    middle, half = math.log(low * high) / 2, math.log(high / low) / 2
    return replace(draws, values=np.exp(middle + half * places / normal.inv_cdf((1 + LEVEL) / 2)))


def mean_draws(draws: Sequence[ErrorDraws | None]) -> ErrorDraws | None:
    """The means of one figure over seeds; None where one has no draws, or another basis."""
    drawn = [seed_draws for seed_draws in draws if seed_draws is not None]
    if not drawn or len({(d.source, len(d.values)) for d in drawn}) > 1 or len(drawn) < len(draws):
        return None
    values: Floats = np.mean([seed_draws.values for seed_draws in drawn], axis=0)
    return replace(drawn[0], values=values)


def rate_draws(by_rate: Mapping[float, ErrorDraws | None], target: float) -> ErrorDraws | None:
    """The highest rate at `target` by each error; None where a rate's attainment has no draws."""
    rates = sorted(by_rate)
    draws = [level for rate in rates if (level := by_rate[rate]) is not None]
    if not draws or len({(d.source, len(d.values)) for d in draws}) > 1 or len(draws) < len(rates):
        return None
    crossed = crossings_rps(rates, np.array([level.values for level in draws]), target)
    return replace(draws[0], values=crossed, low=rates[0], high=rates[-1])


def crossings_rps(rates: Sequence[float], shares: Floats, target: float) -> Floats:
    """The rates at which columns of `shares` [rates, draws] first fall below `target`: linear
    between the ascending `rates` and from 100 % at none; the highest rate where one never does.
    """
    rates_rps = np.array([0.0, *rates])
    shares = np.vstack([np.ones(shares.shape[1]), shares])
    missing = shares < target - 1e-12
    place = np.maximum(missing.argmax(axis=0), 1)
    columns = np.arange(shares.shape[1])
    before, after = shares[place - 1, columns], shares[place, columns]
    below_rps = rates_rps[place - 1]
    fall = np.where(before > after, before - after, 1.0)
    crossed = below_rps + (rates_rps[place] - below_rps) * (before - target) / fall
    crossings: Floats = np.where(missing.any(axis=0), crossed, rates_rps[-1])
    return crossings


def difference_band(a: ErrorDraws | None, b: ErrorDraws | None) -> Interval | None:
    """Where B less A lies by the model's error.

    Errors by which the two are equal, or both beyond what was tried, tell nothing; None where those
    are more than half, or draws are missing.
    """
    if a is None or b is None:
        return None
    ends = max(a.low, b.low), min(a.high, b.high)
    values_a, values_b = (np.clip(draws.values, *ends) for draws in (a, b))
    if a.source == b.source and len(values_a) == len(values_b):
        differences = values_b - values_a
    else:
        differences = np.subtract.outer(values_b, values_a).ravel()
    unequal = differences[differences != 0]
    if 2 * len(unequal) < len(differences):
        return None
    outside = (1 - max(a.level, b.level)) / 2
    low, high = np.quantile(unequal, (outside, 1 - outside))
    return Interval(float(low), float(high))


def holds(difference: float, band: Interval | None) -> bool | None:
    """Whether a difference has its sign in the whole band; None without one."""
    if band is None or not math.isfinite(difference):
        return None
    return band.low > 0 if difference > 0 else band.high < 0
