"""A decoder's shape from the `config.json` of its Hugging Face folder, in this engine's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....workloads.parsing import parse_json
from .torch_errors import ModelError

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "opt")
_ACTIVATIONS = {"silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. `scaling` holds the fields of `config.json` that stretch it."""

    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Type of the scaling: "default", "linear" or "llama3"."""
        rope_type: str = self.scaling.get("rope_type") or self.scaling.get("type") or "default"
        return rope_type


@dataclass(frozen=True)
class DecoderConfig:
    """A dense decoder. Sizes count elements, `inner` is the width of its feed-forward layers.

    `window`: tokens that attention looks back at most, its own included; None: all.
    `position_offset`: where learned positions begin (OPT); they are used where `rope` is None.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    context: int
    eps: float
    activation: str
    rope: Rope | None
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    window: int | None = None
    position_offset: int = 0
    eos: frozenset[int] = frozenset()
    dtype: str = "float32"  # of the checkpoint

    @property
    def gated(self) -> bool:
        """Is the feed-forward layer gated, and are the norms root-mean-square?"""
        return self.rope is not None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def read_fields(folder: Path) -> dict[str, Any]:
    """`config.json` as it stands.

    Raises:
        ModelError: there is none, or it is no JSON object.
    """
    file = folder / "config.json"
    try:
        fields = parse_json(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} is no model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return fields


def read_config(folder: Path) -> DecoderConfig:
    """The decoder in a folder.

    Raises:
        ModelError: it is of a family, or has a feature, that this engine does not run.
    """
    fields = read_fields(folder)
    family = fields.get("model_type")
    if family not in DECODERS:
        raise ModelError(
            f"{folder} is a model of type {family!r}; backend torch generates with "
            f"{', '.join(DECODERS)}"
        )
    if "auto_map" in fields and not (fields.get("architectures") or [""])[0]:
        raise ModelError(f"{folder} needs code of its own, which backend torch does not run")
    if fields.get("quantization_config"):
        raise ModelError(f"{folder} is quantized; backend torch runs float32, bfloat16 and float16")
    try:
        config = _opt(fields) if family == "opt" else _llama_like(family, fields)
    except KeyError as error:
        raise ModelError(f"{folder}/config.json lacks the field {error}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{folder}/config.json: {error}") from None
    _check(folder, config)
    return config


def _check(folder: Path, config: DecoderConfig) -> None:
    sizes = (config.layers, config.hidden, config.heads, config.kv_heads, config.vocab)
    if min(sizes) < 1 or config.heads % config.kv_heads:
        raise ModelError(
            f"{folder}/config.json: {config.heads} heads over {config.kv_heads} KV heads in "
            f"{config.layers} layers of {config.hidden} is no decoder"
        )
    if config.rope is not None and config.rope.kind not in ("default", "linear", "llama3"):
        raise ModelError(
            f"{folder} scales its rotary positions by {config.rope.kind!r}; backend torch knows "
            "default, linear and llama3"
        )


def _llama_like(family: str, fields: Mapping[str, Any]) -> DecoderConfig:
    heads = int(fields["num_attention_heads"])
    hidden = int(fields["hidden_size"])
    if fields.get("use_sliding_window"):
        raise ValueError("windows that differ between layers are not supported")
    return DecoderConfig(
        family=family,
        layers=int(fields["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or hidden // heads),
        inner=int(fields["intermediate_size"]),
        vocab=int(fields["vocab_size"]),
        context=int(fields.get("max_position_embeddings", 2048)),
        eps=float(fields.get("rms_norm_eps", 1e-6)),
        activation=_activation(fields.get("hidden_act", "silu")),
        rope=_rope(fields),
        qkv_bias=family == "qwen2" or bool(fields.get("attention_bias")),
        out_bias=family != "qwen2" and bool(fields.get("attention_bias")),
        mlp_bias=bool(fields.get("mlp_bias")),
        qk_norm=family == "qwen3",
        tied=bool(fields.get("tie_word_embeddings", False)),
        window=fields.get("sliding_window") if family == "mistral" else None,
        eos=_eos(fields),
        dtype=_dtype(fields),
    )


def _opt(fields: Mapping[str, Any]) -> DecoderConfig:
    heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
    if not fields.get("do_layer_norm_before", True):
        raise ValueError("norms after the layers (OPT-350m) are not supported")
    if fields.get("word_embed_proj_dim", hidden) != hidden:
        raise ValueError("embeddings of another width than the layers are not supported")
    if not fields.get("enable_bias", True) or fields.get("_remove_final_layer_norm"):
        raise ValueError("an OPT without biases or without its last norm is not supported")
    return DecoderConfig(
        family="opt",
        layers=int(fields["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        inner=int(fields["ffn_dim"]),
        vocab=int(fields["vocab_size"]),
        context=int(fields["max_position_embeddings"]),
        eps=1e-5,
        activation=_activation(fields.get("activation_function", "relu")),
        rope=None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm=False,
        tied=bool(fields.get("tie_word_embeddings", True)),
        position_offset=2,
        eos=_eos(fields),
        dtype=_dtype(fields),
    )


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(f"the activation {name!r} is not supported")
    return _ACTIVATIONS[name]


def _rope(fields: Mapping[str, Any]) -> Rope:
    """`rope_parameters` of today's files, `rope_theta` and `rope_scaling` of older ones."""
    parameters = fields.get("rope_parameters") or {}
    scaling = {**(fields.get("rope_scaling") or {}), **parameters}
    theta = scaling.pop("rope_theta", None) or fields.get("rope_theta", 10_000.0)
    return Rope(float(theta), scaling)


def _eos(fields: Mapping[str, Any]) -> frozenset[int]:
    token_ids = fields.get("eos_token_id")
    if token_ids is None:
        return frozenset()
    return frozenset(token_ids) if isinstance(token_ids, list) else frozenset((int(token_ids),))


def _dtype(fields: Mapping[str, Any]) -> str:
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"weights of {dtype} are not supported")
    return str(dtype)
