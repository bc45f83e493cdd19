"""A tiny Llama with random weights, for trying things out where no model is at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

NAME = "tiny-llama"

_SPECIALS = ("<pad>", "<s>", "</s>")
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_fields(**changes: Any) -> dict[str, Any]:
    """Its `config.json`: 4 layers of 256, a vocabulary of bytes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256 + len(_SPECIALS),
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        **changes,
    }


def make_tiny(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write the model, a tokenizer of bytes and a chat template; the same seed, the same bytes."""
    fields = tiny_fields(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1), "utf-8")
    save_file(_weights(fields, seed), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()), "utf-8")
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def _weights(fields: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = (
        fields[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    dim = hidden // fields["num_attention_heads"]
    narrow = dim * fields["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (2.0 / hidden) ** 0.5

    found = {"model.embed_tokens.weight": draw(vocab, hidden), "model.norm.weight": _ones(hidden)}
    for layer in range(fields["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}{name}.weight": draw(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{norm}.weight"] = _ones(hidden)
    return found | {"lm_head.weight": draw(vocab, hidden)}


def _ones(size: int) -> Tensor:
    return torch.ones(size)


def _tokenizer() -> dict[str, Any]:
    """A tokenizer with one token for each byte."""
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(_SPECIALS)
    ]
    vocabulary = dict(zip(_SPECIALS, range(len(_SPECIALS)), strict=True))
    vocabulary |= {letter: n + len(_SPECIALS) for n, letter in enumerate(_byte_letters())}
    spaced = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **spaced},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **spaced},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + n) for n in range(256 - len(plain)))
    return [chr(byte) if byte in plain else next(others) for byte in range(256)]
