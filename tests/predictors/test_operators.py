"""Step times from operators: kernel tables, their interpolation, the assembled model."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from slo_bench.predictors.operators.assembly import (
    EAGER_KERNEL_S,
    _with_kernel,
    operator_step_time,
)
from slo_bench.predictors.operators.kernels import _experts_roofline, has_tables, kernels
from slo_bench.predictors.operators.layers import Attention, operators
from slo_bench.predictors.operators.server_version import ServerVersion
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, link, model
from slo_bench.workloads.errors import SloBenchError, UnknownNameError

SHARED = Path(os.environ.get("SLO_BENCH_SHARED", Path(__file__).parents[3] / "shared" / "data"))
DATABASE = SHARED / "profiles" / "aiconfigurator-db"
LLAMA = model("llama-3.1-8b")
SYNCHRONOUS, AHEAD = ServerVersion(version="0.13"), ServerVersion(version="0.14")
SGLANG = ServerVersion.parse("sglang")


def placed(tp: int = 1, gpu_name: str = "h100-80g", **settings: str) -> Placement:
    return Placement(LLAMA, gpu(gpu_name), tp=tp, **settings)


def test_gemm_shapes_are_those_of_the_model():
    listed = operators(placed(2))
    shapes = {gemm.name: (gemm.n, gemm.k, gemm.calls) for gemm in listed.gemms}
    assert shapes == {
        "qkv_proj": (2048 + 2 * 512, 4096, 32),
        "o_proj": (4096, 2048, 32),
        "up_proj": (14336, 4096, 32),
        "down_proj": (4096, 7168, 32),
    }
    assert (listed.head.n, listed.attention.heads, listed.attention.kv_heads) == (64128, 16, 4)
    assert [reduce.calls for reduce in listed.all_reduces] == [64]
    assert operators(placed()).all_reduces == ()
    parameters = sum(gemm.n * gemm.k * gemm.calls for gemm in operators(placed()).gemms)
    assert parameters == LLAMA.layers * LLAMA.layer_matrix_parameters


def test_quantise_operator_appears_for_fp8_only():
    names = {small.name for small in operators(placed(weight_dtype="fp8")).small}
    assert names - {small.name for small in operators(placed()).small} == {"quantise"}


@pytest.mark.skipif(not DATABASE.is_dir(), reason=f"no {DATABASE}; SLO_BENCH_SHARED names it")
def test_packed_kernel_times_equal_those_of_the_database():
    import pandas as pd

    frame = pd.read_parquet(DATABASE / "h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet")
    kernel_times = kernels(gpu("h100-80g"))
    for m, n, k, dtype in ((1, 8192, 8192, "bfloat16"), (2048, 4096, 4096, "bfloat16")):
        rows = frame[(frame.m == m) & (frame.n == n) & (frame.k == k) & (frame.gemm_dtype == dtype)]
        packed_s = float(kernel_times.gemm_s(np.array([float(m)]), n, k, "bf16")[0])
        assert packed_s == pytest.approx(rows.latency.min() * 1e-3, rel=0.01)
    attention = pd.read_parquet(
        DATABASE / "h100_sxm/attention/vllm/0.24.0/generation_attention_perf.parquet"
    )
    rows = attention[
        (attention.num_heads == 32)
        & (attention.num_key_value_heads == 8)
        & (attention.head_dim == 128)
        & (attention.kv_cache_dtype == "bfloat16")
        & (attention.window_size == 0)
        & (attention.batch_size == 16)
        & (attention.step == 4095)
    ]
    batch, length, seconds = kernel_times.generation_s(Attention(32, 8, 128, 1), "bf16")
    index = (int(np.flatnonzero(batch == 16)[0]), int(np.flatnonzero(length == 4096)[0]))
    assert seconds[index] == pytest.approx(rows.latency.min() * 1e-3, rel=0.01)


def test_gemm_time_between_shapes_is_between_their_times():
    kernel_times = kernels(gpu("h100-80g"))
    tokens = np.array([16.0, 4096.0])
    small, middle, large = (
        kernel_times.gemm_s(tokens, n, 8192, "bf16") for n in (8192, 9000, 10240)
    )
    assert (small < middle).all()
    assert (middle < large).all()


def test_gemm_time_grows_with_tokens():
    for name in ("h100-80g", "b200", "l40s"):
        kernel_times = kernels(gpu(name))
        tokens = kernel_times.gemm_tokens("fp8")
        seconds = kernel_times.gemm_s(tokens, 8192, 8192, "fp8")
        later = np.minimum.accumulate(seconds[::-1])[::-1]
        assert (seconds <= 1.26 * later).all(), name


def test_all_reduce_time_grows_with_its_message():
    kernel_times = kernels(gpu("b200"))
    sizes = np.geomspace(1024, 1e9, 60)
    seconds = kernel_times.all_reduce_s(8, sizes, link("nvlink5"))
    assert (np.diff(seconds) >= 0).all()


def test_a_gpu_without_tables_scales_the_nearest_ones():
    assert not has_tables("rtx-4090")
    kernel_times = kernels(gpu("h200-141g"), without=("h200-141g",))
    assert kernel_times.source == "h100-80g_vllm"
    single_token = np.array([1.0])
    scaled = kernel_times.gemm_s(single_token, 16384, 16384, "bf16") / kernels(
        gpu("h100-80g")
    ).gemm_s(single_token, 16384, 16384, "bf16")
    assert scaled[0] == pytest.approx(3350 / 4800, rel=0.02)  # reading the weights


def test_decode_steps_grow_with_sequences_and_kv_and_spans_add_up():
    timed = operator_step_time(placed()).model
    assert timed.step_s(32, 32 * 2000, ()) > timed.step_s(32, 32 * 500, ())
    assert timed.step_s(64, 64 * 500, ()) > timed.step_s(8, 8 * 500, ())
    steps = sum(timed.step_s(8, 8 * (100 + i), ()) for i in range(50))
    assert timed.span_s(8, 800, 50) == pytest.approx(steps)
    assert timed.step_s(8, 800, [(0, 1024)]) > timed.step_s(8, 800, ())
    assert timed.step_s(0, 0, [(8192, 512)]) > timed.step_s(0, 0, [(0, 512)])


def test_tensor_parallel_step_pays_its_all_reduce():
    alone, two = (operator_step_time(placed(tp)).model for tp in (1, 2))
    whole, half = alone.step_s(0, 0, [(0, 8192)]), two.step_s(0, 0, [(0, 8192)])
    assert whole / 2 < half < whole


def test_async_scheduling_hides_host_time():
    plain = operator_step_time(placed(), SYNCHRONOUS).model.step_s(1, 100, ())
    ahead = operator_step_time(placed(), AHEAD).model.step_s(1, 100, ())
    assert plain - ahead == pytest.approx(1.3e-3 + 20e-6, rel=0.01)


def test_sglang_launches_prompts_kernel_by_kernel():
    """A short prompt takes as long as its launches, a long one longer, a decode step less."""
    deepseek = Placement(model("deepseek-v3"), gpu("h200-141g"), tp=8, weight_dtype="fp8")
    timed = operator_step_time(deepseek, SGLANG).model
    # Its shared expert is one of the routed ones: two multiplications with their quantisation and
    # an activation less in each of 58 layers.
    launches = operators(deepseek).launches - 58 * 5
    assert timed.host.prefill_s == pytest.approx(launches * EAGER_KERNEL_S)
    assert timed.step_s(0, 0, [(0, 16)]) == timed.step_s(4, 4096, [(0, 64)]) == timed.host.prefill_s
    assert timed.step_s(0, 0, [(0, 8192)]) > timed.host.prefill_s > timed.step_s(4, 4096, ())
    assert operator_step_time(deepseek, AHEAD).model.host.prefill_s == 0


def test_shared_expert_is_separate_under_expert_parallelism():
    """DeepSeek-V3's shared expert is fused where tensor parallelism alone splits experts."""
    step_s = {}
    for ep in (1, 8):
        place = Placement(model("deepseek-v3"), gpu("h200-141g"), tp=8, ep=ep, weight_dtype="fp8")
        timed = [operator_step_time(place, server).model for server in (SGLANG, AHEAD)]
        step_s[ep] = [model.host.prefill_s for model in timed]
    assert step_s[1][0] < step_s[8][0]


