"""The paper's procedure over random devices: no better than the optimum, and seeded."""

import pytest

from slo_bench.tuner.placement.compare_placements import random_gaps


@pytest.mark.slow
def test_random_cases_never_beat_the_exact_solver():
    summaries = random_gaps(20, seed=3)
    assert summaries == random_gaps(20, seed=3)
    assert summaries != random_gaps(20, seed=4)
    for summary in summaries:
        assert min(summary.gaps_percent) > -1e-6
        assert (
            summary.feasible
            == summary.nothing + summary.overfull + len(summary.gaps_percent)
            <= summary.cases
        )
        row = summary.row()
        assert row["optimal"] == sum(gap < 1e-6 for gap in summary.gaps_percent)
        assert row["gap_max_percent"] == round(max(summary.gaps_percent), 3)
