"""Attention over paged KV.

Decoding: every block of a sequence gives a partial result, the sum of its values weighted by
exponentials, with their sum and the largest score; partial results are merged by their largest
scores. So nothing is padded to the longest sequence, and blocks that lie side by side in the cache
are read where they are. The same merge joins parts of a sequence on different devices (the
log-sum-exp split of BanaServe's attention migration, Eqs. 4-6 to 4-8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .batch import Decodes, PrefillChunk

_TILE = 256  # rows of a chunk that are attended to at once: later keys are not computed in vain


@dataclass(frozen=True)
class Partial:
    """Of part of the keys: `values` [sequences, heads, head_dim] and `weight` [sequences, heads]
    are sums over exponentials of scores less `peak` [sequences, heads], the largest of them.
    """

    values: Tensor
    weight: Tensor
    peak: Tensor

    def finished(self) -> Tensor:
        """[sequences, heads, head_dim], if these were all keys."""
        return self.values / self.weight.unsqueeze(-1)


def merged(parts: Sequence[Partial]) -> Partial:
    """Of all keys, from disjoint parts of them. A part without keys has a peak of -inf."""
    peak = torch.stack([part.peak for part in parts]).amax(0)
    shares = [(part.peak - peak).exp() for part in parts]
    values = sum(p.values * s.unsqueeze(-1) for p, s in zip(parts, shares, strict=True))
    weight = sum(p.weight * s for p, s in zip(parts, shares, strict=True))
    assert isinstance(values, Tensor)
    assert isinstance(weight, Tensor)
    return Partial(values, weight, peak)


def decode(queries: Tensor, kv: Tensor, to: Decodes, scale: float) -> Partial:
    """One query a sequence: `queries` [sequences, heads, head_dim], `kv` one layer of the cache."""
    count, heads, dim = queries.shape
    if isinstance(to.where, slice):
        keys, values = kv[0, to.where], kv[1, to.where]
    else:
        keys, values = kv[0].index_select(0, to.where), kv[1].index_select(0, to.where)
    pairs, kv_heads, size, _ = keys.shape
    group = heads // kv_heads
    queries_of_pairs = queries.index_select(0, to.owner).view(pairs * kv_heads, group, dim)
    keys = keys.view(pairs * kv_heads, size, dim).transpose(1, 2)
    mask = to.mask.expand(-1, group, -1)
    scores = torch.baddbmm(mask, queries_of_pairs, keys, alpha=scale).float()
    table = scores.new_full((count * to.width + 1, heads), -torch.inf)
    table.index_copy_(0, to.seat, scores.amax(-1).view(pairs, heads))
    peak = table[:-1].view(count, to.width, heads).amax(1)
    least = peak.clamp_min(torch.finfo(peak.dtype).min)  # where no token is seen
    scores -= least.index_select(0, to.owner).view(pairs * kv_heads, group, 1)
    shares = scores.exp_()
    parts = torch.bmm(shares.to(values.dtype), values.view(pairs * kv_heads, size, dim))
    weight = peak.new_zeros(count, heads).index_add_(0, to.owner, shares.sum(-1).view(-1, heads))
    total = peak.new_zeros(count, heads * dim)
    total.index_add_(0, to.owner, parts.view(pairs, -1).float())
    return Partial(total.view(count, heads, dim), weight, peak)


def chunk(queries: Tensor, keys: Tensor, values: Tensor, kv: Tensor, piece: PrefillChunk) -> Tensor:
    """A stretch of one prompt: `queries` [tokens, heads, head_dim], with its own `keys` and
    `values` [tokens, KV heads, head_dim], which the cache `kv` holds already.
    """
    if piece.blocks is None:
        return _attended(queries, keys, values, None)
    assert piece.mask is not None
    rows, tokens = piece.mask.shape
    keys, values = (_in_order(kv[n], piece.blocks, tokens) for n in (0, 1))
    if rows <= _TILE:
        return _attended(queries, keys, values, piece.mask)
    parts = []
    for begin in range(0, rows, _TILE):
        end = min(begin + _TILE, rows)
        visible = tokens - rows + end
        mask = piece.mask[begin:end, :visible]
        parts.append(_attended(queries[begin:end], keys[:visible], values[:visible], mask))
    return torch.cat(parts)


def _attended(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """None: each sees itself and those before it."""
    output = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return output[0].transpose(0, 1)


def _in_order(cached: Tensor, blocks: Tensor, tokens: int) -> Tensor:
    """[tokens, KV heads, head_dim] from the blocks of one sequence."""
    return cached.index_select(0, blocks).transpose(1, 2).flatten(0, 1)[:tokens]
