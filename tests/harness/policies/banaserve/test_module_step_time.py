"""Step times with layers or heads on another GPU, by hand and against stepping."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.device import StageDevice, occupy
from slo_bench.harness.policies.banaserve.module_costs import MovedStepTime, Toll
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time

OWN = step_time(Placement(model("llama-13b"), gpu("a100-80g"))).model
TOLL = Toll(0.001, 1e-6)


def test_a_decode_step_pays_the_hops_and_gains_nothing_from_layers():
    moved = MovedStepTime(OWN, layer_share=0.25, layer_toll=TOLL)
    whole_s = OWN.step_s(10, 5000, ())
    assert moved.step_s(10, 5000, ()) == pytest.approx(whole_s + 0.001 + 10e-6)
    assert moved.abroad_s(10, 5000, ()) == pytest.approx(whole_s / 4)


def test_long_prefill_with_moved_layers_runs_on_both_gpus():
    moved = MovedStepTime(OWN, layer_share=0.25, layer_toll=TOLL)
    whole_s = OWN.step_s(0, 0, ((0, 2048),))
    # Four micro-batches; three quarters of each is computed here.
    assert moved.step_s(0, 0, ((0, 2048),)) == pytest.approx(
        whole_s * (0.25 + 3 / 4 * 0.75) + 0.001 + 2048e-6
    )
    short_s = OWN.step_s(0, 0, ((0, 100),))
    assert moved.step_s(0, 0, ((0, 100),)) == pytest.approx(short_s + 0.001 + 100e-6)


def test_heads_shorten_attention_by_the_smaller_part():
    whole_s, bare_s = OWN.step_s(10, 50_000, ()), OWN.step_s(10, 0, ())
    for share, left in ((0.25, 0.75), (0.75, 0.75), (0.5, 0.5)):
        moved = MovedStepTime(OWN, head_share=share, head_toll=TOLL)
        expected_s = bare_s + left * (whole_s - bare_s) + 0.001 + 10e-6
        assert moved.step_s(10, 50_000, ()) == pytest.approx(expected_s)
        assert moved.abroad_s(10, 50_000, ()) == pytest.approx(share * (whole_s - bare_s))


SHARE = st.floats(0, 0.9)


@given(SHARE, SHARE, st.integers(1, 300), st.integers(0, 100_000), st.integers(1, 200))
def test_moved_span_equals_the_sum_of_its_steps(layers, heads, seqs, kv_tokens, steps):
    moved = MovedStepTime(OWN, layers, TOLL, heads, TOLL)
    each = [(seqs, kv_tokens + k * seqs, ()) for k in range(steps)]
    assert moved.span_s(seqs, kv_tokens, steps) == pytest.approx(
        sum(moved.step_s(*e) for e in each)
    )
    assert moved.span_abroad_s(seqs, kv_tokens, steps) == pytest.approx(
        sum(moved.abroad_s(*e) for e in each)
    )


@given(SHARE, SHARE, st.integers(1, 300), st.integers(0, 100_000), st.floats(-1, 30))
def test_moved_steps_within_is_the_fewest(layers, heads, seqs, kv_tokens, duration_s):
    moved = MovedStepTime(OWN, layers, TOLL, heads, TOLL)
    steps = moved.steps_within(seqs, kv_tokens, duration_s)
    if duration_s <= 0:
        assert steps == 0
        return
    assert moved.span_s(seqs, kv_tokens, steps) >= duration_s
    assert steps == 1 or moved.span_s(seqs, kv_tokens, steps - 1) < duration_s


@given(SHARE, st.integers(1, 8192))
def test_moved_prefill_never_exceeds_the_time_of_either_gpu(share, tokens):
    moved = MovedStepTime(OWN, layer_share=share)
    step_s = moved.step_s(0, 0, ((0, tokens),))
    whole_s = OWN.step_s(0, 0, ((0, tokens),))
    assert moved.abroad_s(0, 0, ((0, tokens),)) <= step_s + 1e-12  # the helper
    assert (1 - share) * whole_s <= step_s + 1e-12  # the instance itself


def test_steps_of_a_helper_wait_for_its_foreign_work():
    device = StageDevice("GPU")
    assert occupy((device,), 0.0, 1.0) == 1.0
    device.owed_s += 0.5
    assert occupy((device,), 1.0, 1.0) == 2.5  # busy all the time: all of it is owed
    device.owed_s += 2.0
    assert occupy((device,), 4.0, 1.0) == 5.5  # idle from 2.5 to 4: that much was done
    device.owed_s += 0.1
    assert occupy((device,), 7.0, 1.0) == 8.0
    assert device.owed_s == 0.0
