"""Resampling: how else the figures of a few seeds of many requests each could have come out.

Requests of one run are correlated (they share a queue), so whole blocks of consecutive requests
are drawn, not single ones; and seeds are drawn before blocks are. Where two systems served the
same requests, both get the same seeds and blocks: what is common to them cancels.

Nothing is resampled request by request. A draw of blocks is a row of counts; sums over a draw are
counts @ block sums, and quantiles come from counts @ block histograms over the sorted values.

Sources: Künsch, "The jackknife and the bootstrap for general stationary observations" (Ann. Stat.
1989) for blocks; Politis and White, "Automatic block-length selection for the dependent bootstrap"
(Econometric Reviews 2004, with the correction of Patton et al. 2009) for their length; Davison and
Hinkley, "Bootstrap Methods and their Application" (1997), §3.8, for the two stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...harness.results.request_figures import SHARES, RequestFigure, Statistic
from .results import RunSample

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]

REPLICATES = 2000
MOST_BLOCKS = 256
FEWEST_BLOCKS = 8
ENOUGH_SEEDS = 3  # show themselves how much runs differ
_OF_FEW_SEEDS = 6  # fewest blocks, and so much longer ones: ends of blocks hide some correlation
_EXACT_ROWS = 4096  # up to this number, each value is a bin of its own
_COARSE, _FINE = 1024, 512  # bins over everything, and around each quantile asked for
_STRETCH = 64  # bins looked into at once


def block_length(values: Floats) -> int:
    """The length of blocks that suits the correlation of a series (Politis and White).

    Works on ranks, so that a heavy tail does not hide the correlation.
    """
    n = len(values)
    if n < 16:
        return 1
    order = np.argsort(values, kind="stable")
    ranks = np.empty(n)
    ranks[order] = np.arange(n)
    ranks -= ranks.mean()
    most_lags = math.ceil(math.sqrt(n)) + max(5, math.ceil(math.log10(n)))
    padded = 1 << (2 * n - 1).bit_length()
    spectrum = np.abs(np.fft.rfft(ranks, padded)) ** 2
    covariance = np.fft.irfft(spectrum, padded)[: most_lags + 1] / n
    correlation = covariance / covariance[0]
    quiet = np.abs(correlation[1:]) < 2 * math.sqrt(math.log10(n) / n)
    run = max(5, math.ceil(math.log10(n)))
    calm = np.convolve(quiet, np.ones(run, dtype=np.int64))[run - 1 : len(quiet)] == run
    last = int(calm.argmax()) if calm.any() else most_lags
    lags = np.arange(1, min(2 * max(last, 1), most_lags) + 1)
    weight = np.clip(2 * (1 - lags / (2 * max(last, 1))), 0, 1)
    spread = 2 * float((weight * lags * covariance[lags]).sum())
    level = float(covariance[0] + 2 * (weight * covariance[lags]).sum())
    if level <= 0:
        return 1
    best = (1.5 * (spread / level) ** 2 * n) ** (1 / 3)
    return int(max(1, math.ceil(min(best, 3 * math.sqrt(n), n / 3))))


def block_count(samples: Sequence[RunSample], seeds: int = ENOUGH_SEEDS) -> int:
    """Into how many blocks to cut runs of these (equally long) samples, of so many seeds."""
    lengths = []
    for sample in samples:
        ttft_s = sample.requests.records.ttft_s
        lengths.append(block_length(np.where(np.isnan(ttft_s), np.inf, ttft_s)))
    n = min(map(len, samples))
    fewest, longer = (FEWEST_BLOCKS, 1) if seeds >= ENOUGH_SEEDS else (_OF_FEW_SEEDS,) * 2
    return max(1, min(n, max(fewest, n // (longer * max(lengths))), MOST_BLOCKS))


def draw_counts(blocks: int, replicates: int, rng: np.random.Generator) -> Floats:
    """Number of draws of each block in each replicate: (replicates, blocks)."""
    drawn = rng.integers(blocks, size=(replicates, blocks))
    drawn += np.arange(replicates)[:, None] * blocks
    counts = np.bincount(drawn.ravel(), minlength=replicates * blocks)
    return counts.reshape(replicates, blocks).astype(np.float64)


def student(drawn: Floats, cuts: Sequence[int], rng: np.random.Generator) -> Floats:
    """Draws (…, replicates) of runs in so many blocks; of few seeds spread about their mean as
    Student's t has it, for the spread of few blocks is too small, and hardly known. NaN for a
    single block.
    """
    freedom = sum(cuts) - len(cuts)
    if not freedom or len(cuts) >= ENOUGH_SEEDS:
        return drawn if len(cuts) > 1 else np.full_like(drawn, math.nan)
    finite = np.isfinite(drawn)
    mean = drawn.sum(-1, keepdims=True, where=finite) / np.maximum(finite.sum(-1, keepdims=True), 1)
    stretch = np.sqrt(sum(cuts) / rng.chisquare(freedom, drawn.shape[-1]))
    stretched: Floats = (mean + (drawn - mean) * stretch).clip(0)  # no figure is below
    return stretched


def estimates(sample: RunSample, metrics: Sequence[RequestFigure]) -> Floats:
    """The figures of one run; NaN where there is nothing to take them of."""
    figures = [metric.exact(sample.requests, slice(None), sample.window) for metric in metrics]
    return np.array(figures)


def replicate_figures(
    sample: RunSample, metrics: Sequence[RequestFigure], counts: Floats
) -> Floats:
    """The figures of resampled runs, (metrics, replicates); `counts` as `draw_counts` makes them.

    The window of a rate is drawn as well, as the sum of the times from one arrival to the next, or
    in a makespan from one end of a request to the next.
    """
    blocks = counts.shape[1]
    edges = np.linspace(0, len(sample), blocks + 1).round().astype(np.int64)
    rows = np.repeat(np.arange(blocks), np.diff(edges))
    figures = np.full((len(metrics), counts.shape[0]), math.nan)
    for of_requests in dict.fromkeys(metric.of_requests for metric in metrics):
        values = of_requests(sample.requests).astype(np.float64)
        places = [k for k, metric in enumerate(metrics) if metric.of_requests == of_requests]
        statistics = [metrics[position].statistic for position in places]
        figures[places] = _resampled(values, rows, counts, statistics)
        for position in places:
            if metrics[position].statistic in ("sum", "count"):
                with np.errstate(invalid="ignore", divide="ignore"):
                    figures[position] /= counts @ _seconds(sample, metrics[position], rows, blocks)
    return figures


def _seconds(sample: RunSample, metric: RequestFigure, rows: Ints, blocks: int) -> Floats:
    """The part of each block in what a figure is divided by: the times from the arrivals before to
    its requests', or from the ends before. Its part of the requests where it is no rate.
    """
    if not metric.per:
        return np.bincount(rows, minlength=blocks) / len(sample)
    seconds, records = metric.seconds(sample.window), sample.requests.records
    moments_s = records.finish_s if seconds > sample.window.arrivals_s else records.arrival_s
    order = np.argsort(moments_s)[: np.isfinite(moments_s).sum()]
    last_s = moments_s[order[-1:]]
    between_s = np.diff(moments_s[order], prepend=last_s - seconds)
    return np.bincount(rows[order], between_s, blocks).astype(np.float64)


def _resampled(
    values: Floats, rows: Ints, counts: Floats, statistics: Sequence[Statistic]
) -> Floats:
    """Statistics of the known values, (statistics, replicates)."""
    present = ~np.isnan(values)
    values, rows = values[present], rows[present]
    replicates, blocks = counts.shape
    figures = np.full((len(statistics), replicates), math.nan)
    if not len(values):
        return figures
    number = counts @ np.bincount(rows, minlength=blocks).astype(np.float64)
    quantiles = [SHARES[name] for name in statistics if name in SHARES]
    drawn = iter(_quantiles(values, rows, counts, quantiles)) if quantiles else iter(())
    with np.errstate(invalid="ignore", divide="ignore"):
        for position, name in enumerate(statistics):
            if name in SHARES:
                figures[position] = next(drawn)
            elif name == "count":
                figures[position] = number
            else:
                total = counts @ np.bincount(rows, values, blocks)
                figures[position] = total if name == "sum" else total / number
    return figures


def _quantiles(
    values: Floats, rows: Ints, counts: Floats, quantiles: Sequence[float]
) -> list[Floats]:
    """Quantiles of every draw, by linear interpolation between neighbours as numpy's default.

    Exact for few values; for many, values that are close neighbours count as their mean.
    """
    blocks = counts.shape[1]
    edges = _bin_edges(np.sort(values), quantiles)
    bins = np.searchsorted(edges, values, side="left")
    size = len(edges)
    held = np.bincount(bins, minlength=size)
    stands_for = np.bincount(bins, values, size) / np.maximum(held, 1)
    histogram = np.bincount(rows * size + bins, minlength=blocks * size).reshape(blocks, size)
    # Counts are whole numbers far below 2**24: single precision keeps them exact, twice as fast.
    draws = _Draws(counts.astype(np.float32), histogram.cumsum(axis=1).astype(np.float32))
    total = draws.total.astype(np.float64)
    quantile_draws = []
    for quantile in quantiles:
        position = np.maximum(quantile * (total - 1), 0)
        lower = np.floor(position)
        low, high = stands_for[draws.bins_of(lower)], stands_for[draws.bins_of(lower + 1)]
        quantile_draws.append(
            np.where(total > 0, low + (position - lower) * (high - low), math.nan)
        )
    return quantile_draws


class _Draws:
    """Positions of the sorted values in every draw. `up_to`: cumulative number of values of each
    block up to each bin, (blocks, bins).

    A draw's own row of that, counts @ up_to, is never made as a whole: the ends of stretches of
    bins say in which stretch a value lies, and only that one is looked into.
    """

    def __init__(self, counts: Singles, up_to: Singles) -> None:
        self._counts = counts
        self._up_to = up_to
        self._at_ends = counts @ up_to[:, _STRETCH - 1 :: _STRETCH]
        self.total: Singles = counts @ up_to[:, -1]

    def bins_of(self, ranks: Floats) -> Ints:
        """The bin of the value of this rank (from 0), draw by draw; the last where it has none."""
        stretches = (self._at_ends <= ranks[:, None]).sum(axis=1)
        bins = stretches * _STRETCH
        for stretch in np.unique(stretches):
            drawn = np.flatnonzero(stretches == stretch)
            inside = self._up_to[:, stretch * _STRETCH : (stretch + 1) * _STRETCH]
            bins[drawn] += (self._counts[drawn] @ inside <= ranks[drawn, None]).sum(axis=1)
        clipped: Ints = bins.clip(max=self._up_to.shape[1] - 1)
        return clipped


def _bin_edges(ordered: Floats, quantiles: Sequence[float]) -> Floats:
    """Upper ends of bins, the last the largest value; narrow around the quantiles."""
    n = len(ordered)
    if n <= _EXACT_ROWS:
        return np.unique(ordered)
    shares = [np.linspace(0, 1, _COARSE + 1)]
    for quantile in quantiles:
        reach = 0.5 * min(quantile, 1 - quantile)
        shares.append(quantile + reach * np.linspace(-1, 1, _FINE + 1))
    places = np.unique((np.concatenate(shares) * (n - 1)).round().astype(np.int64))
    edges: Floats = np.unique(ordered[places])
    return edges


@dataclass(frozen=True)
class Differences:
    """Figures of A and B, one for each metric, and the draws of both, (metrics, replicates)."""

    a: Floats
    b: Floats
    drawn_a: Floats
    drawn_b: Floats


def resample(
    runs_a: Sequence[RunSample],
    runs_b: Sequence[RunSample],
    metrics: Sequence[RequestFigure],
    *,
    paired: bool,
    rng: np.random.Generator,
    replicates: int = REPLICATES,
    picks: Ints | None = None,
) -> Differences:
    """Figures as means over runs (seeds), and what they come out as when seeds and then blocks of
    requests are drawn again. `paired`: the runs of A and B are the same requests, one by one, and
    the seeds are `picks` (replicates, seeds) where they are given.
    """
    if paired:
        cuts = [block_count(pair, len(runs_a)) for pair in zip(runs_a, runs_b, strict=True)]
        counts = [draw_counts(n, replicates, rng) for n in cuts]
        if picks is None:
            picks = rng.integers(len(cuts), size=(replicates, len(cuts)))
        seeds = picks
    drawn = []
    for runs in (runs_a, runs_b):
        if not paired:
            cuts = [block_count([run], len(runs)) for run in runs]
            counts = [draw_counts(n, replicates, rng) for n in cuts]
            seeds = rng.integers(len(runs), size=(replicates, len(runs)))
        figures = [
            replicate_figures(run, metrics, run_counts)
            for run, run_counts in zip(runs, counts, strict=True)
        ]
        over_seeds = _over_seeds(np.array(figures), seeds)
        drawn.append(over_seeds if paired else student(over_seeds, cuts, rng))
    if paired:
        drawn = list(student(np.array(drawn), cuts, rng))
    # NaN as soon as one seed has no value, as nothing can stand in for it.
    return Differences(
        a=np.array([estimates(run, metrics) for run in runs_a]).mean(axis=0),
        b=np.array([estimates(run, metrics) for run in runs_b]).mean(axis=0),
        drawn_a=drawn[0],
        drawn_b=drawn[1],
    )


def _over_seeds(figures: Floats, picks: Ints) -> Floats:
    """Mean of the metrics over the seeds that `picks` draws with replacement for each replicate:
    (metrics, replicates), from draws of every seed (seeds, metrics, replicates).

    A seed drawn twice in a replicate brings two different draws of its blocks: each place in the
    draw reads another replicate of the seed.
    """
    replicates, places = picks.shape
    total: Any = 0.0
    for place in range(places):
        shifted = (np.arange(replicates) + place * (replicates // places)) % replicates
        total = total + figures[picks[:, place], :, shifted].T
    mean: Floats = total / places
    return mean


@dataclass(frozen=True)
class Interval:
    """Confidence interval of a difference; NaN if it is unknown."""

    low: float
    high: float


NOWHERE = Interval(math.nan, math.nan)


def interval(draws: Floats, confidence: float) -> Interval:
    """Percentile interval of the draws."""
    finite_draws = draws[np.isfinite(draws)]
    if len(finite_draws) < 0.9 * len(draws):
        return NOWHERE
    tail = (1 - confidence) / 2
    low, high = np.quantile(finite_draws, (tail, 1 - tail))
    return Interval(float(low), float(high))


def p_value(difference: float, draws: Floats) -> float:
    """Two-sided probability of so large a difference where there is none.

    The share of draws on the other side of zero, twice. Where no draw is there, the normal tail
    says how far below one draw's share it is, for a correction for many comparisons needs that.
    """
    finite_draws = draws[np.isfinite(draws)]
    if not math.isfinite(difference) or len(finite_draws) < 0.9 * len(draws):
        return math.nan
    if difference == 0:
        return 1.0
    beyond = int((finite_draws <= 0).sum() if difference > 0 else (finite_draws >= 0).sum())
    if beyond:
        return min(1.0, 2 * (beyond + 1) / (len(finite_draws) + 1))
    resolution = 2 / (len(finite_draws) + 1)
    spread = float(finite_draws.std(ddof=1))
    if spread == 0:
        return resolution
    return min(resolution, math.erfc(abs(difference) / spread / math.sqrt(2)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979): the chance that even one of those called
    significant is none stays below the level. NaN stays NaN and does not count.
    """
    defined = [(p, position) for position, p in enumerate(p_values) if not math.isnan(p)]
    adjusted = list(p_values)
    reached = 0.0
    for rank, (p, position) in enumerate(sorted(defined)):
        reached = max(reached, min(1.0, p * (len(defined) - rank)))
        adjusted[position] = reached
    return adjusted
