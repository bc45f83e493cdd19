"""A decoder's shape from the `config.json` of its Hugging Face folder, in this engine's words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....predictors.families import (
    Architecture,
    Kind,
    Modules,
    architecture_of,
    torch_types,
)
from ....workloads.parsing import parse_json
from .torch_errors import ModelError

Shape = tuple[int, ...]
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

    def tensors(
        self, root: str | None = None, layers: Iterable[int] | None = None
    ) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each weight of a checkpoint whose modules stand below `root` (None:
        that of a whole model), of these layers (None: all).
        """
        modules = modules_of(self.family)
        root = modules.roots[0] if root is None else root
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norm_bias = self.rope is None
        yield f"{root}{modules.tokens}.weight", (self.vocab, self.hidden)
        if self.rope is None:
            rows = self.context + self.position_offset
            yield f"{root}{modules.positions[0]}.weight", (rows, self.hidden)
        for number in range(self.layers) if layers is None else layers:
            prefix = f"{root}{modules.layers}.{number}."
            yield from affine(prefix + modules.attention_norm, norm_bias, self.hidden)
            norms = (*modules.qk_norm, "")
            for name, norm, width in zip(modules.qkv, norms, (queries, keys, keys), strict=True):
                yield from affine(prefix + name, self.qkv_bias, width, self.hidden)
                if self.qk_norm and norm:
                    yield from affine(prefix + norm, False, self.head_dim)
            yield from affine(prefix + modules.out, self.out_bias, self.hidden, queries)
            yield from affine(prefix + modules.mlp_norm, norm_bias, self.hidden)
            for name in modules.up:
                yield from affine(prefix + name, self.mlp_bias, self.inner, self.hidden)
            yield from affine(prefix + modules.down, self.mlp_bias, self.hidden, self.inner)
        yield from affine(root + modules.norm, norm_bias, self.hidden)
        if not self.tied:
            yield f"{modules.head}.weight", (self.vocab, self.hidden)


def affine(module: str, bias: bool, *shape: int) -> Iterator[tuple[str, Shape]]:
    """The weight of a projection or norm, and its bias if it has one."""
    yield f"{module}.weight", shape
    if bias:
        yield f"{module}.bias", shape[:1]


def modules_of(model_type: str) -> Modules:
    """Names of the modules of a type that this engine runs."""
    architecture = architecture_of({"model_type": model_type})
    modules = architecture.family.modules if architecture else None
    assert modules is not None
    return modules


def runnable(fields: Mapping[str, Any], folder: Path, kind: Kind, does: str) -> Architecture:
    """The architecture that the fields of a `config.json` name.

    Raises:
        ModelError: it is none of this kind that this engine runs; it `does` with those.
    """
    name, types = fields.get("model_type"), torch_types(kind)
    if not isinstance(name, str) or name not in types:
        raise ModelError(
            f"{folder} is a model of type {name!r}; backend torch {does} with {', '.join(types)}"
        )
    return types[name]


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
    architecture = runnable(fields, folder, "decoder", "generates")
    if "auto_map" in fields and not (fields.get("architectures") or [""])[0]:
        raise ModelError(f"{folder} needs code of its own, which backend torch does not run")
    if fields.get("quantization_config"):
        raise ModelError(f"{folder} is quantized; backend torch runs float32, bfloat16 and float16")
    try:
        config = decoder_config(architecture, fields)
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


def sizes_of(architecture: Architecture, fields: Mapping[str, Any]) -> Callable[..., Any]:
    """A function that returns the value of a size of `FIELDS`, else the default that it is called
    with; without one it raises KeyError.
    """

    def value(size: str, *default: Any) -> Any:
        names = architecture.names(size)
        values = [fields[name] for name in names if name in fields] or default
        if not values:
            raise KeyError(names[0])
        return values[0]

    return value


def decoder_config(architecture: Architecture, fields: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that the fields of a `config.json` describe.

    Raises:
        KeyError: a field is missing.
        ValueError: it has a feature that this engine does not run.
    """
    value = sizes_of(architecture, fields)
    family, traits = architecture.family, architecture.family.traits
    heads, hidden = int(value("heads")), int(value("hidden"))
    if value("embedding_width", hidden) != hidden:
        raise ValueError("embeddings of another width than the layers are not supported")
    for name, refused, reason in family.refusals:
        if bool(fields.get(name, not refused)) is refused:
            raise ValueError(reason)
    rotary = traits.position_offset is None
    biased = bool(fields.get("attention_bias"))
    return DecoderConfig(
        family=architecture.type.name,
        layers=int(value("layers")),
        hidden=hidden,
        heads=heads,
        kv_heads=int(value("kv_heads", 0) or heads),
        head_dim=int(value("head_dim", 0) or hidden // heads),
        inner=int(value("intermediate")),
        vocab=int(value("vocab")),
        context=int(value("context_tokens", *(2048,) * rotary)),
        eps=float(value("eps", family.eps)),
        activation=_activation(value("activation", family.activation)),
        rope=_rope(fields) if rotary else None,
        qkv_bias=traits.biases != "none" or biased,
        out_bias=traits.biases == "all" or (traits.biases == "none" and biased),
        mlp_bias=traits.biases == "all" or bool(fields.get("mlp_bias")),
        qk_norm=traits.qk_norm,
        tied=bool(fields.get("tie_word_embeddings", family.tied)),
        window=fields.get("sliding_window") if family.slides else None,
        position_offset=traits.position_offset or 0,
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
