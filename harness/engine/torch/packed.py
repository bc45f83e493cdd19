"""The KV of a layer on its way to another process: blocks in use, on the device and swapped out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LayerKv(NamedTuple):
    """Of one layer, or some of its heads: [2, blocks, KV heads, block tokens, head_dim] each.

    `host` has no blocks where nothing is swapped.
    """

    kv: Tensor
    host: Tensor

    def heads(self, which: slice) -> LayerKv:
        """Of these heads alone, in memory of its own."""
        return LayerKv(self.kv[:, :, which].clone(), self.host[:, :, which].clone())

    def joined(self, other: LayerKv) -> LayerKv:
        """With the heads of the other after these."""
        return LayerKv(torch.cat([self.kv, other.kv], 2), torch.cat([self.host, other.host], 2))

    @property
    def gone(self) -> LayerKv:
        """Placeholder of a layer that is at another worker."""
        return LayerKv(self.kv[:, :0].clone(), self.host[:, :0].clone())


@dataclass(frozen=True)
class InUse:
    """Blocks that hold anything that will be read again."""

    blocks: Sequence[int]
    num_cpu_blocks: Sequence[int] = ()


@dataclass(frozen=True)
class Packed:
    """What `LayerKv` had in blocks in use, and how many blocks there are."""

    kv: Tensor
    host: Tensor
    in_use: InUse
    blocks: int
    num_cpu_blocks: int

    @property
    def nbytes(self) -> int:
        """Bytes that a move transfers."""
        moved: int = self.kv.nbytes + self.host.nbytes
        return moved


def packed(held: LayerKv, in_use: InUse | None) -> Packed:
    """Pack a layer for a move. `in_use`: ids of the KV blocks that move; None: all blocks."""
    blocks, num_cpu_blocks = held.kv.shape[1], held.host.shape[1]
    if in_use is None:
        in_use = InUse(list(range(blocks)), list(range(num_cpu_blocks)))
    return Packed(
        _picked(held.kv, in_use.blocks),
        _picked(held.host, in_use.num_cpu_blocks if num_cpu_blocks else ()),
        in_use,
        blocks,
        num_cpu_blocks,
    )


def unpacked(of: Packed) -> LayerKv:
    """The same, in memory of its own."""
    num_cpu_blocks = of.in_use.num_cpu_blocks if of.num_cpu_blocks else ()
    return LayerKv(
        _spread(of.kv, of.in_use.blocks, of.blocks),
        _spread(of.host, num_cpu_blocks, of.num_cpu_blocks),
    )


def _picked(kv: Tensor, blocks: Sequence[int]) -> Tensor:
    return kv.index_select(1, _index(blocks, kv))


def _spread(kv: Tensor, blocks: Sequence[int], of: int) -> Tensor:
    made = kv.new_zeros(kv.shape[0], of, *kv.shape[2:])
    return made.index_copy_(1, _index(blocks, kv), kv)


def _index(blocks: Sequence[int], kv: Tensor) -> Tensor:
    return torch.tensor(list(blocks), dtype=torch.int64, device=kv.device)
