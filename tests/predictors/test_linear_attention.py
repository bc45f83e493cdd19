"""Linear attention beside full: parameters, memory and step times, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.harness.policies.systems import system
from slo_bench.predictors.model_parts import LinearAttention
from slo_bench.predictors.operators import layers
from slo_bench.predictors.operators.assembly import operator_step_time
from slo_bench.predictors.operators.kernels import Kernels, kernels
from slo_bench.predictors.operators.layers import operators
from slo_bench.predictors.specs import gpu, model
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

NAME = "qwen3-next-80b-a3b"
SPEC = model(NAME)


def put(tp=4, **more):
    return placed(PlacementSpec(NAME, "h100-80g", tp, **more))


def test_linear_attention_parameters_and_state_bytes():
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


def test_linear_states_of_256_sequences_are_reserved_and_split():
    states = model(NAME).state_bytes * 256
    four, eight = (put(tp).placement for tp in (4, 8))
    for place in (four, eight):
        held = place.reserve_bytes_per_gpu - place.memory_parts.total
        assert held == pytest.approx(states / place.tp, rel=1e-6)
    few = replace(SPEC, linear=replace(SPEC.linear, key_heads=2))
    with pytest.raises(SloBenchError, match="2 key heads of linear attention, not divisible by"):
        replace(put(4).placement, model=few).check()


def test_operators_of_linear_and_full_attention_layers():
    listed = operators(put(4).placement)
    calls = {gemm.name: (gemm.n, gemm.k, gemm.calls) for gemm in listed.gemms}
    assert calls["qkv_proj"] == ((2 * 16 * 256) // 4 + 2 * 256, 2048, 12)  # with its gate
    assert calls["linear_in_proj"] == ((8192 + 4096) // 4, 2048, 36)
    assert calls["linear_gates_proj"] == (64 // 4, 2048, 36)
    assert calls["linear_out_proj"] == (2048, 1024, 36)
    assert calls["router"][2] == 48
    assert listed.attention.calls == 12
    assert listed.recurrence.calls == 36


def test_linear_decode_hardly_grows_with_length():
    step_s = put(4).step_time.model.step_s
    short, long = (step_s(256, 256 * tokens, ()) for tokens in (1_000, 16_000))
    states_s = 2 * 256 * SPEC.state_bytes / 4 / 3.35e12  # the GPU's bandwidth
    assert short > states_s
    kv_s = 256 * 15_000 * SPEC.kv_bytes_per_token() / 2 / 3.35e12  # two KV heads: two copies
    assert 0.8 * kv_s < long - short < 2.5 * kv_s


def test_linear_prefill_takes_the_measured_recurrence_time():
    """In proportion beyond the table, and between its sizes between their times; a GPU without
    tables takes those of the nearest, scaled by the bandwidth.
    """
    place = put(4).placement
    recurrence = operators(place).recurrence
    assert (recurrence.key_heads, recurrence.value_heads) == (4, 8)
    kernel_times = kernels(place.gpu)
    tokens = np.array([1024.0, 1536.0, 2048.0, 16384.0, 32768.0])
    first, between, second, last, beyond = kernel_times.recurrence_s(tokens, recurrence)
    assert first < between < second
    assert beyond == pytest.approx(2 * last)
    roofline_s = kernel_times.roofline_s(
        recurrence.token_bytes * 1024, recurrence.token_operations * 1024
    )
    assert first > 2 * roofline_s  # one chunk waits for the one before it
    table = place.gpu.bandwidth_bytes_per_s / gpu("b300").bandwidth_bytes_per_s
    elsewhere = kernels(gpu("b300"), without=("b200", "h200-141g"))
    assert elsewhere.source.startswith("h100-80g")
    assert elsewhere.recurrence_s(tokens, recurrence)[2] == pytest.approx(second * table, rel=0.01)


def test_linear_prefill_pays_the_recurrence_and_decode_does_not():
    timed = put(4).step_time.model
    place = put(4).placement
    kernel_times, recurrence = kernels(place.gpu), operators(place).recurrence
    of_prompt = recurrence.calls * float(
        kernel_times.recurrence_s(np.array([2048.0]), recurrence)[0]
    )
    assert timed.step_s(0, 0, ((0, 2048),)) > of_prompt
    single, many = (timed.step_s(n, 0, ()) for n in (1, 256))
    states = kernel_times.recurrent_s(np.array([1.0, 256.0]), recurrence)
    assert many - single > 0.9 * recurrence.calls * (states[1] - states[0])


def test_linear_step_time_without_tables_is_marked_unfitted():
    assert put(4).step_time.fitted
    kernel_times = kernels(put(4).placement.gpu)
    names = {name for name in kernel_times._tables if not name.startswith("linear_")}
    without = Kernels(
        kernel_times.gpu, kernel_times.source, {name: kernel_times._tables[name] for name in names}
    )
    recurrence = operators(put(4).placement).recurrence
    assert not without.has_recurrence(recurrence)
    assert without.recurrence_s(np.array([1024.0]), recurrence) < kernel_times.recurrence_s(
        np.array([1024.0]), recurrence
    )
    on_a100 = placed(PlacementSpec(NAME, "a100-80g", 4)).step_time  # its tables have none
    assert not on_a100.fitted
    assert on_a100.model.step_s(0, 0, ((0, 2048),)) > put(4).step_time.model.step_s(
        0, 0, ((0, 2048),)
    )


def test_linear_attention_with_speculation_is_refused():
    with pytest.raises(SloBenchError, match="speculation with linear attention"):
        put(4, speculation="eagle:3@0.7")


@pytest.mark.parametrize(
    ("linear", "parameters", "state_bytes"),
    [
        # 100 columns: x and gate 2 * 8 * 16, B and C 2 * 2 * 4, dt 8; convolved: 128 + 16.
        (
            LinearAttention(1, 2, 8, 4, 16, 4, "mamba2", state_bits=16),
            100 * (144 + 128 + 8) + 128 * 100 + 144 * 4 + 144 + 3 * 8 + 128,
            8 * 16 * 4 * 2 + 144 * 3 * 2,
        ),
        # Queries, keys and values 3 * 128, rates 8; decay and gate through one head's 16.
        (
            LinearAttention(1, 8, 8, 16, 16, 4, "kda"),
            100 * (384 + 8 + 16 + 16) + 2 * 16 * 128 + 128 * 100 + 384 * 4 + 8 + 128 + 16,
            8 * 16 * 16 * 4 + 384 * 3 * 2,
        ),
        (
            LinearAttention(1, 8, 8, 16, 16, 4, "kda", full_gate=True),
            100 * (384 + 8 + 16 + 128) + 16 * 128 + 128 * 100 + 384 * 4 + 8 + 128 + 16,
            8 * 16 * 16 * 4 + 384 * 3 * 2,
        ),
        (
            LinearAttention(1, 8, 8, 16, 16, 1, "lightning"),
            100 * (384 + 128) + 128 * 100 + 128,
            8 * 16 * 16 * 4,
        ),
        # Two gates as wide as what is convolved over 3 tokens.
        (
            LinearAttention(1, 1, 1, 0, 100, 3, "convolution"),
            100 * 300 + 100 * 100 + 100 * 3,
            100 * 2 * 2,
        ),
    ],
)
def test_recurrences_have_the_parameters_and_states_counted_by_hand(
    linear, parameters, state_bytes
):
    assert linear.parameters(100) == parameters
    assert linear.state_bytes == state_bytes


def test_operators_of_linear_attention_multiply_its_parameters():
    for kind in ("gated-delta", "mamba2", "kda", "lightning", "convolution"):
        linear = LinearAttention(3, 8, 8, 16, 16, 4, kind)
        gemms, _ = layers._linear_operators(linear, 100, 1, "bf16")
        multiplied = sum(gemm.n * gemm.k * gemm.calls for gemm in gemms)
        assert multiplied == pytest.approx(3 * linear.parameters(100), rel=0.04), kind


@pytest.mark.parametrize("kind", ["mamba2", "kda", "lightning", "convolution"])
def test_other_recurrences_take_their_roofline_and_are_unfitted(kind):
    spec = replace(SPEC, linear=replace(SPEC.linear, key_heads=16, value_heads=16, kind=kind))
    place = replace(put(4).placement, model=spec)
    timed = operator_step_time(place)
    assert not timed.fitted
    assert "linear attention by its roofline" in timed.provenance
    single, many = (timed.model.step_s(n, 0, ()) for n in (1, 256))
    read_s = 255 * 2 * spec.state_bytes / 4 / place.gpu.bandwidth_bytes_per_s
    assert many - single > read_s


def test_parallel_state_space_and_attention_are_reduced_once():
    linear = replace(SPEC.linear, layers=48, kind="mamba2", beside_attention=True)
    spec = replace(SPEC, linear=linear)
    assert (spec.attention_layers, spec.linear.layers) == (48, 48)
    (reduce,) = operators(replace(put(4).placement, model=spec)).all_reduces
    assert reduce.calls == 48 + 48


def test_state_slots_take_at_most_half_of_the_room():
    """Where 256 states would not leave room for KV, fewer sequences run at once."""
    wide = replace(SPEC, linear=replace(SPEC.linear, value_dim=128 * 16))
    place = replace(put(4).placement, model=wide)
    room = place.usable_bytes_per_gpu - place.weight_bytes_per_gpu - place.memory_parts.total
    assert place.state_slots == int(room / 2 / (wide.state_bytes / 4)) < 256
    assert place.kv_tokens > 0
    assert put(4).placement.state_slots == 256


def test_no_more_requests_run_than_have_states():
    place = replace(put(4).placement, sampled_sequences=3)
    load = Workload(np.zeros(12), np.full(12, 100), np.full(12, 50))
    result = simulate(load, system("vllm"), place, put(4).step_time.model)
    begins, ends = result.records.first_token_s, result.records.finish_s
    running = max(int(((begins <= now_s) & (ends > now_s)).sum()) for now_s in begins)
    assert running == 3


def test_a_single_group_of_a_state_space_is_copied_to_all_gpus():
    """As vLLM does, which splits several groups evenly or not at all."""
    granite = replace(put(4).placement, model=model("granite-4.0-h-small"))
    granite.check_tp()
    falcon = replace(put(4).placement, model=model("falcon-h1-34b"))
    with pytest.raises(SloBenchError, match="2 key heads of linear attention, not divisible by"):
        falcon.check_tp()
