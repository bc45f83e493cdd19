"""The sketch of quantiles: error bound, exact mean, merging, weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.records.quantile_sketch import (
    LEAST_S,
    RELATIVE_ERROR,
    QuantileSketch,
)
from slo_bench.harness.core.records.request_records import Gaps

SHARES = (0.0, 0.01, 0.5, 0.9, 0.99, 1.0)
WITHIN = RELATIVE_ERROR * (1 + 1e-6)  # rounding of a logarithm at the bound of a bucket

seconds = st.one_of(
    st.floats(LEAST_S, 1e8), st.sampled_from([1.0, 1.001, 0.999, 1.0005, 0.15, 2e-9])
)
samples = st.lists(seconds, min_size=1, max_size=60).map(np.array)


def sketch_of(*parts):
    sketch = QuantileSketch()
    for part in parts:
        sketch.add(np.asarray(part, dtype=np.float64))
    return sketch


@given(samples)
def test_quantiles_are_within_the_error(values):
    quantiles = sketch_of(values).quantiles(SHARES)
    assert quantiles == pytest.approx(tuple(np.quantile(values, SHARES)), rel=WITHIN)


@given(samples)
def test_sketch_mean_is_exact(values):
    sketch = sketch_of(values)
    assert sketch.mean() == pytest.approx(values.mean(), rel=1e-12)
    assert len(sketch) == len(values)


@given(st.lists(samples, min_size=1, max_size=5), st.randoms())
def test_merged_sketches_equal_the_sketch_of_all_values(parts, random):
    whole, merged = sketch_of(np.concatenate(parts)), QuantileSketch()
    random.shuffle(parts)
    for part in parts:
        merged.merge(sketch_of(part))
    assert len(merged) == len(whole)
    assert merged.quantiles(SHARES) == pytest.approx(whole.quantiles(SHARES), rel=1e-12)
    assert merged.values()[1].tolist() == whole.values()[1].tolist()
    in_turn = sketch_of(*parts)
    assert in_turn.values()[1].tolist() == whole.values()[1].tolist()


@given(st.lists(st.tuples(seconds, st.integers(1, 1000)), min_size=1, max_size=40))
def test_weighted_values_equal_repeated_values(pairs):
    values = np.array([value for value, _ in pairs])
    times = np.array([n for _, n in pairs], dtype=np.int64)
    weighted = QuantileSketch()
    weighted.add(values, times)
    repeated = np.repeat(values, times)
    assert len(weighted) == len(repeated)
    assert weighted.mean() == pytest.approx(repeated.mean(), rel=1e-9)
    assert weighted.quantiles(SHARES) == pytest.approx(
        tuple(np.quantile(repeated, SHARES)), rel=WITHIN
    )
    # A sketch as weighted values: what the gaps between tokens are summarised to.
    exact, summarised = Gaps(values, times), Gaps(*weighted.values())
    for share in SHARES:
        assert summarised.quantile_s(share) == pytest.approx(exact.quantile_s(share), rel=WITHIN)


@given(samples, seconds)
def test_shares_above_are_within_the_relative_error(values, threshold):
    share = float(sketch_of(values).shares_above(np.array([threshold]))[0])
    low, high = threshold * (1 - WITHIN), threshold * (1 + WITHIN)
    assert (values > high).mean() - 1e-12 <= share <= (values > low).mean() + 1e-12


def test_equal_values_are_exact_and_infinite_ones_are_ignored():
    sketch = sketch_of([0.15, math.nan, 0.15, math.inf])
    assert sketch.quantiles((0.5, 0.99)) == (0.15, 0.15)
    assert len(sketch) == 2


def test_bucket_widths_stay_within_the_relative_error():
    # The mean of a bucket is next to its smallest value, and the error of its largest one is worst.
    for k in range(60):
        value = 1.0003**k
        larger = value * (1 + 1.05 * RELATIVE_ERROR)
        quantiles = sketch_of([value] * 999, [larger]).quantiles((1.0,))
        assert quantiles == pytest.approx((larger,), rel=WITHIN)


def test_values_beyond_the_range_are_clamped():
    sketch = sketch_of([0.0, 0.0, 1e-12, 3e9])
    assert len(sketch) == 4
    assert sketch.quantiles((0.0,))[0] == pytest.approx(0.0, abs=LEAST_S)
    assert sketch.quantiles((1.0,))[0] == 3e9


def test_empty_sketch_has_nan_quantiles_and_mean():
    assert all(math.isnan(value) for value in QuantileSketch().quantiles(SHARES))
    assert math.isnan(QuantileSketch().mean())
    sketch = QuantileSketch()
    sketch.add(np.array([math.nan]))
    assert not len(sketch)
