"""Steps through pipeline stages: who computes when, and what a hop between two of them costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.device import StageDevice, free_after, occupy


def stages(*parts: tuple[float, float]) -> tuple[StageDevice, ...]:
    return tuple(StageDevice(str(k), share, hop_s) for k, (share, hop_s) in enumerate(parts))


def test_stage_computes_for_another_batch_while_a_step_travels():
    """Two stages of 1 s each, a hop of 10 s: steps of three batches leave 1 s apart."""
    pipeline = stages((0.5, 10.0), (0.5, 0.0))
    assert [occupy(pipeline, 0.0, 12.0) for _ in range(3)] == [12.0, 13.0, 14.0]
    assert [stage.free_at_s for stage in pipeline] == [3.0, 14.0]


def test_step_that_met_no_other_leaves_each_stage_free_when_it_left_it():
    pipeline = stages((0.25, 3.0), (0.75, 0.0))
    free_after(pipeline, 20.0, 7.0)
    assert [stage.free_at_s for stage in pipeline] == [14.0, 20.0]


@given(
    parts=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=4),
    begins_s=st.lists(st.integers(0, 40), min_size=1, max_size=8),
)
def test_steps_pass_each_stage_one_after_the_other_and_travel_together(parts, begins_s):
    """Against a table of times: a step enters a stage when it is there and the one before left."""
    computed_s = sum(own_s for own_s, _ in parts)
    pipeline = stages(*((own_s / computed_s, float(hop_s)) for own_s, hop_s in parts))
    whole_s = computed_s + sum(hop_s for _, hop_s in parts)
    left_s = [0.0] * len(parts)
    for begin_s in sorted(begins_s):
        now_s = float(begin_s)
        for k, (own_s, hop_s) in enumerate(parts):
            left_s[k] = max(now_s, left_s[k]) + own_s
            now_s = left_s[k] + hop_s
        assert occupy(pipeline, float(begin_s), float(whole_s)) == pytest.approx(now_s)
        assert [stage.free_at_s for stage in pipeline] == pytest.approx(left_s)
