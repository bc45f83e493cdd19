import json

import pytest

from slo_bench.predictors import specs
from slo_bench.predictors.dtypes import weight_dtype
from slo_bench.workloads.errors import FileFormatError, SloBenchError, UnknownNameError

PUBLISHED_PARAMETERS = {
    "llama-7b": 6.74e9,
    "llama-13b": 13.02e9,
    "llama-33b": 32.53e9,
    "llama-2-7b": 6.74e9,
    "llama-2-13b": 13.02e9,
    "llama-2-70b": 68.98e9,
    "llama-3-8b": 8.03e9,
    "llama-3-70b": 70.55e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.55e9,
    "llama-3.2-1b": 1.236e9,
    "llama-3.2-3b": 3.213e9,
    "opt-1.3b": 1.316e9,
    "opt-6.7b": 6.66e9,
    "opt-13b": 12.85e9,
    "opt-30b": 29.97e9,
    "opt-66b": 65.72e9,
    "mistral-7b": 7.24e9,
    "qwen-14b": 14.17e9,
    "qwen2.5-1.5b": 1.544e9,
    "qwen2.5-7b": 7.616e9,
    "qwen2.5-14b": 14.77e9,
    "qwen3-8b": 8.19e9,
    "qwen3-14b": 14.77e9,
    "qwen3-32b": 32.76e9,
    "chatglm-6b": 6.17e9,
    "chatglm2-6b": 6.24e9,
    "chatglm3-6b": 6.24e9,
    "glm-4-9b": 9.40e9,
    "bge-m3": 0.568e9,
    "e5-large": 0.335e9,
    "gte-large": 0.335e9,
}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def own_catalogue(monkeypatch, tmp_path):
    """No catalogue of the person who runs the tests takes part."""
    monkeypatch.delenv("SLO_BENCH_CATALOGUE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def folder(tmp_path):
    """Writes a config.json into a model folder."""

    def write(**fields):
        path = tmp_path / "my-model"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(fields))
        return path

    return write


@pytest.mark.parametrize(("name", "published"), PUBLISHED_PARAMETERS.items())
def test_parameters_of_models_equal_published_ones(name, published):
    assert specs.model(name).parameters == pytest.approx(published, rel=0.01)


def test_llama_3_8b_to_the_last_parameter():
    assert specs.model("llama-3-8b").parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama-3-8b", 131_072),  # 2 * 32 layers * 8 heads * 128 * 2 bytes
        ("llama-2-7b", 524_288),
        ("opt-13b", 819_200),
        ("qwen-14b", 819_200),
        ("chatglm2-6b", 28_672),
        ("qwen3-32b", 262_144),
        ("bge-m3", 0),
    ],
)
def test_kv_bytes_of_a_token(name, kv_bytes):
    assert specs.model(name).kv_bytes_per_token() == kv_bytes
    assert specs.model(name).kv_bytes_per_token("fp8") * 2 == kv_bytes


def test_quantised_weights_shrink_matrices_only():
    model = specs.model("llama-3-8b")
    matrices = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    rest = model.parameters - matrices
    assert model.weight_bytes("bf16") == 2 * model.parameters
    assert model.weight_bytes("fp8") == matrices + 2 * rest
    # 4 bits a weight, and for each 128 of them a 16-bit scale and a 4-bit zero point.
    assert model.weight_bytes("int4") == matrices // 2 + matrices // 128 * 5 // 2 + 2 * rest
    assert weight_dtype("int4").compute_bits == 16


def test_streamed_parameters_leave_out_embeddings():
    llama, tied = specs.model("llama-3-8b"), specs.model("llama-3.2-1b")
    assert llama.streamed_parameters == llama.parameters - 128256 * 4096
    assert tied.streamed_parameters == tied.parameters


def test_catalogue_entries_are_read_and_have_an_origin():
    entries = [*specs.gpus().values(), *specs.links().values(), *specs.models().values()]
    assert len(entries) > 60
    assert all(entry.origin for entry in entries)
    assert all(spec.memory_bytes > 10 * specs.GIB for spec in specs.gpus().values())


def test_catalogue_figures_of_a100():
    gpu = specs.gpu("a100-80g")
    assert gpu.bandwidth_bytes_per_s == 2.039e12
    assert gpu.flops(16) == 312e12
    assert gpu.flops(8) == 312e12  # no FP8 units: computed at 16 bits
    assert specs.gpu("h100-80g").flops(8) == 1979e12


