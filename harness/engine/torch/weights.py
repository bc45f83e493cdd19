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

from .decoder_config import DecoderConfig, modules_of
from .model_tensors import Checkpoint
from .rope import interleaved
from .torch_errors import ModelError

Affine = tuple[Tensor, Tensor | None]  # weight [out, in] or [hidden], bias

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

    norm: Affine
    qkv: Linear
    qk_norm: tuple[Tensor, Tensor] | None  # of queries and of keys
    out: Linear
    mlp_norm: Affine
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
    norm: Affine
    head: Linear  # to the vocabulary


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
    strangers = checkpoint.unread(("rotary_emb.inv_freq", reader.head))
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
        self._modules = modules_of(config.family)
        self._root = checkpoint.root(self._modules)
        self._shapes = dict(config.tensors(self._root, ()))
        self.head = f"{self._modules.head}.weight"

    def weights(self) -> DecoderWeights:
        root, modules = self._root, self._modules
        embed = self._get(f"{root}{modules.tokens}.weight")
        head_weight = embed if self._config.tied else self._get(self.head)
        head = Linear(packed(head_weight))  # where tied, a second copy in another order
        positions = None
        if self._config.rope is None:
            positions = self._get(f"{root}{modules.positions[0]}.weight")
        layers = [self._layer(number) for number in range(self._config.layers)]
        return DecoderWeights(embed, positions, layers, self._affine(f"{root}{modules.norm}"), head)

    def _layer(self, number: int) -> Layer:
        config, names = self._config, self._modules
        prefix = f"{self._root}{names.layers}.{number}."
        self._shapes.update(config.tensors(self._root, (number,)))
        qk_norm = None
        if config.qk_norm:
            q, k = (self._get(f"{prefix}{name}.weight") for name in names.qk_norm)
            qk_norm = (interleaved(q, config.head_dim), interleaved(k, config.head_dim))
        qkv = [self._affine(f"{prefix}{name}") for name in names.qkv]
        if config.rope is not None:
            qkv[:2] = map(self._turned, qkv[:2])
        return Layer(
            norm=self._affine(f"{prefix}{names.attention_norm}"),
            qkv=_joined(qkv),
            qk_norm=qk_norm,
            out=_joined([self._affine(f"{prefix}{names.out}")]),
            mlp_norm=self._affine(f"{prefix}{names.mlp_norm}"),
            up=_joined([self._affine(f"{prefix}{name}") for name in names.up]),
            down=_joined([self._affine(f"{prefix}{names.down}")]),
        )

    def _turned(self, part: Affine) -> Affine:
        head_dim = self._config.head_dim
        weight, bias = part
        return interleaved(weight, head_dim), None if bias is None else interleaved(bias, head_dim)

    def _affine(self, module: str) -> Affine:
        bias = f"{module}.bias"
        return self._get(f"{module}.weight"), self._get(bias) if bias in self._shapes else None

    def _get(self, name: str) -> Tensor:
        return self._checkpoint.get(name, self._shapes[name])


def _joined(parts: Sequence[Affine]) -> Linear:
    """One projection from several: weights [out, in] as in a checkpoint, and biases."""
    weight = torch.cat([weight for weight, _ in parts])
    biases = [bias for _, bias in parts if bias is not None]
    return Linear(packed(weight), torch.cat(biases) if biases else None)
