"""Rotary positions as complex numbers: a rotation is one multiplication.

Checkpoints rotate dimension i against i + half. Here the two stand side by side, so that a pair is
one complex number: `interleaved` reorders the rows of the projections once, at loading. Queries and
keys are reordered alike, which leaves their products as they were.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .decoder_config import Rope


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Rows (or a bias) of a projection to heads: each head's halves brought together in pairs."""
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def rotations(rope: Rope, head_dim: int, context: int, device: torch.device) -> Tensor:
    """[context, 1, head_dim / 2], complex64."""
    half = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency = _scaled(1.0 / (rope.theta**half), rope)
    angle = torch.outer(torch.arange(context).float(), frequency)
    return torch.polar(torch.ones_like(angle), angle).unsqueeze(1).to(device)


def _scaled(frequency: Tensor, rope: Rope) -> Tensor:
    """`linear`: all slower. `llama3`: slow ones slower, fast ones as they are (Llama 3.1)."""
    if rope.kind == "default":
        return frequency
    factor = float(rope.scaling["factor"])
    if rope.kind == "linear":
        return frequency / factor
    low, high = (float(rope.scaling[f"{name}_freq_factor"]) for name in ("low", "high"))
    trained = float(rope.scaling["original_max_position_embeddings"])
    turns = trained * frequency / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * frequency / factor + share * frequency


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Heads [tokens, heads, head_dim] turned by [tokens, 1, head_dim / 2]."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
