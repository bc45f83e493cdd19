"""Quantiles of any number of values in constant memory: a histogram with buckets of equal ratio.

The idea is that of DDSketch (Masson, Rim, Lee, VLDB 2019): buckets whose bounds grow by a constant
factor bound the relative error of a quantile. Each bucket keeps the sum of its values, too, so that
it stands for their mean, and the mean of all values is exact.
"""

from __future__ import annotations

import math

import numpy as np

from ....workloads.arrays import Floats, Ints

RELATIVE_ERROR = 0.001  # of a quantile
LEAST_S, MOST_S = 1e-9, 1e9  # smaller values share the first bucket, larger ones the last
_LOG_RATIO = math.log1p(RELATIVE_ERROR)
_BUCKETS = math.ceil(math.log(MOST_S / LEAST_S) / _LOG_RATIO) + 1


class QuantileSketch:
    """Numbers from 0 on, as counts and sums of buckets; the order of adding does not matter."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, dtype=np.int64)
        self._sums = np.zeros(_BUCKETS)

    def __len__(self) -> int:
        return int(self._counts.sum())

    def add(self, values: Floats, times: Ints | None = None) -> None:
        """Add values, each that many `times`; those that are not finite are left out."""
        finite = np.isfinite(values)
        if not finite.all():
            values = values[finite]
            times = None if times is None else times[finite]
        if not len(values):
            return
        buckets = _bucket(values)
        first = int(buckets.min())
        buckets -= first  # only the buckets in use are written
        if times is None:
            counts, sums = np.bincount(buckets), np.bincount(buckets, weights=values)
        else:
            counts = np.bincount(buckets, weights=times).astype(np.int64)
            sums = np.bincount(buckets, weights=values * times)
        self._counts[first : first + len(counts)] += counts
        self._sums[first : first + len(sums)] += sums

    def merge(self, other: QuantileSketch) -> None:
        """Add all values of another sketch."""
        self._counts += other._counts
        self._sums += other._sums

    def values(self) -> tuple[Floats, Ints]:
        """The mean of each bucket with values, ascending, and how many it has."""
        used = np.flatnonzero(self._counts)
        return self._sums[used] / self._counts[used], self._counts[used]

    def most(self) -> float:
        """No value is larger; there must be one."""
        used = np.flatnonzero(self._counts)[-1]
        top = float(self._sums[used] / self._counts[used])
        return top * (1 + RELATIVE_ERROR) if used < _BUCKETS - 1 else math.inf

    def mean(self) -> float:
        """The mean, exact but for rounding; NaN of nothing."""
        n = len(self)
        return float(self._sums.sum()) / n if n else math.nan

    def quantiles(self, shares: tuple[float, ...]) -> tuple[float, ...]:
        """Quantiles by linear interpolation, as numpy's default, each within `RELATIVE_ERROR` of
        the exact one; NaN of nothing.
        """
        values, counts = self.values()
        if not len(values):
            return (math.nan,) * len(shares)
        below = np.cumsum(counts)
        places = np.array(shares) * (below[-1] - 1)
        ranks = np.floor(places)
        here, after = (
            values[np.searchsorted(below, np.minimum(k, below[-1] - 1), side="right")]
            for k in (ranks, ranks + 1)
        )
        return tuple((here + (after - here) * (places - ranks)).tolist())

    def shares_above(self, values: Floats) -> Floats:
        """The share of all values above each of `values`, exact for values within
        `RELATIVE_ERROR` of these.
        """
        below = np.cumsum(self._counts)
        return np.asarray(1.0 - below[_bucket(values)] / below[-1])


def _bucket(values: Floats) -> Ints:
    logs = np.log(np.maximum(values, LEAST_S) / LEAST_S)
    return np.minimum(logs / _LOG_RATIO, _BUCKETS - 1).astype(np.int64)
