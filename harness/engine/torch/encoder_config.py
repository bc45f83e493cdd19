"""An encoder's shape from the `config.json` of its Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....predictors.families import Architecture
from ....workloads.parsing import parse_json
from .decoder_config import Shape, affine, modules_of, read_fields, runnable, sizes_of
from .torch_errors import ModelError


@dataclass(frozen=True)
class EncoderConfig:
    """`offset`: where positions begin. `pooling`: `cls` or `mean`."""

    family: str
    layers: int
    hidden: int
    heads: int
    inner: int
    vocab: int
    positions: int
    kinds: int
    eps: float
    offset: int
    pooling: str

    @property
    def context(self) -> int:
        """Maximum number of tokens of a text."""
        return self.positions - self.offset

    def tensors(
        self, root: str | None = None, layers: Iterable[int] | None = None
    ) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each weight of a checkpoint whose modules stand below `root` (None:
        that of a whole model), of these layers (None: all).
        """
        modules = modules_of(self.family)
        root = modules.roots[0] if root is None else root
        tables = (modules.tokens, modules.positions[0], modules.token_types)
        for table, rows in zip(tables, (self.vocab, self.positions, self.kinds), strict=True):
            yield f"{root}{table}.weight", (rows, self.hidden)
        numbers = range(self.layers) if layers is None else layers
        prefixes = [f"{root}{modules.layers}.{number}." for number in numbers]
        yield from affine(root + modules.pooler, True, self.hidden, self.hidden)
        for prefix in prefixes:
            for name in (*modules.qkv, modules.out):
                yield from affine(prefix + name, True, self.hidden, self.hidden)
            for name in modules.up:
                yield from affine(prefix + name, True, self.inner, self.hidden)
            yield from affine(prefix + modules.down, True, self.hidden, self.inner)
        yield from affine(root + modules.norm, True, self.hidden)
        for prefix in prefixes:
            yield from affine(prefix + modules.attention_norm, True, self.hidden)
            yield from affine(prefix + modules.mlp_norm, True, self.hidden)


def read_encoder(folder: Path) -> EncoderConfig:
    """The encoder in a folder.

    Raises:
        ModelError: it is none of the BERT family, or has a feature that is not supported.
    """
    fields = read_fields(folder)
    architecture = runnable(fields, folder, "encoder", "embeds")
    if fields.get("hidden_act", "gelu") != "gelu":
        raise ModelError(f"{folder}: the activation {fields['hidden_act']!r} is not supported")
    if fields.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(f"{folder}: only absolute positions are supported")
    try:
        return encoder_config(architecture, fields, _pooling(folder))
    except KeyError as error:
        raise ModelError(f"{folder}/config.json lacks the field {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{folder}/config.json: {error}") from None


def encoder_config(
    architecture: Architecture, fields: Mapping[str, Any], pooling: str = "mean"
) -> EncoderConfig:
    """The encoder that the fields of a `config.json` describe.

    Raises:
        KeyError: a field is missing.
    """
    value = sizes_of(architecture, fields)
    family = architecture.family
    padding = int(fields.get("pad_token_id") or 0)
    return EncoderConfig(
        family=architecture.type.name,
        layers=int(value("layers")),
        hidden=int(value("hidden")),
        heads=int(value("heads")),
        inner=int(value("intermediate")),
        vocab=int(value("vocab")),
        positions=int(value("context_tokens")),
        kinds=int(fields.get("type_vocab_size", 2)),
        eps=float(value("eps", family.eps)),
        offset=padding + 1 if family.traits.position_offset else 0,
        pooling=pooling,
    )


def _pooling(folder: Path) -> str:
    """As a sentence-transformers folder says it; else the mean."""
    file = folder / "1_Pooling" / "config.json"
    pooling = parse_json(file.read_text("utf-8")) if file.is_file() else {}
    cls = isinstance(pooling, dict) and pooling.get("pooling_mode_cls_token")
    return "cls" if cls else "mean"
