"""The weights of a decoder, fused: one projection to queries, keys and values, one to both halves
of a gated layer.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .decoder_config import DecoderConfig
from .model_tensors import Checkpoint
from .rope import interleaved
from .torch_errors import ModelError

Norm = tuple[Tensor, Tensor | None]  # weight, bias

_LARGE_BYTES = 2 << 20  # more than the second cache of a core holds
_X86 = platform.machine().lower() in ("x86_64", "amd64")
_MKL = torch.backends.mkl.is_available()
_ROWS = 64  # for which oneDNN chooses an order; measured: as good as any with 1 to 256
_LEAST_ROWS = 4  # oneDNN takes longer for one row than for four
_PAGE_BYTES = 2 << 20  # a large page
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


@dataclass(frozen=True)
class Linear:
    """A projection. `weight` is [out, in]: as it is, or in the order of oneDNN. See `packed`."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """[rows, out] from `x` [rows, in], with `plus` [rows, out] added."""
        if self.weight.is_mkldnn:
            return self._by_onednn(x, plus)
        first, weight = plus if self.bias is None else self.bias, self.weight.t()
        output = x @ weight if first is None else torch.addmm(first, x, weight)
        return output if plus is None or self.bias is None else output.add_(plus)

    def _by_onednn(self, x: Tensor, plus: Tensor | None) -> Tensor:
        rows = len(x)
        if rows < _LEAST_ROWS:
            x = F.pad(x, (0, 0, 0, _LEAST_ROWS - rows))
        product = torch.ops.mkldnn._linear_pointwise
        output: Tensor = product(x, self.weight, self.bias, "none", [], "")[:rows]
        return output if plus is None else output.add_(plus)

    def __getstate__(self) -> dict[str, Any]:
        packed = self.weight.is_mkldnn
        return {"weight": self.dense(), "bias": self.bias, "packed": packed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weight = state["weight"]
        weight = _in_order_of_onednn(weight) if state["packed"] else weight
        self.__dict__.update(weight=weight, bias=state["bias"])

    def dense(self) -> Tensor:
        """The weight, as it is in a checkpoint."""
        return self.weight.to_dense() if self.weight.is_mkldnn else self.weight


def packed(weight: Tensor) -> Tensor:
    """The weight [out, in] of a checkpoint, in the order in which products are quickest.

    On a CPU that is oneDNN's own: else each product of few rows would first copy the matrix into
    such an order, which takes longer than the product. In float32, a matrix that a cache holds is
    left to MKL, which takes less time for a call.
    """
    if weight.device.type != "cpu" or not _onednn_has(weight.dtype):
        return weight.contiguous()
    if weight.dtype == torch.float32 and weight.nbytes <= _LARGE_BYTES and _MKL:
        return weight.t().contiguous().t()
    return _in_order_of_onednn(weight)


def _onednn_has(dtype: torch.dtype) -> bool:
    """Has this CPU instructions with which it multiplies such numbers?"""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        # On x86 that says AVX512 alone, which multiplies them in float32 and takes longer.
        return supported and (not _X86 or torch.cpu._is_avx512_bf16_supported())
    return dtype is torch.float32


def _in_order_of_onednn(weight: Tensor) -> Tensor:
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    _in_large_pages(torch.ops.mkldnn.data_ptr(reordered), reordered.nbytes)
    return reordered


def _in_large_pages(address: int, size: int) -> None:
    """Bring memory together in pages of 2 MiB where the system can: reading it takes less time."""
    begin = -(-address // _PAGE_BYTES) * _PAGE_BYTES
    end = (address + size) // _PAGE_BYTES * _PAGE_BYTES
    if sys.platform != "linux" or begin >= end:
        return
    advise = ctypes.CDLL(None).madvise
    for advice in (_MADV_COLLAPSE, _MADV_HUGEPAGE):  # now; or, before Linux 6.1, in time
        if advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) == 0:
            return


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
        tensors = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
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
    decoder_weights = reader.weights()
    strangers = checkpoint.unread(("rotary_emb.inv_freq", "lm_head.weight"))
    if strangers:
        raise ModelError(
            f"{folder} holds weights that a {config.family} of its config.json has no use for, "
            f"such as {strangers[0]!r}"
        )
    return decoder_weights


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
        head_weight = embed
        if not config.tied:
            head_weight = self._checkpoint.get("lm_head.weight", (config.vocab, config.hidden))
        head = Linear(packed(head_weight))  # where tied, a second copy in another order
        positions = None
        if config.rope is None:
            places = config.context + config.position_offset
            positions = self._get("embed_positions.weight", places, config.hidden)
        layers = [self._layer(f"layers.{n}.") for n in range(config.layers)]
        return DecoderWeights(embed, positions, layers, self._norm(self._names.last_norm), head)

    def _layer(self, prefix: str) -> Layer:
        config, names = self._config, self._names
        attention = f"{prefix}self_attn."
        wide = config.heads * config.head_dim
        qk_norm = None
        if config.qk_norm:
            q, k = (self._get(f"{attention}{n}_norm.weight", config.head_dim) for n in "qk")
            qk_norm = (interleaved(q, config.head_dim), interleaved(k, config.head_dim))
        return Layer(
            norm=self._norm(f"{prefix}{names.attention_norm}"),
            qkv=self._qkv(attention),
            qk_norm=qk_norm,
            out=self._linear([f"{attention}{names.out}"], config.hidden, wide, config.out_bias),
            mlp_norm=self._norm(f"{prefix}{names.mlp_norm}"),
            up=self._linear(
                [f"{prefix}{up}" for up in names.ups], config.inner, config.hidden, config.mlp_bias
            ),
            down=self._linear(
                [f"{prefix}{names.down}"], config.hidden, config.inner, config.mlp_bias
            ),
        )

    def _qkv(self, prefix: str) -> Linear:
        config = self._config
        parts = []
        for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            wide = heads * config.head_dim
            weight = self._get(f"{prefix}{name}_proj.weight", wide, config.hidden)
            bias = self._get(f"{prefix}{name}_proj.bias", wide) if config.qkv_bias else None
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
    return Linear(packed(weight), torch.cat(biases) if biases else None)
