"""The operators of a model, with their shapes on one GPU of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import SIXTEEN_BIT_BYTES, weight_dtype
from ..specs import ModelSpec


@dataclass(frozen=True)
class Gemm:
    """A matrix multiplication: (tokens x k) by (k x n), `calls` times in a pass."""

    name: str
    n: int
    k: int
    dtype: str
    calls: int


@dataclass(frozen=True)
class Small:
    """A kernel that moves `bytes_per_token` and hardly computes, `calls` times in a pass."""

    name: str
    bytes_per_token: float
    calls: int


@dataclass(frozen=True)
class Attention:
    """Attention of one layer on one GPU, `calls` times in a pass."""

    heads: int
    kv_heads: int
    head_dim: int
    calls: int


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of `bytes_per_token` over the tensor-parallel group."""

    bytes_per_token: float
    calls: int


@dataclass(frozen=True)
class Operators:
    """Everything that one pass launches; `head` is per sequence, all else per token."""

    gemms: tuple[Gemm, ...]
    small: tuple[Small, ...]
    attention: Attention
    all_reduce: AllReduce | None
    head: Gemm
    logits_bytes: float  # of one sequence


def operators(spec: ModelSpec, tp: int, dtype: str) -> Operators:
    """The operators of a pass through `spec` on each of `tp` GPUs, with weights of `dtype`."""
    layers, hidden, width = spec.layers, spec.hidden, SIXTEEN_BIT_BYTES
    traits = spec.traits
    heads, kv_heads = spec.heads // tp, -(-spec.kv_heads // tp)
    query, kv = heads * spec.head_dim, kv_heads * spec.head_dim
    inner = spec.intermediate // tp
    widened = (2 if traits.gated_mlp else 1) * inner
    gemms = (
        Gemm("qkv_proj", query + 2 * kv, hidden, dtype, layers),
        Gemm("o_proj", hidden, query, dtype, layers),
        Gemm("up_proj", widened, hidden, dtype, layers),
        Gemm("down_proj", hidden, inner, dtype, layers),
    )
    small = [
        Small("norm", 4 * hidden * width, traits.norms_per_layer * layers),
        Small("rotary_and_cache", (2 * query + 4 * kv) * width, 2 * layers),
        Small("activation", (widened + inner) * width, layers),
        Small("embedding", 2 * hidden * width, 1),
    ]
    if traits.qk_norm:
        small.append(Small("qk_norm", 2 * (query + kv) * width, 2 * layers))
    if weight_dtype(dtype).compute_bits < 16:
        # Compilation fuses the other three quantisations into norms and activation.
        quantised = width + weight_dtype(dtype).bytes
        small.append(Small("quantise", query * quantised, layers))
    return Operators(
        gemms,
        tuple(small),
        Attention(heads, kv_heads, spec.head_dim, layers),
        AllReduce(hidden * width, 2 * layers) if tp > 1 else None,
        Gemm("lm_head", -(-spec.vocab // tp), hidden, "bf16", 1),
        -(-spec.vocab // tp) * 4.0,
    )
