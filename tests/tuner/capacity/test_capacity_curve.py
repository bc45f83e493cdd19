import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.results.stationarity import BATCHES
from slo_bench.tuner.capacity.curve import CapacityLevel, crossing, falling_shares, student_t
from slo_bench.tuner.capacity.level_samples import LevelSample


def run(rate, met, counted, seed=0, *, backlog=None, valid=True):
    edges = np.linspace(0, counted, BATCHES + 1).round().astype(int)
    mets = np.linspace(0, met, BATCHES + 1).round().astype(int)
    return LevelSample(
        rate_rps=rate,
        seed=seed,
        requests=counted,
        batch_met=tuple(np.diff(mets).tolist()),
        batch_requests=tuple(np.diff(edges).tolist()),
        backlog=tuple(backlog or [5] * (BATCHES + 1)),
        invalid_because=None if valid else "late",
    )


def level(rate, *shares, counted=1000):
    runs = (run(rate, round(share * counted), counted, seed) for seed, share in enumerate(shares))
    return CapacityLevel(rate, tuple(runs))


def logistic(rate, capacity, slope, target):
    z = math.log(target / (1 - target)) - slope * math.log(rate / capacity)
    return 1 / (1 + math.exp(-z))


@pytest.mark.parametrize(("target", "slope"), [(0.9, 5.0), (0.9, 40.0), (0.99, 20.0)])
def test_crossing_recovers_a_logistic_curve(target, slope):
    rates = [10 * math.exp(logits / slope) for logits in (-1.0, -0.5, 0.5, 1.0)]
    levels = [
        level(rate, *[logistic(rate, 10, slope, target)] * 4, counted=50_000) for rate in rates
    ]
    estimate = crossing(levels, target)
    assert estimate.rate_rps == pytest.approx(10, rel=0.002)
    assert estimate.slope == pytest.approx(slope, rel=0.15)
    assert estimate.low_rps < 10 < estimate.high_rps


@pytest.mark.slow
def test_crossing_interval_covers_as_stated():
    rng = np.random.default_rng(5)
    rates = [9.4, 9.8, 10.2, 10.6]
    covered = 0
    for _ in range(200):
        levels = [
            level(rate, *rng.binomial(1000, logistic(rate, 10, 15, 0.9), 4) / 1000)
            for rate in rates
        ]
        estimate = crossing(levels, 0.9)
        covered += estimate.low_rps <= 10 <= estimate.high_rps
    assert covered >= 184  # 95 % are 190; below 184 in one of a hundred experiments


def test_crossing_interval_widens_with_scatter_between_runs():
    calm = [level(9.0, *[0.95] * 6), level(11.0, *[0.85] * 6)]
    wild = [level(9.0, *[0.90, 1.0] * 3), level(11.0, *[0.75, 0.95] * 3)]
    narrow, wide = crossing(calm, 0.9), crossing(wild, 0.9)
    assert wide.rate_rps == pytest.approx(narrow.rate_rps, rel=0.01)
    assert wide.relative_half_width > 2 * narrow.relative_half_width


def test_crossing_interval_between_all_and_nothing_is_the_gap():
    estimate = crossing([level(8.0, 1.0, 1.0), level(10.0, 0.0, 0.0)], 0.9)
    assert 8.0 < estimate.rate_rps < 10.0
    assert estimate.low_rps == pytest.approx(8.0, rel=0.05)
    assert estimate.high_rps == pytest.approx(10.0, rel=0.05)


def test_crossing_counts_a_growing_backlog_as_over_capacity():
    growing = run(11.0, 1000, 1000, backlog=list(range(0, 10 * BATCHES + 1, 10)))
    levels = [
        level(9.0, 1.0),
        level(10.0, 0.99),
        CapacityLevel(11.0, (growing,)),
        level(12.0, 0.999),
    ]
    assert levels[2].growing
    assert not levels[2].passes(0.9)
    estimate = crossing(levels, 0.9)
    assert 10.0 <= estimate.rate_rps <= 11.0


def test_level_attainment_ignores_invalid_runs():
    late = run(10.0, 0, 1000, seed=9, valid=False)
    alone = level(10.0, 0.95)
    mixed = CapacityLevel(10.0, (*alone.samples, late))
    assert mixed.attainment == alone.attainment
    assert mixed.requests == 2000
    assert crossing([mixed, level(12.0, 0.8)], 0.9) == crossing([alone, level(12.0, 0.8)], 0.9)


def test_crossing_without_both_sides_is_none():
    assert crossing([level(1.0, 0.99), level(2.0, 0.95)], 0.9) is None
    assert crossing([level(1.0, 0.5), level(2.0, 0.4)], 0.9) is None
    assert crossing([], 0.9) is None


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_isotonic_shares_fall_and_keep_their_mean(shares):
    levels = [level(1.0 + number, share / 100, counted=100) for number, share in enumerate(shares)]
    smoothed = falling_shares(levels)
    assert all(0 < share < 1 for share in smoothed)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(smoothed))
    assert sum(smoothed) == pytest.approx(sum((share + 0.5) / 101 for share in shares))


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [(0.975, 4, 2.776), (0.975, 10, 2.228), (0.975, 100, 1.984), (0.95, 6, 1.943)],
)
def test_student_t_quantiles_equal_tables(probability, freedom, quantile):
    assert student_t(probability, freedom) == pytest.approx(quantile, rel=0.003)


def test_level_interval_narrows_with_counted_requests():
    low, high = level(1.0, 0.9).attainment_interval
    assert (low, high) == pytest.approx((0.8799, 0.9171), abs=1e-3)  # Wilson, n = 1000
    low_more, high_more = level(1.0, *[0.9] * 10).attainment_interval
    assert low < low_more < 0.9 < high_more < high


def test_crossing_interval_ignores_bends_far_away():
    near = [
        level(rate, *[logistic(rate, 10, 5, 0.9)] * 4, counted=50_000)
        for rate in (9, 9.5, 10.5, 11)
    ]
    far = [level(14, *[0.3] * 4, counted=50_000)]  # on the line it would be 0.63
    alone, both = crossing(near, 0.9), crossing(near + far, 0.9)
    assert both.dispersion == pytest.approx(alone.dispersion, rel=0.2)
    assert both.rate_rps == pytest.approx(10, rel=0.003)


def test_crossing_where_a_low_rate_fails_by_chance_rests_on_both_sides():
    shares = {43.7: (1, 662), 44.5: (0.871, 677), 44.9: (1, 683), 47.8: (0.99, 727)}
    shares |= {48.6: (0.011, 740)}
    growing = CapacityLevel(64.2, (run(64.2, 47, 274, backlog=range(0, 84, 4)),))
    levels = [level(rate, share, counted=counted) for rate, (share, counted) in shares.items()]
    estimate = crossing([*levels, growing], 0.9)
    assert 42 <= estimate.low_rps <= estimate.rate_rps <= estimate.high_rps <= 50
