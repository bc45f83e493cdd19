"""Fields of published `config.json` files, read as the catalogue has the models."""

import json
from dataclasses import replace

import pytest

from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.predictors.model_spec import SparseAttention
from slo_bench.predictors.operators.assembly import operator_step_time
from slo_bench.predictors.operators.kernels import Kernels, kernels
from slo_bench.predictors.operators.layers import operators
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.workloads.errors import FileFormatError

SIGLIP = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "patch_size": 16,
    "spatial_merge_size": 2,
}
# The published file names neither heads nor the vocabulary.
GEMMA_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": SIGLIP,
}
GEMMA_12B = {
    "model_type": "gemma3",
    "text_config": {
        "_sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "head_dim": 256,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
        "max_position_embeddings": 131072,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "use_bidirectional_attention": False,
        "vocab_size": 262208,
    },
    "tie_word_embeddings": True,
    "vision_config": SIGLIP,
}
LLAMA_VISION = {
    "hidden_size": 1408,
    "intermediate_size": 5632,
    "num_channels": 3,
    "num_hidden_layers": 34,
    "patch_size": 14,
}
SCOUT_TEXT = {
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "head_dim": 128,
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
SCOUT = {"model_type": "llama4", "text_config": SCOUT_TEXT, "vision_config": LLAMA_VISION}
MAVERICK = {
    "model_type": "llama4",
    "text_config": SCOUT_TEXT
    | {
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "num_local_experts": 128,
    },
    "vision_config": LLAMA_VISION,
}
GLM_5 = {
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
QWEN_35B = {
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "text_config": {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": QWEN_VISION,
}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "text_config": {
        "attention_bias": False,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "is_encoder_decoder": False,
        "kv_lora_rank": 512,
        "max_position_embeddings": 262144,
        "model_type": "kimi_k2",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "group_size": 32,
                        "num_bits": 4,
                        "strategy": "group",
                        "type": "int",
                    },
                }
            },
            "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
            "quant_method": "compressed-tensors",
        },
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "vision_config": {
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": 1152,
        "mm_projector_type": "patchmerger",
        "patch_size": 14,
        "pos_emb_type": "divided_fixed",
        "text_hidden_size": 7168,
        "video_attn_type": "spatial_temporal",
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
    },
}
FILES = {
    "kimi-k2.5": KIMI,
    "gemma-3-4b": GEMMA_4B,
    "gemma-3-12b": GEMMA_12B,
    "llama-4-scout": SCOUT,
    "llama-4-maverick": MAVERICK,
    "glm-5": GLM_5,
    "qwen3.5-35b-a3b": QWEN_35B,
}
# Parameters by the models' cards and the checkpoints' indexes.
PARAMETERS = {
    "kimi-k2.5": 1_026_877_933_056,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "llama-4-scout": 109e9,
    "llama-4-maverick": 400e9,
    "deepseek-v3.2": 671e9,
    "glm-5": 744e9,
    "qwen3.5-35b-a3b": 35e9,
    "qwen3.5-397b-a17b": 397e9,
}


