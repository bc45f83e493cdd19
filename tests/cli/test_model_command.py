"""`slo-bench model show`: how a model was read, and what fits."""

import json

import pytest

from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model

HYBRID = {
    "model_type": "acme_hybrid",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "mamba_d_state": 64,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}


@pytest.fixture
def hybrid(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    return tmp_path


def test_model_show_prints_what_a_gpu_holds_as_json(slo_bench):
    code, out, _ = slo_bench(
        *("model", "show", "qwen2.5-72b", "--gpu", "h100-80g", "--tp", "2"),
        *("--server", "vllm:0.19", "--memory-share", "0.95", "--json"),
    )
    assert code == 0
    facts = json.loads(out)
    assert facts["parameters"] == model("qwen2.5-72b").parameters
    assert facts["layers_by_kind"] == {"full attention": 80, "dense MLP": 80}
    assert facts["kv_bytes_per_token"] == 80 * 2 * 8 * 128 * 2
    memory = facts["memory"]
    assert (memory["batched_tokens"], memory["sequences"]) == (8192, 1024)
    held = ("weight_bytes", "activation_bytes", "buffer_bytes", "state_bytes", "kv_bytes")
    assert sum(memory[part] for part in held) == memory["usable_bytes"]
    assert memory["kv_tokens"] == pytest.approx(19_920, rel=0.02)  # as vLLM logs
    assert memory["longest_context_tokens"] == memory["kv_tokens"]


def test_model_show_without_a_server_is_what_a_run_places(slo_bench):
    _, out, _ = slo_bench("model", "show", "llama-3.1-8b", "--gpu", "l40s", "--json")
    memory = json.loads(out)["memory"]
    assert memory["tp"] == 1
    assert memory["kv_tokens"] == Placement(model("llama-3.1-8b"), gpu("l40s")).kv_tokens


def test_model_show_of_a_folder_counts_layers_and_states_by_kind(slo_bench, hybrid):
    """State: 32 heads of 64 x 64 in 16 bits, and 2,176 x 3 inputs of the convolution."""
    _, out, _ = slo_bench("model", "show", hybrid, "--json")
    facts = json.loads(out)
    kinds = {"full attention": 1, "state space (Mamba 2)": 3, "dense MLP": 4}
    assert facts["layers_by_kind"] == kinds
    assert facts["kv_bytes_per_token_by_kind"] == {"full attention": 2 * 2 * 128 * 2}
    state = 32 * 64 * 64 * 2 + (32 * 64 + 2 * 64) * 3 * 2
    assert facts["state_bytes_per_sequence"] == 3 * state
    assert facts["prefix_block_tokens"] == 16 * -(-state // (16 * 1024))


def test_model_show_is_readable_in_80_columns(slo_bench, hybrid, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name, device in ((hybrid, "l4"), ("glm-5.2", "b200"), ("bge-m3", "l4")):
        code, out, _ = slo_bench("model", "show", name, "--gpu", device, "--server", "vllm")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        assert "parameters" in out
        assert "buffers" in out


def test_model_show_says_what_does_not_fit(slo_bench):
    code, out, _ = slo_bench("model", "show", "llama-3.3-70b", "--gpu", "t4", "--tp", "8")
    assert code == 0
    assert "does not fit" in out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("qwen3-8b", "--tp", "2"), "name it with --gpu"),
        (("qwen3-8b", "--gpu", "l4", "--server", "ollama"), "unknown server 'ollama'"),
        (("qwen3-8b", "--gpu", "l4", "--server", "vllm:0.5"), "memory of vllm 0.5 is not known"),
        (("qwen3-8b", "--gpu", "l4", "--kv-dtype", "int3"), "unknown KV dtype 'int3'"),
        (("no-such-model",), "unknown model 'no-such-model'"),
    ],
)
def test_model_show_with_impossible_options_is_refused(slo_bench, options, complaint):
    code, out, err = slo_bench("model", "show", *options)
    assert code == 2
    assert complaint in out + err


def test_model_show_says_what_servers_refuse(slo_bench):
    code, _, err = slo_bench("model", "show", "phi-4", "--gpu", "h100-80g", "--tp", "4")
    assert code == 0
    assert "10 KV heads, which tp 4 does not divide: vLLM and SGLang refuse it" in err
