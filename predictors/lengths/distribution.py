"""What is believed of answers' lengths: a distribution for each request.

A distribution is a cumulative one, linear in log(1 + tokens) between its knots. Bucket edges lie
half a token below their first length, so that a bucket holds what is counted into it.

`confusion.toml` says how a trained predictor errs, by the bucket of the true length. It holds what
LoRA on all-MiniLM-L6-v2 told of prompts that were kept back from its training, written by
`scripts/pack_confusion.py`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...workloads.arrays import Floats, Ints
from ...workloads.errors import SloBenchError
from ...workloads.length_buckets import BUCKET_EDGES

DEFAULT_EDGES = BUCKET_EDGES
COVERAGE = 0.9  # of the interval that is kept and judged
_LEAST = 1e-9
_CALIBRATED, _FEWEST = 20, 40  # shares that are calibrated; rows that this takes
_SHARES = tuple(tenths / 10 for tenths in range(11))  # that are tried


def checked_edges(edges: Sequence[int]) -> tuple[int, ...]:
    """Bucket edges in tokens: rising, from 0 on, two buckets at least.

    Raises:
        SloBenchError: they are not.
    """
    checked = tuple(edges)
    if len(checked) < 2 or checked[0] != 0 or any(b <= a for a, b in pairwise(checked)):
        raise SloBenchError(
            f"bucket edges must rise from 0 on, as 0,8,16,32, but are {','.join(map(str, checked))}"
        )
    return checked


def log_edges(edges: Sequence[int]) -> Floats:
    """Edges in log(1 + tokens), with the end of the last bucket (twice its beginning)."""
    ends = np.array([*edges, 2 * edges[-1]], dtype=np.float64)
    logs: Floats = np.log1p(ends - 0.5 * (ends > 0))
    return logs


def buckets_in(edges: Sequence[int], tokens: NDArray[np.integer]) -> Ints:
    """The index of the bucket that holds each length."""
    indices: Ints = np.searchsorted(np.asarray(edges), tokens, side="right") - 1
    return indices


@dataclass(frozen=True)
class PredictedDistributions:
    """Distributions of n answers' lengths.

    `log_tokens` and `below` have shape (n, knots): the share of answers that are no longer than
    exp(log_tokens) - 1 tokens. Both rise along a row, `below` from 0 to 1.
    """

    edges: tuple[int, ...]
    log_tokens: Floats
    below: Floats

    @classmethod
    def of_buckets(cls, edges: tuple[int, ...], probabilities: Floats) -> PredictedDistributions:
        """From the probability of each bucket, shape (n, buckets)."""
        rows = len(probabilities)
        below = np.concatenate([np.zeros((rows, 1)), np.cumsum(probabilities, axis=1)], axis=1)
        below /= np.maximum(below[:, -1:], _LEAST)
        return cls(edges, np.broadcast_to(log_edges(edges), below.shape), below)

    def __len__(self) -> int:
        return len(self.below)

    def __getitem__(self, rows: slice | Ints) -> PredictedDistributions:
        return PredictedDistributions(self.edges, self.log_tokens[rows], self.below[rows])

    def bucket_probabilities(self) -> Floats:
        """Shape (n, buckets); rows sum to 1."""
        inner = log_edges(self.edges)[1:-1]
        pairs = zip(self.log_tokens, self.below, strict=True)
        below = np.array([np.interp(inner, x, c, left=0, right=1) for x, c in pairs])
        below = below.reshape(len(self), len(inner))
        ends = np.zeros((len(self), 1)), np.ones((len(self), 1))
        probabilities = np.clip(np.diff(np.hstack([ends[0], below, ends[1]]), axis=1), _LEAST, None)
        normalised: Floats = probabilities / probabilities.sum(axis=1, keepdims=True)
        return normalised

    def buckets(self, neighbours: float = 0.0) -> Ints:
        """The bucket to name for each, where a neighbour of the true one is worth `neighbours`.

        0 names the likeliest one; the more neighbours count, the nearer to the middle.
        """
        p = self.bucket_probabilities()
        worth = p.copy()
        worth[:, 1:] += neighbours * p[:, :-1]
        worth[:, :-1] += neighbours * p[:, 1:]
        named: Ints = worth.argmax(axis=1).astype(np.int64)
        return named

    def confusion(self, true_tokens: NDArray[np.integer], neighbours: float = 0.0) -> Ints:
        """Counts by the bucket of the true length (row) and the one that is named (column)."""
        counts = np.zeros((len(self.edges), len(self.edges)), dtype=np.int64)
        np.add.at(counts, (buckets_in(self.edges, true_tokens), self.buckets(neighbours)), 1)
        return counts

    def quantile_log(self, shares: float | Floats) -> Floats:
        """log(1 + tokens) that a share of answers does not exceed; shape (n,), of several shares
        (n, shares).
        """
        # Where `below` stands still, a hair of a slope makes the inverse unique.
        hair = np.arange(self.below.shape[1]) * 1e-12
        pairs = zip(self.log_tokens, self.below, strict=True)
        quantiles = np.array([np.interp(shares, c + hair, x) for x, c in pairs])
        return quantiles.reshape(len(self), *np.shape(shares))

    def median_tokens(self) -> Ints:
        """The length that is as likely exceeded as not, at least 1."""
        tokens: Ints = np.maximum(1, np.rint(np.expm1(self.quantile_log(0.5)))).astype(np.int64)
        return tokens

    def longest_tokens(self) -> Ints:
        """The length that nine in ten answers do not exceed, at least 1."""
        tokens: Ints = np.maximum(1, np.ceil(np.expm1(self.quantile_log(0.9)))).astype(np.int64)
        return tokens

    def interval_tokens(self, offset: float = 0.0) -> tuple[Ints, Ints]:
        """First and last length of the 90 % interval, widened by `offset` on the log scale."""
        low = np.expm1(self.quantile_log((1 - COVERAGE) / 2) - offset)
        high = np.expm1(self.quantile_log((1 + COVERAGE) / 2) + offset)
        return np.maximum(0, np.floor(low)).astype(np.int64), np.ceil(high).astype(np.int64)

    def blended(self, others: Floats, share: float) -> PredictedDistributions:
        """The weighted geometric mean with other bucket probabilities, shape (n, buckets)."""
        if share == 0:
            return self
        mean = self.bucket_probabilities() ** (1 - share) * np.maximum(others, _LEAST) ** share
        return PredictedDistributions.of_buckets(self.edges, mean)

    def recalibrated(self, shares: Sequence[float]) -> PredictedDistributions:
        """The same with quantiles that hold: `shares` as `recalibration` returns them."""
        if not shares:
            return self
        stated_shares, true = np.array(shares), np.linspace(0, 1, len(shares))
        between = self.quantile_log(stated_shares[1:-1])
        log_tokens = np.sort(np.concatenate([self.log_tokens, between], axis=1), axis=1)
        below = np.array(
            [
                np.interp(np.interp(points, x, c), stated_shares, true)
                for points, x, c in zip(log_tokens, self.log_tokens, self.below, strict=True)
            ]
        ).reshape(log_tokens.shape)
        return PredictedDistributions(self.edges, log_tokens, below)

    def reweighted(self, weights: Floats) -> PredictedDistributions:
        """The same with the odds of each bucket multiplied; shape of `weights` (n, buckets)."""
        return PredictedDistributions.of_buckets(self.edges, self.bucket_probabilities() * weights)


def share_of(
    others: Floats, lengths: PredictedDistributions, true_tokens: NDArray[np.integer]
) -> float:
    """What share `others` should have in `PredictedDistributions.blended`.

    From rows that took no part in training. Of 0, 0.1 … 1 the least with the smallest log loss.
    """
    rows, true = np.arange(len(lengths)), buckets_in(lengths.edges, true_tokens)

    def loss(share: float) -> float:
        probabilities = lengths.blended(others, share).bucket_probabilities()
        return -float(np.log(probabilities[rows, true]).sum())

    return min(_SHARES, key=loss)


def neighbours_worth(lengths: PredictedDistributions, true_tokens: NDArray[np.integer]) -> float:
    """What neighbours should count in `PredictedDistributions.buckets`, from rows that took no part
    in training.

    Of 0, 0.1 … 1 the least with the largest sum of exact and within-one accuracy.
    """
    if not len(lengths):
        return 0.0
    true = buckets_in(lengths.edges, true_tokens)

    def good(neighbours: float) -> int:
        off = np.abs(lengths.buckets(neighbours) - true)
        return int((off == 0).sum() + (off <= 1).sum())

    return max(_SHARES, key=good)


def recalibration(
    lengths: PredictedDistributions, true_tokens: NDArray[np.integer]
) -> tuple[float, ...]:
    """Shares that are said where 0, 5, 10 … 100 % of answers are no longer.

    Source: quantile recalibration (Kuleshov, Fenner, Ermon 2018), on rows that took no part in
    training: the quantiles of what was said of the true lengths, with the finite-sample correction
    of conformal prediction. Empty where there are too few rows for a share of 5 %.
    """
    if len(lengths) < _FEWEST:
        return ()
    y = np.log1p(true_tokens.astype(np.float64))
    stated_shares = [
        np.interp(log_length, x, c)
        for log_length, x, c in zip(y, lengths.log_tokens, lengths.below, strict=True)
    ]
    shares = np.linspace(0, 1, _CALIBRATED + 1)[1:-1]
    ranks = np.clip(shares * (len(y) + 1) / len(y), 0, 1)
    inner = np.clip(np.quantile(stated_shares, ranks), _LEAST, 1 - _LEAST)
    # Strictly rising, so that the inverse is unique.
    inner = np.maximum.accumulate(inner) + 1e-12 * np.arange(len(inner))
    return (0.0, *inner.tolist(), 1.0)


def conformal_offset(lengths: PredictedDistributions, true_tokens: NDArray[np.integer]) -> float:
    """By how much to widen intervals on the log scale so that new answers fall in as promised.

    Source: conformalized quantile regression (Romano, Patterson, Candès 2019), on rows that took no
    part in training. Negative where intervals were too wide.
    """
    if not len(lengths):
        return 0.0
    y = np.log1p(true_tokens.astype(np.float64))
    low = lengths.quantile_log((1 - COVERAGE) / 2)
    high = lengths.quantile_log((1 + COVERAGE) / 2)
    missed_by = np.maximum(low - y, y - high)
    rank = min(1.0, np.ceil((len(y) + 1) * COVERAGE) / len(y))
    return float(np.quantile(missed_by, rank, method="higher"))


_PRIOR = 10.0  # errors that each bucket borrows from those of all buckets


@cache
def measured_confusion() -> Floats:
    """Answers by the bucket of their length (row) and of the median that was told (column)."""
    text = files(__package__).joinpath("confusion.toml").read_text("utf-8")
    counts: Floats = np.array(tomllib.loads(text)["confusion"], dtype=np.float64)
    return counts


@cache
def error_shares() -> Floats:
    """Shares of the buckets that a wrong prediction names, by the true one.

    Shape (buckets, buckets); rows sum to 1, the diagonal is 0. Few long answers were kept back, so
    each row also has ten errors that are as far off as those of all buckets.
    """
    counts = measured_confusion()
    size = len(counts)
    np.fill_diagonal(wrong := counts.copy(), 0)
    by_distance = [np.trace(wrong, offset=off) for off in range(1 - size, size)]
    far = np.array([by_distance[size - 1 - row : 2 * size - 1 - row] for row in range(size)])
    errors = wrong + _PRIOR * far / far.sum(axis=1, keepdims=True)
    shares: Floats = errors / errors.sum(axis=1, keepdims=True)
    return shares