def test_expert_kernel_setting_changes_prefill_time():
    """Triton on B200 takes longer than TensorRT-LLM's kernels, Marlin longer with long prompts;
    a kernel that was not measured changes nothing.
    """

    def prompt_s(name: str, weights: str, gpu_name: str, kernel: str) -> float:
        place = Placement(model(name), gpu(gpu_name), tp=2, weight_dtype=weights)
        timed = operator_step_time(place, AHEAD, experts_kernel=kernel).model
        return timed.step_s(0, 0, ((0, 8192),))

    default_s, triton, unknown = (
        prompt_s("minimax-m2.5", "fp8", "b200", kernel) for kernel in ("", "triton", "marlin")
    )
    assert 1.2 * default_s < triton < 2 * default_s
    assert unknown == default_s
    default_s, marlin = (prompt_s("gpt-oss-120b", "mxfp4", "h200-141g", k) for k in ("", "marlin"))
    assert 1.2 * default_s < marlin < 2 * default_s


def test_marlin_kernel_pads_its_matrices():
    """gpt-oss-120b with tp 8: 2,880 x 360 become 3,072 x 384."""
    place = Placement(model("gpt-oss-120b"), gpu("h100-80g"), tp=8, weight_dtype="mxfp4")
    layer = operators(place).experts
    padded = _with_kernel(layer, "marlin")
    assert (padded.hidden, padded.experts.intermediate, padded.kernel) == (3072, 3072, "marlin")
    assert _with_kernel(layer, "triton") == dataclasses.replace(layer, kernel="triton")