def read(folder, fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return model(str(folder))


@pytest.mark.parametrize("name", FILES)
def test_published_config_equals_the_catalogue_entry(tmp_path, name):
    catalogued = model(name)
    from_config = read(tmp_path / "model", FILES[name])
    assert replace(from_config, name=name, origin=catalogued.origin) == catalogued


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_published_configs(name):
    assert model(name).parameters == pytest.approx(PARAMETERS[name], rel=0.005)


def test_gemma_3_has_windows_in_five_of_six_layers():
    """Every sixth layer of 34 attends to all tokens; long windows have no room of their own."""
    spec = model("gemma-3-4b")
    assert (spec.window.tokens, spec.window.layers) == (1024, 34 - 5)
    assert spec.window_bytes() == 0
    assert spec.kv_bytes_per_token() == 34 * 2 * 4 * 256 * 2


def test_llama_4_has_chunked_and_expert_layers():
    """Every fourth layer has no rotary positions and attends to all tokens; of Maverick every
    second has experts.
    """
    scout, maverick = model("llama-4-scout"), model("llama-4-maverick")
    assert (scout.window.tokens, scout.window.layers) == (8192, 36)
    assert (scout.expert_layers, maverick.expert_layers) == (48, 24)
    assert scout.active_parameters == pytest.approx(17e9, rel=0.06)
    gemms = {gemm.name: gemm for gemm in operators(placed_on(maverick, 8)).gemms}
    assert (gemms["up_proj"].n, gemms["up_proj"].calls) == (2 * 16384 // 8, 24)
    assert (gemms["shared_up_proj"].n, gemms["shared_up_proj"].calls) == (2 * 8192 // 8, 24)


def placed_on(spec, tp):
    return placed(PlacementSpec(spec.name, "b200", tp, weight_dtype="fp8")).placement


def test_the_image_encoder_takes_memory_and_no_time():
    spec = model("gemma-3-27b")
    alone = replace(spec, image_encoder_parameters=0)
    encoder = 27 * (4 * 1152**2 + 2 * 1152 * 4304) + 1152 * (3 * 14**2 + 5376)
    assert spec.parameters - alone.parameters == encoder
    assert spec.weight_bytes() - alone.weight_bytes() == 2 * encoder
    assert spec.streamed_parameters == alone.streamed_parameters


def test_sparse_indexer_adds_projections_and_keys():
    """128 elements in FP8 and one scale of 4 bytes a token and layer; queries from their latent."""
    spec = model("glm-5")
    plain = replace(spec, sparse=None)
    each = 2048 * 32 * 128 + 6144 * (128 + 32)
    assert spec.parameters - plain.parameters == 78 * each
    assert plain.kv_bytes_per_token() == 78 * (512 + 64) * 2
    assert spec.kv_bytes_per_token() == 78 * ((512 + 64) * 2 + 128 + 4)
    listed = operators(placed_on(spec, 8))
    assert (listed.attention.window, listed.attention.window_calls) == (2048, 78)
    assert (listed.attention.calls, listed.indexer.calls) == (0, 78)
    assert listed.indexer.operations == 2 * 32 * 128
    names = {gemm.name: (gemm.n, gemm.k) for gemm in listed.gemms}
    assert names["index_q_proj"] == (32 * 128, 2048)  # on every GPU whole


def test_a_sparse_decode_hardly_grows_with_length():
    """Beyond 2,048 tokens only the indexer does: 132 bytes of a key and 8 of its score."""
    place = placed(PlacementSpec("deepseek-v3.2", "h200-141g", 8, weight_dtype="fp8"))
    dense = placed(PlacementSpec("deepseek-v3", "h200-141g", 8, weight_dtype="fp8"))

    def grows(deployed):
        step_s = deployed.step_time.model.step_s
        return step_s(32, 32 * 65_536, ()) - step_s(32, 32 * 8_192, ())

    read = 61 * 32 * (65_536 - 8_192) * 140
    assert grows(place) == pytest.approx(read / 0.8 / 4.8e12, rel=0.1)
    assert grows(place) < grows(dense)


def test_sparse_prefill_takes_the_measured_layer():
    """With what is counted apart, a layer takes the time of vLLM's module for long prompts."""
    spec = model("glm-5")

    def of_attention(tp, tokens, kv_dtype="bf16", gpu_name="h200-141g"):
        place = Placement(spec, gpu(gpu_name), tp=tp, weight_dtype="fp8", kv_dtype=kv_dtype)
        mixed = operator_step_time(place).model.tables[3]
        return mixed.seconds[list(mixed.chunk_tokens).index(tokens), 0, 0, 0]

    kernel_times = kernels(gpu("h200-141g"))
    heads = operators(Placement(spec, gpu("h200-141g"), tp=8)).attention
    tokens, layer_s = kernel_times.sparse_context(heads, "bf16")
    at_8192 = 78 * layer_s[list(tokens).index(8192)]
    assert 0.7 * at_8192 < of_attention(8, 8192) < at_8192  # the rest: its projections
    assert of_attention(8, 8192) < of_attention(8, 8192, kv_dtype="fp8")  # which is widened first
    assert of_attention(8, 8192, "fp8", "b200") < of_attention(8, 8192)
    assert of_attention(8, 1024) < of_attention(4, 1024)  # a short prompt attends to all its tokens
    assert spec.sparse.tokens == 2048


def test_sparse_heads_are_padded_on_hopper_without_a_measured_layer():
    """FlashMLA takes multiples of 64 heads: 8 of 64 on each of 8 GPUs cost what 64 do."""
    kernel_times = kernels(gpu("h200-141g"))
    names = {name for name in kernel_times._tables if not name.startswith("sparse_context/")}
    bare = Kernels(
        kernel_times.gpu, kernel_times.source, {name: kernel_times._tables[name] for name in names}
    )
    of_gpu = {tp: operators(Placement(model("glm-5"), gpu("h200-141g"), tp=tp)) for tp in (1, 4, 8)}
    assert bare.sparse_context(of_gpu[8].attention, "bf16") is None
    peak = kernel_times.gpu.flops_16bit
    a_query = 64 * 2 * 2048 * (2 * 512 + 64) / (640 / 989 * peak)
    for listed in of_gpu.values():
        assert bare.chosen_s(listed.attention, listed.indexer) == pytest.approx(a_query)
    assert kernels(gpu("b200")).chosen_s(of_gpu[8].attention, of_gpu[8].indexer) == 0


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (GLM_5 | {"indexer_types": ["shared"] * 78}, "no layer has an indexer"),
        (GLM_5 | {"index_n_heads": None}, "index_n_heads"),
        (GEMMA_4B | {"text_config": 3}, "'text_config' must be an object"),
        (GEMMA_4B | {"vision_config": {"depth": 3}}, "an image encoder .* 'hidden_size'"),
        (GEMMA_4B | {"vision_config": [1]}, "'vision_config' must be an object"),
        (GEMMA_4B | {"audio_config": {"hidden_size": 2}}, "audio encoder"),
        (
            GEMMA_4B | {"text_config": GEMMA_4B["text_config"] | {"num_kv_shared_layers": 2}},
            "KV shared between layers",
        ),
        (
            GEMMA_4B
            | {"text_config": GEMMA_4B["text_config"] | {"use_bidirectional_attention": True}},
            "attention to later tokens",
        ),
        (SCOUT | {"text_config": SCOUT_TEXT | {"moe_layers": [0] * 49}}, "49 of 48 layers"),
        (SCOUT | {"text_config": SCOUT_TEXT | {"no_rope_layers": 4}}, "no_rope_layers"),
        (SCOUT | {"text_config": SCOUT_TEXT | {"no_rope_layers": [1]}}, "no_rope_layers"),
    ],
)
def test_published_config_not_modelled_is_refused_by_name(tmp_path, fields, complaint):
    with pytest.raises(FileFormatError, match=complaint):
        read(tmp_path / "model", fields)


@pytest.mark.parametrize(
    ("changed", "indexers"),
    [
        ({"indexer_types": ["full", "full", "shared"] * 26}, 52),
        ({"index_topk_pattern": "FSSS" * 19 + "FF"}, 21),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 21),
        ({"index_topk_freq": 1}, 78),
    ],
)
def test_layers_that_share_indices_have_no_indexer(tmp_path, changed, indexers):
    """As vLLM 0.32 chooses them; each indexer keeps 132 bytes of a token."""
    spec = read(tmp_path / "model", GLM_5 | changed)
    assert spec.sparse_layers == indexers
    assert spec.kv_bytes_per_token() == 78 * 576 * 2 + indexers * 132
    assert operators(replace(placed_on(model("glm-5"), 8), model=spec)).indexer.calls == indexers