@pytest.mark.parametrize(
    ("look_up", "wrong", "hint"),
    [
        (specs.gpu, "a100-80gb", "did you mean a100-80g"),
        (specs.link, "nvlnk3", "nvlink3"),
        (specs.model, "llama3-8b", "llama-3-8b"),
    ],
)
def test_unknown_catalogue_name_is_refused_with_a_suggestion(look_up, wrong, hint):
    with pytest.raises(UnknownNameError, match=hint):
        look_up(wrong)


def test_power_cap_slows_compute_and_keeps_bandwidth():
    full, half = specs.gpu("rtx-3090"), specs.gpu("rtx-3090@192.5w")
    # Idle is 35 W; 192.5 W leaves half of the rest, and the clock falls with its cube root.
    assert half.flops_16bit == pytest.approx(full.flops_16bit * 0.5 ** (1 / 3))
    assert half.bandwidth_bytes_per_s == full.bandwidth_bytes_per_s
    assert half.name == "rtx-3090@192.5w"
    assert "estimate" in half.origin
    assert specs.gpu("rtx-3090@350w").flops_16bit == full.flops_16bit


@pytest.mark.parametrize("name", ["rtx-3090@20w", "rtx-3090@500w", "rtx-3090@lots", "rtx-3090@"])
def test_impossible_power_caps_are_refused(name):
    with pytest.raises(SloBenchError, match="power cap"):
        specs.gpu(name)


def test_model_folder_equals_the_catalogue_entry(folder):
    path = folder(**LLAMA)
    for source in (path, str(path), path / "config.json", str(path / "config.json")):
        model = specs.model(source)
        assert model.parameters == specs.model("llama-3-8b").parameters
        assert model.name == "my-model"


def test_chatglm2_config_is_read(folder):
    model = specs.model(
        folder(
            model_type="chatglm",
            num_layers=28,
            hidden_size=4096,
            num_attention_heads=32,
            kv_channels=128,
            multi_query_attention=True,
            multi_query_group_num=2,
            ffn_hidden_size=13696,
            padded_vocab_size=65024,
            seq_length=32768,
        )
    )
    assert model.parameters == specs.model("chatglm2-6b").parameters
    assert model.kv_bytes_per_token() == 28_672


def test_first_qwen_config_counts_both_halves_of_its_mlp(folder):
    model = specs.model(
        folder(
            model_type="qwen",
            num_hidden_layers=40,
            hidden_size=5120,
            num_attention_heads=40,
            kv_channels=128,
            intermediate_size=27392,
            vocab_size=152064,
            seq_length=8192,
            tie_word_embeddings=False,
        )
    )
    assert model.parameters == specs.model("qwen-14b").parameters


