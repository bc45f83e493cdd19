"""Mixtures of experts, latent attention and sliding windows: sizes, configurations, step times."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.harness.policies.systems import system
from slo_bench.harness.servers.server_kinds import server_kind
from slo_bench.predictors.model_spec import Experts, SlidingWindow
from slo_bench.predictors.operators.assembly import operator_step_time
from slo_bench.predictors.operators.kernels import SUSTAINED, kernels
from slo_bench.predictors.operators.layers import operators
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import FileFormatError, SloBenchError
from slo_bench.workloads.workload import Workload

# Billions of parameters, all and active, by the models' cards (Kimi: without its image encoder).
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37),
    "deepseek-r1": (671, 37),
    "kimi-k2.5": (1026, 32),
    "minimax-m2.5": (229, 10),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_expert_models_equal_published_ones(name):
    total, active = PUBLISHED[name]
    spec = model(name)
    assert spec.parameters / 1e9 == pytest.approx(total, rel=0.01)
    # Cards round, and some count the token embeddings that a token looks up.
    assert spec.active_parameters / 1e9 == pytest.approx(active, rel=0.09)


def test_latent_attention_keeps_one_kv_vector_a_layer():
    spec = model("deepseek-v3")
    assert spec.kv_bytes_per_token() == 61 * (512 + 64) * 2
    assert spec.kv_bytes_per_token("fp8") == 61 * (512 + 64)
    on_eight = Placement(spec, gpu("h200-141g"), tp=8, weight_dtype="fp8")
    assert on_eight.kv_bytes_per_token == 8 * spec.kv_bytes_per_token()  # a copy on each
    assert on_eight.block_bytes_per_gpu == 16 * 61 * 576 * 2


def test_sliding_layers_hold_kv_of_their_window():
    spec = model("gpt-oss-120b")
    layer = 2 * 8 * 64 * 2  # bytes a token: keys and values, heads, head size, bf16
    assert spec.kv_bytes_per_token() == 18 * layer
    assert spec.window_bytes() == 18 * 128 * layer
    hundred = Placement(spec, gpu("h200-141g"), weight_dtype="mxfp4", sampled_sequences=100)
    two_hundred = Placement(spec, gpu("h200-141g"), weight_dtype="mxfp4", sampled_sequences=200)
    logits = 100 * spec.vocab * 4 * 2
    added = two_hundred.reserve_bytes_per_gpu - hundred.reserve_bytes_per_gpu
    assert added == pytest.approx(logits + 100 * 18 * 128 * layer, abs=1)


def test_four_bit_formats_apply_to_experts_alone():
    spec = model("gpt-oss-120b")
    routed = 36 * 128 * 3 * 2880 * 2880
    assert spec.routed_parameters == routed
    expected = routed * (0.5 + 1 / 32) + (spec.parameters - routed) * 2
    assert spec.weight_bytes("mxfp4") == pytest.approx(expected, rel=1e-6)
    assert spec.weight_bytes("mxfp4") == pytest.approx(65.2e9, rel=0.01)  # of the checkpoint
    assert spec.dense_dtype("mxfp4") == "bf16"
    assert spec.dense_dtype("fp8") == "fp8"
    assert model("llama-3.1-8b").dense_dtype("int4") == "int4"


@pytest.mark.parametrize(("tokens", "skew", "ep"), [(1, 0, 1), (7, 0, 1), (40, 0, 4), (40, 1.2, 4)])
def test_distinct_experts_by_brute_force(tokens, skew, ep):
    experts = Experts(routed=32, per_token=4, intermediate=1)
    weight = np.arange(1, 33, dtype=float) ** -skew
    chosen = 4 * weight / weight.sum()  # probability that a token chooses each
    draw = np.random.default_rng(5)
    mine = np.arange(32) % ep == 0
    touched, load = [], []
    for _ in range(4000):
        hit = draw.random((tokens, 32)) < chosen
        touched.append((hit.any(axis=0) & mine).sum())
        load.append((hit & mine).sum() / (tokens * 4))
    assert experts.distinct(tokens, skew, ep) == pytest.approx(np.mean(touched), rel=0.02)
    if chosen.max() <= 1:
        assert experts.most_loaded_share(skew, ep) == pytest.approx(np.mean(load), rel=0.03)
    if not skew:
        assert experts.distinct(tokens, 0, ep) == pytest.approx(
            32 / ep * (1 - (1 - 4 / 32) ** tokens)
        )


CONFIGS = {
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
    },
    "minimax-m2.5": {
        "model_type": "minimax_m2",
        "num_hidden_layers": 62,
        "hidden_size": 3072,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "num_mtp_modules": 3,
        "shared_intermediate_size": 0,
        "vocab_size": 200064,
        "max_position_embeddings": 196608,
    },
}


def config(tmp_path, name, **changed):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], **changed}))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_equals_the_catalogue_entry(tmp_path, name):
    from_config, catalogued = model(config(tmp_path, name)), model(name)
    for field in (
        "parameters",
        "active_parameters",
        "experts",
        "latent",
        "window",
        "linear",
        "kv_heads",
    ):
        assert getattr(from_config, field) == getattr(catalogued, field), field
    assert from_config.kv_bytes_per_token() == catalogued.kv_bytes_per_token()


@pytest.mark.parametrize(
    ("name", "changed", "complaint"),
    [
        ("qwen3-30b-a3b", {"mlp_only_layers": 5}, "mlp_only_layers"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 200}, "200 experts a token of 128"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "linear attention"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3-30b-a3b", {"linear_num_value_heads": 32}, "linear_num_key_heads"),
        ("qwen3-next-80b-a3b", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3-next-80b-a3b", {"linear_num_value_heads": 24}, "multiple of the 16 key heads"),
        ("qwen3-next-80b-a3b", {"layer_types": ["full_attention"] * 48}, "0 of 48 layers"),
        ("gpt-oss-20b", {"sliding_window": None}, "sliding_window"),
        ("deepseek-v3", {"index_topk": 2048}, "index_n_heads"),
        ("deepseek-v3", {"first_k_dense_replace": 61}, "61 of 61 layers"),
        ("deepseek-v3", {"v_head_dim": None}, "v_head_dim"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "awq", "bits": [4]}}, "awq"),
        ("minimax-m2.5", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("qwen3-30b-a3b", {"engram_sparse_lookup": 4}, "engram_sparse_lookup"),
        ("qwen3-30b-a3b", {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
    ],
)
def test_config_fields_not_modelled_are_refused_by_name(tmp_path, name, changed, complaint):
    with pytest.raises(FileFormatError, match=complaint):
        model(config(tmp_path, name, **changed))


@pytest.mark.parametrize(
    ("changed", "dense_layers"),
    [
        ({"decoder_sparse_step": 2}, 24),
        ({"mlp_only_layers": [5, 7]}, 2),
        ({"moe_layer_freq": [0] * 3 + [1] * 45}, 3),
        ({"moe_layer_start_index": 4, "moe_layer_end_index": 40}, 11),
        ({"moe_layers_enum": "4,5,6,7"}, 44),
    ],
)
def test_layers_without_experts_are_counted_wherever_they_are(tmp_path, changed, dense_layers):
    assert model(config(tmp_path, "qwen3-30b-a3b", **changed)).experts.dense_layers == dense_layers


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "int4"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, "int4"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
            "fp8",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp4"}]}},
            "mxfp4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
        ),
    ],
)
def test_quantization_config_sets_the_weight_dtype(tmp_path, quantization, dtype):
    spec = model(config(tmp_path, "qwen3-30b-a3b", quantization_config=quantization))
    assert spec.checkpoint_dtype == dtype
    placed_by_default = Placement(spec, gpu("h200-141g"))
    assert placed_by_default.weight_dtype == dtype
    assert placed_by_default.weight_bytes_per_gpu == spec.weight_bytes(dtype)
    assert Placement(spec, gpu("h200-141g"), weight_dtype="bf16").weight_dtype == "bf16"


def test_quantisation_beside_the_config_is_read(tmp_path):
    folder = config(tmp_path, "qwen3-30b-a3b")
    side = (folder if folder.is_dir() else folder.parent) / "hf_quant_config.json"
    side.write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}')
    assert model(folder).checkpoint_dtype == "nvfp4"
    side.write_text('{"quantization": {"quant_algo": "W3A3"}}')
    with pytest.raises(FileFormatError, match="quantised by 'modelopt'"):
        model(folder)
    side.write_text('{"producer": {}}')
    with pytest.raises(FileFormatError, match=r"object 'quantization'.*hf_quant_config\.json"):
        model(folder)


SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("quantization", "kv"),
    [
        ({"quant_method": "fp8"}, "bf16"),
        ({"quant_method": "fp8", "kv_cache_scheme": None}, "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": SCHEME}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
                "kv_cache_scheme": SCHEME,
            },
            "fp8",
        ),
    ],
)
def test_kv_format_auto_is_the_one_that_the_checkpoint_has_scales_for(tmp_path, quantization, kv):
    spec = model(config(tmp_path, "qwen3-30b-a3b", quantization_config=quantization))
    assert spec.checkpoint_kv_dtype == kv
    assert Placement(spec, gpu("h200-141g")).kv_dtype == kv
    assert Placement(spec, gpu("h200-141g"), kv_dtype="bf16").kv_dtype == "bf16"
    settled = PlacementSpec(str(tmp_path / "qwen3-30b-a3b"), "h200-141g").settled
    assert settled.kv_dtype == kv


@pytest.mark.parametrize(
    "scheme",
    [{"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, {"kv_cache_quant_algo": "INT8"}],
)
def test_kv_formats_that_are_not_modelled_are_refused(tmp_path, scheme):
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"} | scheme
    with pytest.raises(FileFormatError, match=r"KV of the format '(FP4|INT8)'"):
        model(config(tmp_path, "qwen3-30b-a3b", quantization_config=quantization))


def mixed(of_attention, of_experts, of_shared):
    names = {
        "model.layers.0.self_attn.q_proj": of_attention,
        "model.layers.0.mlp.experts.7.up_proj": of_experts,
        "model.layers.0.mlp.shared_expert.up_proj": of_shared,
        "lm_head": of_experts,
    }
    layers = {name: {"quant_algo": algorithm} for name, algorithm in names.items() if algorithm}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }


def test_mixed_precision_keeps_a_format_for_experts_and_one_for_the_rest(tmp_path):
    """Weights by hand: experts at 0.5625 bytes, the other matrices at 1, the rest at 2."""
    quantization = mixed("FP8", "W4A16_NVFP4", "FP8")
    spec = model(config(tmp_path, "qwen3-30b-a3b", quantization_config=quantization))
    assert (spec.checkpoint_dtype, spec.checkpoint_beside_dtype) == ("nvfp4a16", "fp8")
    others = spec.matrix_parameters - spec.routed_parameters
    rest = spec.parameters - spec.matrix_parameters
    by_hand = 0.5625 * spec.routed_parameters + others + 2 * rest
    assert spec.weight_bytes("nvfp4a16") == pytest.approx(by_hand, abs=2)
    listed = operators(Placement(spec, gpu("h200-141g")))
    assert {gemm.dtype for gemm in listed.gemms if gemm.name in ("qkv_proj", "o_proj")} == {"fp8"}
    assert listed.experts.dtype == "nvfp4a16"
    assert spec.mixing_dtype("bf16") == "bf16"  # another format than the checkpoint's


def test_mixed_precision_of_a_dense_model_is_of_mlps_and_attention(tmp_path):
    groups = {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float"},
            "targets": ["re:.*self_attn.*"],
        },
        "group_1": {"weights": {"num_bits": 4, "type": "int"}, "targets": ["re:.*mlp.*"]},
    }
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    dense = {"num_experts": 0, "quantization_config": quantization}
    spec = model(config(tmp_path, "qwen3-30b-a3b", **dense))
    assert (spec.checkpoint_dtype, spec.checkpoint_beside_dtype) == ("int4", "fp8")
    attention = 48 * 2048 * (2 * 32 * 128 + 2 * 4 * 128)
    mlps = spec.matrix_parameters - attention
    rest = spec.parameters - spec.matrix_parameters
    by_hand = (0.5 + 20 / 8 / 128) * mlps + attention + 2 * rest
    assert spec.weight_bytes("int4") == pytest.approx(by_hand, abs=2)


@pytest.mark.parametrize(
    "quantization",
    [
        mixed("FP8", "W3A3", "FP8"),
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "type": "int"}, "targets": ["Linear"]},
                "group_1": {"weights": {"num_bits": 4, "type": "int"}, "targets": ["Conv"]},
            },
        },
    ],
)
def test_formats_that_cannot_be_told_apart_are_refused(tmp_path, quantization):
    with pytest.raises(FileFormatError, match="weights in several formats"):
        model(config(tmp_path, "qwen3-30b-a3b", quantization_config=quantization))


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 2}, 81920),  # of all positions, which the file has
        ({"rope_type": "linear", "factor": 2.0}, 81920),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 40960),
        ({"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096}, 40960),
        ({"mrope_section": [24, 20, 20]}, 40960),
    ],
)
def test_scaled_rotary_positions_set_the_context(tmp_path, scaling, tokens):
    spec = model(config(tmp_path, "qwen3-30b-a3b", rope_scaling=scaling))
    assert spec.context_tokens == tokens


@pytest.mark.parametrize("scaling", ["yarn", {"type": "yarn", "factor": "four"}])
def test_rotary_scaling_that_cannot_be_read_is_refused(tmp_path, scaling):
    with pytest.raises(FileFormatError, match="rope_scaling"):
        model(config(tmp_path, "qwen3-30b-a3b", rope_scaling=scaling))


def test_qwen2_has_sliding_windows_in_its_last_layers(tmp_path):
    sliding = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 40}
    spec = model(config(tmp_path, "qwen3-30b-a3b", **sliding))
    assert spec.window == SlidingWindow(4096, 8)


def test_operators_multiply_every_active_parameter():
    spec = model("deepseek-v3")
    listed = operators(Placement(spec, gpu("b200"), weight_dtype="fp8"))
    assert listed.experts is not None
    routed = 3 * 7168 * 2048 * 8 * listed.experts.calls
    gemms = sum(g.n * g.k * g.calls for g in (*listed.gemms, listed.head))
    assert gemms + routed == pytest.approx(spec.active_parameters, rel=1e-3)
    assert {g.name for g in listed.gemms} >= {"router", "shared_up_proj", "kv_b_proj", "up_proj"}


def test_norm_over_all_heads_adds_an_all_reduce():
    spec = model("minimax-m2.5")
    bytes_of = [
        r.bytes_per_token for r in operators(Placement(spec, gpu("b200"), tp=2)).all_reduces
    ]
    assert bytes_of == [3072 * 2, 8]


def test_experts_take_the_time_of_the_kernel_table():
    kernel_times = kernels(gpu("h200-141g"))
    spec = model("gpt-oss-120b")
    layer = operators(Placement(spec, gpu("h200-141g"), tp=2, weight_dtype="mxfp4")).experts
    # AIConfigurator h200_sxm/moe/vllm/0.24.0: w4a16_mxfp4, tp 2, power law 1.01 (µs). At the last
    # size arithmetic bounds them.
    times = kernel_times.experts_s(np.array([1.0, 64.0, 4096.0]), layer)
    assert times * 1e6 == pytest.approx([47, 293, SUSTAINED * 1363], rel=0.02)


def test_expert_imbalance_slows_several_gpus_and_saves_reads_on_one():
    spec, card = model("qwen3-30b-a3b"), gpu("h200-141g")

    def seconds(tokens: int, **settings: float) -> float:
        layer = operators(Placement(spec, card, tp=4, **settings)).experts
        return float(kernels(card).experts_s(np.array([float(tokens)]), layer)[0])

    assert seconds(16384, ep=4, expert_skew=1.0) > 1.2 * seconds(16384, ep=4)
    assert seconds(32, expert_skew=1.0) < seconds(32)


def test_sliding_and_latent_attention_cost_less_at_long_context():
    card = gpu("h200-141g")
    gpt = operator_step_time(
        Placement(model("gpt-oss-120b"), card, tp=2, weight_dtype="mxfp4")
    ).model
    full = dataclasses.replace(model("gpt-oss-120b"), window=None)
    whole = operator_step_time(Placement(full, card, tp=2, weight_dtype="mxfp4")).model
    assert gpt.step_s(64, 64 * 32768, ()) < whole.step_s(64, 64 * 32768, ())
    assert gpt.step_s(0, 0, ((16384, 2048),)) < whole.step_s(0, 0, ((16384, 2048),))
    assert gpt.step_s(4, 4 * 100, ()) == pytest.approx(whole.step_s(4, 4 * 100, ()), rel=0.02)


def test_step_times_come_from_operators_by_default():
    spec = PlacementSpec("qwen3-30b-a3b", "h200-141g", tp=2, ep=2)
    assert placed(spec).step_time.provenance.startswith("operators")
    with pytest.raises(SloBenchError, match="profile operators"):
        step_time(placed(spec).placement)


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("qwen3-30b-a3b", {"tp": 2, "ep": 4}, "ep 4 must divide tp 2"),
        ("llama-3.1-8b", {"tp": 2, "ep": 2}, "has no experts"),
        ("llama-3.1-8b", {"expert_skew": 1.0}, "has no experts"),
        ("qwen3-30b-a3b", {"expert_skew": -1.0}, "expert_skew must be at least 0"),
    ],
)
def test_impossible_expert_parallelism_is_refused(name, settings, complaint):
    with pytest.raises(SloBenchError, match=complaint):
        Placement(model(name), gpu("h200-141g"), **settings)


def test_parallel_args_of_expert_parallelism():
    assert server_kind("vllm").parallel_args(tp=4, ep=4) == [
        "--tensor-parallel-size",
        "4",
        "--enable-expert-parallel",
    ]
    assert server_kind("sglang").parallel_args(tp=4, pp=2, ep=2)[-4:] == [
        "--pp-size",
        "2",
        "--ep-size",
        "2",
    ]
    with pytest.raises(SloBenchError, match="ep must be 1 or 4, not 2"):
        server_kind("vllm").parallel_args(tp=4, ep=2)


def test_data_parallel_ranks_divide_experts_and_copy_the_rest():
    spec = model("deepseek-r1")
    single, eight = Placement(spec, gpu("b200")), Placement(spec, gpu("b200"), dp=8, ep=8)
    routed = spec.routed_weight_bytes("fp8")
    assert eight.gpus == 8
    assert single.weight_bytes_per_gpu - eight.weight_bytes_per_gpu == pytest.approx(routed * 7 / 8)
    # Each rank holds its own tokens' latent vectors; over tp every GPU holds a copy of all.
    assert eight.kv_bytes_per_token == spec.kv_bytes_per_token()
    copied = Placement(spec, gpu("b200"), tp=8, ep=8)
    room = eight.usable_bytes_per_gpu - eight.weight_bytes_per_gpu - eight.reserve_bytes_per_gpu
    assert eight.kv_tokens == pytest.approx(8 * room / spec.kv_bytes_per_token(), rel=1e-3)
    assert eight.kv_tokens > 5 * copied.kv_tokens


def test_data_parallel_rank_times_its_own_tokens_and_all_experts():
    place = Placement(model("deepseek-r1"), gpu("b200"), dp=8, ep=8)
    timed = operator_step_time(place).model
    kernel_times, listed = kernels(place.gpu), operators(place)
    long, short = timed.step_s(0, 0, [(0, 4096)]), timed.step_s(0, 0, [(0, 512)] * 8)
    tokens = np.array([4096.0, 512.0])
    dense = sum(
        g.calls * kernel_times.sustained_gemm_s(tokens, g.n, g.k, g.dtype) for g in listed.gemms
    )
    assert long - short > dense[0] - dense[1] > 0  # one rank has a prompt, or all have an eighth
    # Tokens move to experts and back in an all-gather and a reduce-scatter.
    moved = 7168 * 2 * np.array([128.0])
    exchange_s = kernel_times.exchange_s(8, moved, place.peer_link)[0]
    bytes_ = kernel_times._tables["all_gather/bytes"].astype(float)
    row = list(kernel_times._tables["all_gather/gpus"]).index(8)
    near = bytes_.searchsorted(moved[0])
    each = [
        2 ** float(kernel_times._tables[f"{name}/time"][row][near]) * 1e-6
        for name in ("all_gather", "reduce_scatter")
    ]
    assert exchange_s == pytest.approx(sum(each), rel=0.1)
    spans = sum(timed.step_s(100, 50_000 + 100 * i, []) for i in range(40))
    assert timed.span_s(100, 50_000, 40) == pytest.approx(spans)
    assert timed.steps_within(100, 50_000, spans * 0.9999) == 40


def test_batch_limits_hold_for_each_data_parallel_rank():
    workload = Workload(np.zeros(64), np.full(64, 64), np.full(64, 50))
    place = Placement(model("qwen3-30b-a3b"), gpu("h200-141g"), dp=2, ep=2)
    alone = dataclasses.replace(place, dp=1, ep=1)
    served = system("vllm").with_parameters(max_num_seqs=16)
    batch_peaks = {}
    for name, where in (("one", alone), ("two", place)):
        records = simulate(workload, served, where, operator_step_time(where).model).records
        first = np.sort(records.first_token_s)
        batch_peaks[name] = int((first < records.finish_s.min()).sum())
    assert batch_peaks == {"one": 16, "two": 32}


def test_parallel_args_of_data_parallelism():
    assert server_kind("vllm").parallel_args(tp=2, ep=8, dp=4) == [
        *("--tensor-parallel-size", "2", "--data-parallel-size", "4", "--enable-expert-parallel")
    ]
    assert server_kind("sglang").parallel_args(ep=8, dp=8) == [
        *("--tp-size", "8", "--dp-size", "8", "--enable-dp-attention", "--ep-size", "8")
    ]


def test_data_parallelism_of_a_dense_model_is_refused():
    with pytest.raises(SloBenchError, match="no experts"):
        Placement(model("llama-3.1-8b"), gpu("h100-80g"), dp=2)
