"""The weights of a decoder, fused: one projection to queries, keys and values, one to both halves
of a gated layer.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .config import DecoderConfig
from .errors import ModelError
from .rope import interleaved

Norm = tuple[Tensor, Tensor | None]  # weight, bias

_LARGE_BYTES = 2 << 20  # more than a large page, or the second cache of a core, holds
_PANEL = 32  # measured, with 1 to 512 rows; 16, 64, 128 and 256 take longer
_TILE = 256  # rows at once: their outputs are put in order while they are in a cache
_MKL = torch.backends.mkl.is_available()


@dataclass(frozen=True)
class Linear:
    """`weight` is [panels, in, width]: each panel gives `width` outputs. See `panels`."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """[rows, out] from `x` [rows, in], with `plus` [rows, out] added."""
        if len(self.weight) == 1:
            first, weight = plus if self.bias is None else self.bias, self.weight[0]
            found = x @ weight if first is None else torch.addmm(first, x, weight)
            return found if plus is None or self.bias is None else found.add_(plus)
        rows, (count, _, width) = len(x), self.weight.shape
        found = x.new_empty(rows, count * width)
        by_row = found.view(rows, count, width)
        for begin in range(0, rows, _TILE):
            tile = x[begin : begin + _TILE]
            if len(tile) == 1:
                tile = torch.cat((tile, tile))  # MKL takes longer for one row than for two
            by_panel = torch.bmm(tile.expand(count, -1, -1), self.weight)
            by_row[begin : begin + _TILE] = by_panel.transpose(0, 1)[: rows - begin]
        for term in (self.bias, plus):
            if term is not None:
                found += term
        return found

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that are present, by name."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def panels(weight: Tensor) -> Tensor:
    """[panels, in, width], a view of a projection's weight [out, in] as in a checkpoint.

    With MKL, a batch of products with narrow panels reads each weight once; a product with the
    whole matrix first copies it into an order of its own, which takes longer than the product of
    few rows. Elsewhere, and where a cache holds the matrix, there is one panel.
    """
    out, width = len(weight), _PANEL
    fast = _MKL and weight.device.type == "cpu" and weight.dtype == torch.float32
    if not fast or weight.nbytes <= _LARGE_BYTES or out % width:
        width = out
    return weight.unflatten(0, (-1, width)).transpose(1, 2)


def in_large_pages(tensor: Tensor) -> Tensor:
    """A contiguous copy; of a large one in host memory in pages of 2 MiB, where there are such."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if tensor.device.type != "cpu" or tensor.nbytes <= _LARGE_BYTES or advice is None:
        return tensor.contiguous()
    memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