def test_a_llama_4_without_experts_is_dense(tmp_path):
    llama = read(tmp_path / "model", SCOUT | {"text_config": SCOUT_TEXT | {"moe_layers": []}})
    assert llama.experts is None
    assert llama.intermediate == 16384


def test_sparse_indexer_keys_have_a_scale_for_128_elements():
    assert SparseAttention(2048, 4, 128).key_bytes == 132
    assert SparseAttention(2048, 4, 160).key_bytes == 168


PLAIN = {
    "model_type": "acme",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("field", "complaint"),
    [
        ({"multi_query": True}, "'multi_query'"),
        ({"num_kv_heads": 2}, "'num_kv_heads'"),
        ({"use_cla": True}, "KV shared between layers"),
        ({"v_head_dim": 8}, "values of another width"),
        ({"mamba_dt_rank": 4}, "Mamba 1"),
        ({"total_ut_steps": 4}, "'total_ut_steps'"),
        ({"n_dense_first": 1}, "'n_dense_first'"),
    ],
)
def test_field_that_changes_sizes_and_is_not_read_is_refused(tmp_path, field, complaint):
    assert read(tmp_path / "plain", PLAIN).layers == 2
    with pytest.raises(FileFormatError, match=complaint):
        read(tmp_path / "model", PLAIN | field)
