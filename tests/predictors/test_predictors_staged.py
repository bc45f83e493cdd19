"""Stages that are not alike: memory, step time, and where a pass spends it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.predictors.placement import PipelineStage, Placement, even_layers
from slo_bench.predictors.specs import gpu, link, model
from slo_bench.predictors.staged import staged_step_time
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import SloBenchError

GLM = model("chatglm2-6b")  # 28 layers, head and embeddings apart
FAST, SLOW, PIX = gpu("rtx-3090"), gpu("l4"), link("pix")


def split(*layers, gpus=None, **more):
    gpus = gpus or [FAST] * len(layers)
    stages = tuple(PipelineStage(g, n, PIX) for g, n in zip(gpus, layers, strict=True))
    return Placement(GLM, stages[0].gpu, pp=len(layers), split=stages, **more)


def test_even_layers_divides_with_the_rest_first():
    assert even_layers(28, 3) == (10, 9, 9)
    assert even_layers(28, 4) == (7, 7, 7, 7)


def test_an_even_split_by_hand_is_the_even_placement():
    even, by_hand = Placement(GLM, FAST, pp=4), split(7, 7, 7, 7)
    for name in (
        "num_gpu_blocks",
        "weight_bytes_per_gpu",
        "block_bytes_per_gpu",
        "num_cpu_blocks",
        "gpus",
    ):
        assert getattr(even, name) == getattr(by_hand, name)


def test_fullest_stage_limits_the_kv_cache():
    lopsided = split(25, 3)
    alone = Placement(GLM, FAST)
    per_layer = alone.block_bytes_per_gpu // 28
    held = 25 * GLM.layer_weight_bytes() + 2 * GLM.embedding_parameters
    free = alone.usable_bytes_per_gpu - alone.reserve_bytes_per_gpu - held
    assert lopsided.weight_bytes_per_gpu == held
    assert lopsided.num_gpu_blocks == free // (25 * per_layer)


def test_smaller_gpu_limits_the_kv_cache_sooner():
    small = replace(FAST, memory_bytes=FAST.memory_bytes // 2)
    assert split(14, 14, gpus=[FAST, small]).num_gpu_blocks < split(14, 14).num_gpu_blocks
    with pytest.raises(SloBenchError, match=r"stage 1 \(rtx-3090\); give it fewer"):
        split(2, 26, gpus=[FAST, small]).check()


def test_staged_placement_refuses_wrong_splits():
    with pytest.raises(SloBenchError, match="hold 27 layers but chatglm2-6b has 28"):
        split(20, 7)
    with pytest.raises(SloBenchError, match="at least 1 layer"):
        split(28, 0)
    with pytest.raises(SloBenchError, match="need pp 2 and tp 1"):
        replace(split(20, 8), tp=2)
    with pytest.raises(SloBenchError, match="lanes must be 1 to 2"):
        split(20, 8, fixed_lanes=3)


BATCHES = [
    (1, 100, ()),
    (8, 4000, ()),
    (300, 60_000, ()),
    (0, 0, [(0, 700)]),
    (5, 900, [(16, 400)]),
]


@pytest.mark.parametrize("layers", [(7, 7, 7, 7), (20, 8), (1, 27), (28,)])
def test_staged_step_time_of_equal_gpus_equals_the_roofline(layers):
    staged = staged_step_time(split(*layers), host_s=0.003).model
    whole = step_time(Placement(GLM, FAST, pp=len(layers)), host_s=0.003).model
    for batch in BATCHES:
        # Stages without the head turn a little earlier from reading to multiplying.
        assert staged.step_s(*batch) == pytest.approx(whole.step_s(*batch), rel=0.02)
    assert staged.step_s(*BATCHES[1]) == pytest.approx(whole.step_s(*BATCHES[1]), rel=1e-9)


def test_layers_on_a_slow_gpu_take_longer_by_the_bandwidth_ratio():
    def seconds(fast, slow):
        return staged_step_time(split(fast, slow, gpus=[FAST, SLOW]), host_s=0.0).model.step_s(
            1, 0, ()
        )

    one_layer_s = seconds(20, 8) - seconds(21, 7)
    ratio = FAST.bandwidth_bytes_per_s / SLOW.bandwidth_bytes_per_s
    assert ratio > 3
    assert one_layer_s > 0
    assert seconds(10, 18) - seconds(20, 8) == pytest.approx(10 * one_layer_s)


def test_staged_time_shares_follow_layers():
    shares = staged_step_time(split(21, 7), host_s=0.03).model.shares()
    assert sum(shares) == pytest.approx(1)
    assert 2.3 < shares[0] / shares[1] < 3  # the last has the head, too


@given(
    seqs=st.integers(1, 400),
    kv=st.integers(0, 100_000),
    steps=st.integers(1, 300),
)
def test_staged_span_equals_the_sum_of_its_steps(seqs, kv, steps):
    timed = staged_step_time(split(12, 16, gpus=[FAST, SLOW])).model
    stepped = sum(timed.step_s(seqs, kv + n * seqs, ()) for n in range(steps))
    span_s = timed.span_s(seqs, kv, steps)
    assert span_s == pytest.approx(stepped)
    assert timed.steps_within(seqs, kv, span_s) == steps
    assert timed.steps_within(seqs, kv, span_s * (1 + 1e-9)) == steps + 1
    assert timed.steps_within(seqs, kv, 0.0) == 0


def test_latency_of_a_link_lengthens_a_pass_and_occupies_no_stage():
    wan = replace(PIX, latency_s=0.04)
    placement = split(14, 14)
    near = staged_step_time(placement).model
    first, last = placement.split
    far = staged_step_time(replace(placement, split=(replace(first, link=wan), last))).model
    hop_s = 0.04 - near.hops_s[0]
    assert far.step_s(8, 2048, ()) == pytest.approx(near.step_s(8, 2048, ()) + hop_s)
    assert far.hops_s == (0.04, 0.0)
    assert far.shares() == pytest.approx(near.shares())