@dataclass(frozen=True)
class Layer:
    """One layer. `qkv` gives queries, keys, values; `up` gives gate and up where it is gated."""

    norm: Norm
    qkv: Linear
    qk_norm: tuple[Tensor, Tensor] | None  # of queries and of keys
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its weights."""
        linears = (self.qkv, self.out, self.up, self.down)
        norms = (*self.norm, *self.mlp_norm, *(self.qk_norm or ()))
        tensors = [tensor for one in linears for tensor in one.tensors]
        return sum(t.nbytes for t in (*tensors, *norms) if t is not None)


@dataclass(frozen=True)
class DecoderWeights:
    """All of a decoder. `positions` are learned ones, else None."""

    embed: Tensor
    positions: Tensor | None
    layers: list[Layer]
    norm: Norm
    head: Linear  # to the vocabulary


@dataclass(frozen=True)
class _Names:
    """What a family calls its parts."""

    root: str
    attention_norm: str
    mlp_norm: str
    out: str
    ups: tuple[str, ...]
    down: str
    last_norm: str


_LLAMA = _Names(
    "model.",
    "input_layernorm",
    "post_attention_layernorm",
    "o_proj",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    "norm",
)
_OPT = _Names(
    "model.decoder.",
    "self_attn_layer_norm",
    "final_layer_norm",
    "out_proj",
    ("fc1",),
    "fc2",
    "final_layer_norm",
)


def load_weights(
    folder: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """The weights in a folder.

    Raises:
        ModelError: one is missing, damaged, of another shape, or of no use to this decoder.
    """
    checkpoint = Checkpoint(folder, dtype, device)
    reader = _Reader(checkpoint, config)
    found = reader.weights()
    strangers = checkpoint.unread(("rotary_emb.inv_freq", "lm_head.weight"))
    if strangers:
        raise ModelError(
            f"{folder} holds weights that a {config.family} of its config.json has no use for, "
            f"such as {strangers[0]!r}"
        )
    return found


class _Reader:
    def __init__(self, checkpoint: Checkpoint, config: DecoderConfig) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._names = _OPT if config.family == "opt" else _LLAMA
        self._root = self._names.root
        if f"{self._root}embed_tokens.weight" not in checkpoint:
            bare = self._root.removeprefix("model.")
            if f"{bare}embed_tokens.weight" in checkpoint:
                self._root = bare

    def weights(self) -> DecoderWeights:
        config = self._config
        embed = self._get("embed_tokens.weight", config.vocab, config.hidden)
        if config.tied:  # there is no second copy
            embed = in_large_pages(embed)
            head = Linear(panels(embed))
        else:
            found = self._checkpoint.get("lm_head.weight", (config.vocab, config.hidden))
            head = Linear(in_large_pages(panels(found)))
        positions = None
        if config.rope is None:
            places = config.context + config.position_offset
            positions = self._get("embed_positions.weight", places, config.hidden)
        layers = [self._layer(f"layers.{n}.") for n in range(config.layers)]
        return DecoderWeights(embed, positions, layers, self._norm(self._names.last_norm), head)

    def _layer(self, at: str) -> Layer:
        config, names = self._config, self._names
        attention = f"{at}self_attn."
        wide = config.heads * config.head_dim
        qk_norm = None
        if config.qk_norm:
            q, k = (self._get(f"{attention}{n}_norm.weight", config.head_dim) for n in "qk")
            qk_norm = (interleaved(q, config.head_dim), interleaved(k, config.head_dim))
        return Layer(
            norm=self._norm(f"{at}{names.attention_norm}"),
            qkv=self._qkv(attention),
            qk_norm=qk_norm,
            out=self._linear([f"{attention}{names.out}"], config.hidden, wide, config.out_bias),
            mlp_norm=self._norm(f"{at}{names.mlp_norm}"),
            up=self._linear(
                [f"{at}{up}" for up in names.ups], config.inner, config.hidden, config.mlp_bias
            ),
            down=self._linear([f"{at}{names.down}"], config.hidden, config.inner, config.mlp_bias),
        )

    def _qkv(self, at: str) -> Linear:
        config = self._config
        parts = []
        for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            wide = heads * config.head_dim
            weight = self._get(f"{at}{name}_proj.weight", wide, config.hidden)
            bias = self._get(f"{at}{name}_proj.bias", wide) if config.qkv_bias else None
            if config.rope is not None and name != "v":
                weight = interleaved(weight, config.head_dim)
                bias = None if bias is None else interleaved(bias, config.head_dim)
            parts.append((weight, bias))
        return _joined(parts)

    def _linear(self, names: Sequence[str], wide: int, narrow: int, bias: bool) -> Linear:
        """Projections from `narrow` to `wide`, one under the other."""
        return _joined(
            [
                (
                    self._get(f"{name}.weight", wide, narrow),
                    self._get(f"{name}.bias", wide) if bias else None,
                )
                for name in names
            ]
        )

    def _norm(self, name: str) -> Norm:
        hidden = self._config.hidden
        bias = None if self._config.rope is not None else self._get(f"{name}.bias", hidden)
        return self._get(f"{name}.weight", hidden), bias

    def _get(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.get(f"{self._root}{name}", shape)


def _joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Linear:
    """One projection from several: weights [out, in] as in a checkpoint, and biases."""
    weight = torch.cat([weight for weight, _ in parts])
    biases = [bias for _, bias in parts if bias is not None]
    return Linear(in_large_pages(panels(weight)), torch.cat(biases) if biases else None)
