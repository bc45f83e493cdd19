"""Quantiles of weighted gaps equal those of all gaps in order, also where few are sorted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slo_bench.harness.core.records.request_records import Floats, Gaps

N = 60_000  # more than are sorted
RNG = np.random.default_rng(0)
DRAWN = RNG.lognormal(-3.5, 0.6, N)
MISLEADING = np.where(np.arange(N) % 50 == 0, 9.0, DRAWN)  # where a sample would look


@pytest.mark.parametrize(
    "gap_s",
    [DRAWN, np.sort(DRAWN), np.round(DRAWN, 2), np.full(N, 0.02), MISLEADING, DRAWN[:1000]],
    ids=["drawn", "ascending", "ties", "equal", "misleading", "few"],
)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99, 0.9999, 1.0])
def test_a_quantile_is_the_smallest_gap_that_a_share_does_not_exceed(
    gap_s: Floats, share: float
) -> None:
    count = RNG.integers(1, 9, len(gap_s))
    every_s = np.sort(np.repeat(gap_s, count))
    rank = max(1, math.ceil(share * len(every_s)))
    assert Gaps(gap_s, count).quantile_s(share) == every_s[rank - 1]


def test_no_gap_has_no_quantile() -> None:
    assert math.isnan(Gaps(np.empty(0), np.empty(0, dtype=np.int64)).quantile_s(0.99))
