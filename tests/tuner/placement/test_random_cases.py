"""The paper's procedure over random devices: no better than the optimum, and seeded."""

import pytest

from slo_bench.tuner.placement.compare import random_gaps


@pytest.mark.slow
def test_random_cases_never_beat_the_exact_solver():
    found = random_gaps(20, seed=3)
    assert found == random_gaps(20, seed=3)
    assert found != random_gaps(20, seed=4)
    for one in found:
        assert min(one.gaps_percent) > -1e-6
        assert one.feasible == one.nothing + one.overfull + len(one.gaps_percent) <= one.cases
        row = one.row()
        assert row["optimal"] == sum(gap < 1e-6 for gap in one.gaps_percent)
        assert row["gap_max_percent"] == round(max(one.gaps_percent), 3)
