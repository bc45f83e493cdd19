"""When idle models may be evicted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.idle_gaps import LEAST_GAPS, IdleGaps
from slo_bench.harness.policies.prism.prism_controller import eviction_order


def _gaps(gaps_s: list[float]) -> IdleGaps:
    gaps = IdleGaps()
    for gap_s in gaps_s:
        gaps.add(gap_s)
    return gaps


def test_idle_threshold_separates_short_and_long_gaps() -> None:
    # 16 gaps of 1 s, 4 of 100 s: of all, a fifth lasts 10 s; of those beyond 1 s, all do.
    gaps = _gaps([1.0] * 16 + [100.0] * 4)
    assert gaps.threshold_s(worth_s=10.0, share=0.5, default_s=30.0) == 1.0
    assert gaps.threshold_s(worth_s=10.0, share=0.1, default_s=30.0) == 0.0


def test_idle_threshold_of_only_short_gaps_is_the_longest() -> None:
    gaps = _gaps([0.5, 1.0, 1.5, 2.0, 1.0, 1.0, 0.2, 0.7])
    assert gaps.threshold_s(worth_s=10.0, share=0.5, default_s=30.0) == 2.0


def test_idle_threshold_of_few_gaps_is_the_default() -> None:
    gaps = _gaps([100.0] * (LEAST_GAPS - 1))
    assert gaps.threshold_s(worth_s=10.0, share=0.5, default_s=30.0) == 30.0


def test_idle_threshold_forgets_old_gaps() -> None:
    gaps = _gaps([0.5] * 128 + [200.0] * 128)
    assert gaps.threshold_s(worth_s=10.0, share=0.5, default_s=30.0) == 0.0


@given(st.lists(st.floats(0, 1e3), min_size=LEAST_GAPS, max_size=60), st.floats(0.1, 100))
def test_idle_threshold_leaves_the_wanted_share_of_long_gaps(
    gaps_s: list[float], worth_s: float
) -> None:
    threshold_s = _gaps(gaps_s).threshold_s(worth_s, 0.5, 30.0)
    lasted = [gap for gap in gaps_s if gap > threshold_s]
    longer = [gap for gap in lasted if gap > threshold_s + worth_s]
    assert len(longer) >= 0.5 * len(lasted)


def test_eviction_order_takes_due_models_with_the_largest_slo_first() -> None:
    # (model, SLO, idle, threshold)
    idle = [(0, 1.0, 60.0, 30.0), (1, 5.0, 40.0, 30.0), (2, 9.0, 5.0, 30.0), (3, 1.0, 9.0, 30.0)]
    assert eviction_order(idle) == [1, 0, 3, 2]
