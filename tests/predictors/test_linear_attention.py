"""Linear attention beside full: parameters, memory and step times, worked out by hand."""

from dataclasses import replace

import pytest

from slo_bench.harness.experiments.execution.lookup import placed
from slo_bench.harness.experiments.execution.specs import PlacementSpec
from slo_bench.predictors.operators.layers import operators
from slo_bench.predictors.specs import model
from slo_bench.workloads.errors import SloBenchError

NAME = "qwen3-next-80b-a3b"
SPEC = model(NAME)


def put(tp=4, **more):
    return placed(PlacementSpec(NAME, "h100-80g", tp, **more))


def test_parameters_and_states():
    """12 layers attend, 36 have a gated delta rule; every layer has experts."""
    full = 2048 * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * 2048
    mixed = 2 * 16 * 128 + 32 * 128
    linear = 2048 * (mixed + 32 * 128 + 2 * 32) + 32 * 128 * 2048
    linear += mixed * 4 + 2 * 32 + 128
    experts = 48 * (3 * 2048 * 512 * (512 + 1) + 2048 * 512)
    norms = 48 * (2 * 2048 + 2 * 256) + 2048
    assert SPEC.parameters == 12 * full + 36 * linear + experts + norms + 2 * 151936 * 2048
    assert SPEC.parameters == pytest.approx(80e9, rel=0.01)  # as Qwen says
    assert SPEC.kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2
    assert SPEC.state_bytes == 36 * (32 * 128 * 128 * 4 + mixed * 3 * 2)


def test_states_of_256_sequences_are_set_aside_and_split_over_gpus():
    without = model(NAME).state_bytes * 256
    four, eight = (put(tp).placement.reserve_bytes_per_gpu for tp in (4, 8))
    assert four > without / 4
    assert four - eight > without / 8
    few = replace(SPEC, linear=replace(SPEC.linear, key_heads=2))
    with pytest.raises(SloBenchError, match="2 key heads of linear attention, not divisible by"):
        replace(put(4).placement, model=few).check()


def test_operators_of_the_two_kinds_of_layers():
    listed = operators(put(4).placement)
    calls = {gemm.name: (gemm.n, gemm.k, gemm.calls) for gemm in listed.gemms}
    assert calls["qkv_proj"] == ((2 * 16 * 256) // 4 + 2 * 256, 2048, 12)  # with its gate
    assert calls["linear_in_proj"] == ((8192 + 4096) // 4, 2048, 36)
    assert calls["linear_gates_proj"] == (64 // 4, 2048, 36)
    assert calls["linear_out_proj"] == (2048, 1024, 36)
    assert calls["router"][2] == 48
    assert listed.attention.calls == 12
    assert listed.recurrence.calls == 36


def test_a_decode_reads_and_writes_states_and_hardly_grows_with_length():
    step_s = put(4).step_time.model.step_s
    short, long = (step_s(256, 256 * tokens, ()) for tokens in (1_000, 16_000))
    states_s = 2 * 256 * SPEC.state_bytes / 4 / 3.35e12  # the GPU's bandwidth
    assert short > states_s
    kv_s = 256 * 15_000 * SPEC.kv_bytes_per_token() / 2 / 3.35e12  # two KV heads: two copies
    assert 0.8 * kv_s < long - short < 2.5 * kv_s


def test_it_is_said_to_be_an_estimate():
    made = put(4).step_time
    assert not made.fitted
    assert made.provenance.endswith("linear attention by its roofline")
    with pytest.raises(SloBenchError, match="speculation with linear attention"):
        put(4, speculation="eagle:3@0.7")
