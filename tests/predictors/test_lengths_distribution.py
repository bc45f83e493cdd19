"""Distributions of lengths: buckets, quantiles, intervals that hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from slo_bench.predictors.lengths.distribution import (
    DEFAULT_EDGES,
    PredictedDistributions,
    buckets_in,
    checked_edges,
    conformal_offset,
    log_edges,
    neighbours_worth,
    recalibration,
)
from slo_bench.workloads.errors import SloBenchError

K = len(DEFAULT_EDGES)
rows = arrays(np.float64, (3, K), elements=st.floats(0.001, 1))


@given(rows)
def test_bucket_probabilities_survive_conversion(weights):
    shares = weights / weights.sum(axis=1, keepdims=True)
    lengths = PredictedDistributions.of_buckets(DEFAULT_EDGES, shares)
    assert lengths.bucket_probabilities() == pytest.approx(shares, abs=1e-6)
    assert shares[np.arange(3), lengths.buckets()] == pytest.approx(shares.max(axis=1), abs=1e-6)


@given(rows, st.floats(0.01, 0.98))
def test_length_quantiles_rise_and_invert(weights, share):
    lengths = PredictedDistributions.of_buckets(DEFAULT_EDGES, weights)
    low, high = lengths.quantile_log(share), lengths.quantile_log(share + 0.01)
    assert (low <= high).all()
    shares_below = [
        np.interp(x, edges, c)
        for x, edges, c in zip(low, lengths.log_tokens, lengths.below, strict=True)
    ]
    assert shares_below == pytest.approx([share] * 3, abs=1e-6)


def test_certain_bucket_bounds_median_and_interval():
    lengths = PredictedDistributions.of_buckets(DEFAULT_EDGES, np.eye(K))
    assert (buckets_in(DEFAULT_EDGES, lengths.median_tokens()) == np.arange(K)).all()
    low, high = lengths.interval_tokens()
    assert (low <= lengths.median_tokens()).all()
    assert (high >= lengths.median_tokens()).all()
    assert high[4] <= 128
    assert low[4] >= 63


def test_bucket_choice_with_neighbour_worth_prefers_a_cluster():
    """Likeliest is the first, but the third has more beside it."""
    lengths = PredictedDistributions.of_buckets((0, 8, 16, 32), np.array([[0.4, 0.0, 0.35, 0.25]]))
    assert lengths.buckets() == [0]
    assert lengths.buckets(0.5) == [2]


@given(rows, st.floats(0, 1))
def test_bucket_choice_values_the_named_bucket_most(weights, neighbours):
    lengths = PredictedDistributions.of_buckets(DEFAULT_EDGES, weights)
    p = np.pad(lengths.bucket_probabilities(), ((0, 0), (1, 1)))
    worth = p[:, 1:-1] + neighbours * (p[:, :-2] + p[:, 2:])
    named = lengths.buckets(neighbours)
    assert worth[np.arange(3), named] == pytest.approx(worth.max(axis=1))


def test_neighbour_worth_serves_exact_and_within_one_accuracy():
    """The likeliest bucket is right a little more often; the middle one is never two off."""
    lengths = PredictedDistributions.of_buckets(
        DEFAULT_EDGES, np.array([[0, 0.36, 0.3, 0.34, *[0.0] * 6]] * 100)
    )
    tokens = np.repeat([10, 20, 40], [36, 30, 34])
    assert lengths.buckets(neighbours_worth(lengths, tokens))[0] == 2
    sure = PredictedDistributions.of_buckets(
        DEFAULT_EDGES, np.eye(K)[buckets_in(DEFAULT_EDGES, tokens)]
    )
    assert neighbours_worth(sure, tokens) == 0
    assert neighbours_worth(sure[:0], tokens[:0]) == 0


def test_reweighted_multiplies_the_odds():
    lengths = PredictedDistributions.of_buckets((0, 8), np.array([[0.5, 0.5]]))
    assert lengths.reweighted(np.array([[1.0, 3.0]])).bucket_probabilities()[0] == pytest.approx(
        [0.25, 0.75], abs=1e-6
    )


@pytest.mark.parametrize("sure", [0.2, 1.0, 5.0])
def test_corrected_intervals_cover_nine_tenths(sure):
    """Whether predictions are too sure or too timid."""
    rng = np.random.default_rng(0)
    centre = rng.uniform(2, 6, 4000)
    tokens = np.maximum(1, np.rint(np.exp(centre + rng.normal(0, 0.5, 4000)))).astype(int)
    middles = np.log(np.array([4, 12, 24, 48, 96, 192, 384, 768, 1536, 3072]))
    shares = np.exp(-sure * (middles - centre[:, None]) ** 2) + 1e-9
    lengths = PredictedDistributions.of_buckets(DEFAULT_EDGES, shares)
    offset = conformal_offset(lengths[:2000], tokens[:2000])
    low, high = lengths[2000:].interval_tokens(offset)
    held = ((tokens[2000:] >= low) & (tokens[2000:] <= high)).mean()
    assert held == pytest.approx(0.9, abs=0.025)


@pytest.mark.parametrize("edges", [(0,), (1, 2), (0, 8, 8), (0, 9, 4)])
def test_impossible_bucket_edges_are_refused(edges):
    with pytest.raises(SloBenchError, match="bucket edges must rise from 0 on"):
        checked_edges(edges)


def test_recalibrated_quantiles_cover_both_tails():
    rng = np.random.default_rng(0)
    centre = rng.uniform(3, 6, 4000)
    tokens = np.maximum(1, np.rint(np.expm1(centre + rng.normal(0.1, 0.3, 4000)))).astype(int)
    edges = log_edges(DEFAULT_EDGES)
    # Said twice as wide as it is, and a little too short.
    below = stats.norm.cdf((edges[None, :] - centre[:, None]) / 0.6)
    predicted = PredictedDistributions.of_buckets(DEFAULT_EDGES, np.diff(below, axis=1))
    held, new = np.arange(2000), np.arange(2000, 4000)
    shares = recalibration(predicted[held], tokens[held])
    corrected = predicted[new].recalibrated(shares)
    assert (tokens[new] <= predicted[new].longest_tokens()).mean() > 0.93
    assert (tokens[new] <= corrected.longest_tokens()).mean() == pytest.approx(0.9, abs=0.02)
    short = np.ceil(np.expm1(corrected.quantile_log(0.1)))
    assert (tokens[new] <= short).mean() == pytest.approx(0.1, abs=0.02)
    low, high = corrected.interval_tokens()
    assert ((tokens[new] >= low) & (tokens[new] <= high)).mean() == pytest.approx(0.9, abs=0.02)
    assert predicted.recalibrated(()) is predicted
    assert recalibration(predicted[held[:10]], tokens[held[:10]]) == ()
