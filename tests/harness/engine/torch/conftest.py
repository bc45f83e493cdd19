"""Tiny random models of every family, and what transformers generates with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,  # answers that vary
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED = {"intermediate_size": 80, "num_key_value_heads": 2, "max_position_embeddings": 512}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
# By family: the class, and what its configuration has beside the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_GATED, "rope_parameters": _LLAMA3}),
    "llama-biased": ("Llama", {**_GATED, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {**_GATED, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**_GATED, "sliding_window": 24}),
    "qwen2": ("Qwen2", {**_GATED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**_GATED, "head_dim": 16}),
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48, "max_position_embeddings": 512}),
}
FAMILIES = tuple(MODELS)

Greedy = Callable[[str, list[int], int], list[int]]


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder with a random model; more settings change its configuration."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.utils.logging.disable_progress_bar()

    def save(name: str, max_shard_size: str = "1GB", **changes: Any) -> Path:
        kind, more = MODELS[name]
        config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **more, **changes})
        torch.manual_seed(7)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases are zero and norms one, which would hide mistakes
                torch.nn.init.normal_(parameter, 1.0 if parameter.mean() > 0.5 else 0.0, 0.2)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return save


@pytest.fixture(scope="session")
def model_folder(save_model: Callable[..., Path]) -> Callable[[str], Path]:
    """The folder of a family's model, made once."""
    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            folders[name] = save_model(name)
        return folders[name]

    return find


@pytest.fixture(scope="session")
def generated(model_folder: Callable[[str], Path]) -> Greedy:
    """Prompt and greedy answer of a family's model, by transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    models: dict[str, Any] = {}
    answers: dict[tuple[str, tuple[int, ...], int], list[int]] = {}

    def generate(name: str, prompt: list[int], tokens: int) -> list[int]:
        key = (name, tuple(prompt), tokens)
        if key not in answers:
            if name not in models:
                load = transformers.AutoModelForCausalLM.from_pretrained
                models[name] = load(model_folder(name), dtype=torch.float32).eval()
            input_ids = torch.tensor([prompt])
            settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            output_ids = models[name].generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=tokens,
                **settings,
            )
            answers[key] = output_ids[0].tolist()
        return answers[key]

    return generate