def test_experts_of_another_number_scale_by_tokens_per_expert():
    """The table's own shape keeps its times; with twice the experts they are those of half the
    tokens, in proportion to the roofline.
    """
    place = Placement(model("minimax-m2.5"), gpu("h100-80g"), tp=4, weight_dtype="fp8")
    kernel_times, layer = kernels(place.gpu), operators(place).experts
    tokens = np.array([64.0, 512.0, 4096.0])
    twice = dataclasses.replace(layer.experts, routed=2 * layer.experts.routed)
    other = dataclasses.replace(layer, experts=twice)
    ratio = kernel_times.experts_s(tokens, layer) / _experts_roofline(
        kernel_times._own, tokens, layer
    )
    later = kernel_times.experts_s(2 * tokens, other) / _experts_roofline(
        kernel_times._own, 2 * tokens, other
    )
    assert later == pytest.approx(ratio, rel=0.08)  # but for what arithmetic slows


def test_operator_step_time_refuses_unknown_engines_and_encoders():
    with pytest.raises(UnknownNameError, match="engine"):
        operator_step_time(placed(), ServerVersion("vlm"))
    encoder = dataclasses.replace(placed(), model=model("bge-m3"))
    with pytest.raises(SloBenchError, match="encoder"):
        operator_step_time(encoder)


def test_gemm_time_is_longer_under_load():
    tokens = np.array([8.0, 8192.0])
    for name in ("h100-80g", "a100-80g"):
        kernel_times = kernels(gpu(name))
        sustained, alone = (
            gemm_time(tokens, 8192, 8192, "bf16")
            for gemm_time in (kernel_times.sustained_gemm_s, kernel_times.gemm_s)
        )
        assert sustained / alone == pytest.approx([1.0, 1.07])


def mixed_attention_s(gpu_name, server=AHEAD, **settings):
    """Seconds that 32 sequences with 4,096 tokens add to the attention of a prompt of 1,024."""
    mixed = operator_step_time(placed(1, gpu_name, **settings), server).model.tables.mixed
    chunk = list(mixed.chunk_tokens).index(1024)
    sequences, kv = list(mixed.sequences).index(32), list(mixed.kv_tokens).index(4096)
    return mixed.seconds[chunk, 0, sequences, kv] - mixed.seconds[chunk, 0, 0, kv]


def test_decoding_sequence_beside_a_prompt_takes_a_tile_of_flash_attention_2():
    """64 rows of a prompt; on Hopper, in other engines and formats what it takes alone."""
    decode = operator_step_time(placed(1, "a100-80g")).model.tables.decode
    alone_s = decode.seconds[list(decode.sequences).index(32), list(decode.kv_tokens).index(4096)]
    attention = operators(placed(1, "a100-80g")).attention
    tokens, seconds = kernels(gpu("a100-80g")).context_s(attention, "bf16")
    pair_s = 1.07 * np.polyfit(0.5 * tokens[-3:] ** 2, seconds[-3:], 1)[0]
    tiles_s = LLAMA.layers * 32 * 4096 * 64 * pair_s
    assert mixed_attention_s("a100-80g") == pytest.approx(tiles_s)
    assert tiles_s > 1.3 * alone_s
    assert mixed_attention_s("a100-80g", ServerVersion(version="0.7")) == pytest.approx(alone_s)
    assert mixed_attention_s("a100-80g", kv_dtype="fp8") == pytest.approx(alone_s)
    for gpu_name in ("h100-80g", "b200"):
        later, before = (
            mixed_attention_s(gpu_name, ServerVersion(version=v)) for v in ("0.19", "0.7")
        )
        assert later == before


MIXED_STEPS = SHARED / "profiles/llmservingsim/RTXPRO6000-Llama-3.1-8B-bf16-tp1/attention.csv"


@pytest.mark.skipif(
    not MIXED_STEPS.is_file(), reason=f"no {MIXED_STEPS}; SLO_BENCH_SHARED names it"
)
def test_decoding_sequence_beside_a_prompt_takes_what_was_measured():
    import pandas as pd

    keys = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
    measured = pd.read_csv(MIXED_STEPS).set_index(keys)["time_us"]
    extra_s = LLAMA.layers * 1e-6 * (measured[1024, 0, 32, 4096] - measured[1024, 0, 0, 0])
    assert mixed_attention_s("rtx-pro-6000") == pytest.approx(extra_s, rel=0.3)
    assert mixed_attention_s("rtx-pro-6000", SGLANG) < 0.8 * extra_s


def test_heads_of_a_size_without_tables_are_scaled():
    """A100 has tables of heads of 128 alone: those of 64 read half of their KV."""
    llama = Attention(heads=32, kv_heads=8, head_dim=128, calls=1)
    kernel_times = kernels(gpu("a100-80g"))
    _, _, whole = kernel_times.generation_s(llama, "bf16")
    _, _, half = kernel_times.generation_s(dataclasses.replace(llama, head_dim=64), "bf16")
    ratios = (half / whole)[np.isfinite(whole)]
    assert ratios.max() <= 1.0
    assert ratios.min() == pytest.approx(0.5, rel=0.05)