def test_opt_config_is_read(folder):
    model = specs.model(
        folder(
            model_type="opt",
            num_hidden_layers=40,
            hidden_size=5120,
            num_attention_heads=40,
            ffn_dim=20480,
            vocab_size=50272,
            max_position_embeddings=2048,
            word_embed_proj_dim=5120,
        )
    )
    assert model.parameters == specs.model("opt-13b").parameters


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_experts_per_tok.*is missing"),
        ({"cross_attention_layers": [3, 8]}, "'cross_attention_layers' .* not known"),
        ({"n_routed_experts": 256}, "num_experts_per_tok.* is missing"),
        ({"model_type": "acme", "hidden_act": "gelu"}, "'gelu' does not say whether .* a gate"),
        ({"model_type": "acme", "architectures": ["AcmeForCTC"]}, "'AcmeForCTC'.*no decoder"),
        ({"model_type": "acme", "type_vocab_size": 2}, "token types.*'type_vocab_size'"),
        ({"num_lookahead_slots": 1}, "speculative decoding.*not modelled yet"),
        ({"model_type": "medusa"}, "speculative decoding.*not modelled yet"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim.*is missing"),
        ({"model_type": "mamba", "num_attention_heads": None}, "'num_attention_heads' is missing"),
        ({"layer_types": ["mamba"] * 32}, "of which no field gives the sizes"),
        ({"layer_types": ["mamba"] * 32, "mamba_d_state": 16}, "Mamba 1"),
        ({"layer_types": ["lstm"] * 32}, "layers of lstm .field 'layer_types'"),
        ({"hidden_size": "4096"}, "'hidden_size' must be a whole number.*config.json"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a whole number"),
        ({"num_hidden_layers": 10**12}, "layers are more than the 10,000"),
        ({"layer_types": ["full_attention"] * 10_001}, "names 10,001 layers, more than"),
        ({"torch_dtype": "float7"}, "field 'torch_dtype' is no number format: 'float7'"),
        ({"dtype": ["float32"]}, "field 'dtype' is no number format"),
        ({"vocab_size": None}, "'vocab_size' is missing.*config.json"),
        ({"num_key_value_heads": 5}, "multiple of the 5 KV heads"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' must be true or false"),
    ],
)
def test_unsupported_model_configs_are_refused(folder, fields, complaint):
    with pytest.raises(FileFormatError, match=complaint):
        specs.model(folder(**{**LLAMA, **fields}))


def test_expert_fields_of_a_dense_config_are_accepted(folder):
    path = folder(**LLAMA, num_experts=0, num_local_experts=1)
    assert specs.model(path).layers == 32


def test_byte_order_mark_of_a_config_is_ignored(folder):
    file = folder(**LLAMA) / "config.json"
    file.write_text("\ufeff" + file.read_text("utf-8"), "utf-8")
    assert specs.model(str(file.parent)).layers == 32


def test_file_that_is_no_config_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match="no such file"):
        specs.model(tmp_path)
    bad = tmp_path / "bad.json"
    bad.write_text('{"a": 1,\n oops}')
    with pytest.raises(FileFormatError, match=r"not JSON.*bad\.json, line 2"):
        specs.model(str(bad))
    bad.write_text("[]")
    with pytest.raises(FileFormatError, match="JSON object"):
        specs.model(str(bad))


def test_user_catalogue_changes_and_adds_entries(tmp_path, monkeypatch):
    file = tmp_path / "mine.toml"
    file.write_text(
        "[gpus.a100-80g]\nprice_per_hour_usd = 1.25\n"
        "[links.mine]\nbandwidth_gb_per_s = 3\nlatency_us = 7\n"
        "[models.tiny]\nfamily = 'llama'\nlayers = 2\nhidden = 64\nheads = 4\n"
        "intermediate = 128\nvocab = 100\ncontext_tokens = 512\n"
    )
    for target in (file, tmp_path):
        monkeypatch.setenv("SLO_BENCH_CATALOGUE", str(target))
        assert specs.gpu("a100-80g").price_per_hour_usd == 1.25
        assert specs.gpu("a100-80g").flops_16bit == 312e12
        assert specs.link("mine").transfer_s(3e9) == pytest.approx(1 + 7e-6)
        assert specs.model("tiny").kv_heads == 4


def test_user_catalogue_is_found_in_the_configuration_folder(tmp_path):
    home = tmp_path / "config" / "slo-bench"
    home.mkdir(parents=True)
    (home / "prices.toml").write_text("[gpus.l4]\nprice_per_hour_usd = 0.1\n")
    assert specs.gpu("l4").price_per_hour_usd == 0.1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gpus.mine]\nmemory_gib = 1\n", r"gpus\.mine.*'bandwidth_gb_per_s' is missing.*u\.toml"),
        ("[gpus.l4]\nmemory_gib = -1\n", "'memory_gib' must be a number from 0 on but is -1"),
        ("[gpus.l4]\nmemory_gb = 1\n", "unknown field 'memory_gb'"),
        ("[gpus.l4]\npeer_link = 'wire'\n", "'peer_link' names no link: 'wire'; known: .*nvlink3"),
        ("[cpus.l4]\nx = 1\n", r"unknown table \[cpus\]; use \[gpus\.NAME\]"),
        ("gpus = 3\n", "must hold tables"),
        ("[gpus\n", "not TOML"),
    ],
)
def test_user_catalogue_with_an_error_is_refused(tmp_path, monkeypatch, text, complaint):
    file = tmp_path / "u.toml"
    file.write_text(text)
    monkeypatch.setenv("SLO_BENCH_CATALOGUE", str(file))
    with pytest.raises(FileFormatError, match=complaint):
        specs.gpus()


def test_missing_user_catalogue_is_refused(monkeypatch):
    monkeypatch.setenv("SLO_BENCH_CATALOGUE", "nowhere/at/all")
    with pytest.raises(SloBenchError, match="SLO_BENCH_CATALOGUE names 'nowhere/at/all'"):
        specs.models()
