"""KV blocks in memory: one tensor a layer on the device, and their like in host memory.

`Packed` is the KV of a layer on its way to another process: blocks in use, on the device and
swapped out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .decoder_config import DecoderConfig


class KvCache:
    """`layers[l]` is [2, blocks, KV heads, block tokens, head_dim]: keys, then values.

    Zero at first: what a block holds beyond its tokens is multiplied by zero, and must be a number.
    """

    def __init__(
        self,
        config: DecoderConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        pinned: bool = False,
    ) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.kv_heads = config.kv_heads
        shape = (2, blocks, config.kv_heads, block_size, config.head_dim)
        pin = pinned and torch.cuda.is_available()
        self.layers: list[Tensor] = [
            torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin)
            for _ in range(config.layers)
        ]


class Swapper:
    """Copies whole blocks between a KV cache and one of the same layout in host memory.

    On CUDA the blocks are first gathered on the device, in order with the computation; the copy
    over the link then runs on a stream of its own, in parallel to the next computation. The device
    waits for blocks that return before it scatters them.
    """

    def __init__(self, cache: KvCache, host: KvCache) -> None:
        self._cache, self._host = cache, host
        device = cache.layers[0].device
        make: Any = torch.cuda.Stream  # has no types
        self._stream = make(device) if device.type == "cuda" else None
        self._device = device

    def out(self, blocks: Sequence[int], num_cpu_blocks: Sequence[int]) -> None:
        """Device to host. The blocks may be overwritten as soon as this returns."""
        if self._stream is None:
            self._copy(self._cache, blocks, self._host, num_cpu_blocks)
            return
        index = torch.tensor(blocks, device=self._device)
        staged = [layer.index_select(1, index) for layer in self._cache.layers]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for held, layer in zip(staged, self._host.layers, strict=True):
                held.record_stream(self._stream)
                for there, here in stretches(num_cpu_blocks, layer, held):
                    there.copy_(here, non_blocking=True)

    def into(self, num_cpu_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks from host to device."""
        if self._stream is None:
            self._copy(self._host, num_cpu_blocks, self._cache, blocks)
            return
        index = torch.tensor(blocks, device=self._device)
        with torch.cuda.stream(self._stream):  # in order behind what went out before
            staged = [torch.empty_like(t[:, : len(blocks)]) for t in self._cache.layers]
            for held, layer in zip(staged, self._host.layers, strict=True):
                for there, here in stretches(num_cpu_blocks, layer, held):
                    here.copy_(there, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for held, layer in zip(staged, self._cache.layers, strict=True):
            held.record_stream(torch.cuda.current_stream(self._device))
            layer.index_copy_(1, index, held)

    def wait(self) -> None:
        """Wait until every copy is done."""
        if self._stream is not None:
            self._stream.synchronize()

    @staticmethod
    def _copy(
        source: KvCache, source_blocks: Sequence[int], target: KvCache, target_blocks: Sequence[int]
    ) -> None:
        for a, b in zip(source.layers, target.layers, strict=True):
            if a.shape[1]:  # else the layer is at another worker
                copy_blocks(a, source_blocks, b, target_blocks)


def stretches(
    num_cpu_blocks: Sequence[int], host: Tensor, staged: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of one layer in host memory, each with the part of `staged` [2, blocks, …] for the same
    blocks. Both are contiguous: only such copies run in parallel to the computation.
    """
    begin = 0
    for end in range(1, len(num_cpu_blocks) + 1):
        if end < len(num_cpu_blocks) and num_cpu_blocks[end] == num_cpu_blocks[end - 1] + 1:
            continue
        first = num_cpu_blocks[begin]
        for kind in (0, 1):
            yield host[kind, first : first + end - begin], staged[kind, begin:end]
        begin = end


def copy_blocks(
    source: Tensor, source_blocks: Sequence[int], target: Tensor, target_blocks: Sequence[int]
) -> None:
    """Blocks of one layer, [2, blocks, …], from one memory to another."""
    target.index_copy_(
        1, torch.tensor(target_blocks), source.index_select(1, torch.tensor(source_blocks))
    )


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


def unpacked(packed_kv: Packed) -> LayerKv:
    """The same, in memory of its own."""
    num_cpu_blocks = packed_kv.in_use.num_cpu_blocks if packed_kv.num_cpu_blocks else ()
    return LayerKv(
        _spread(packed_kv.kv, packed_kv.in_use.blocks, packed_kv.blocks),
        _spread(packed_kv.host, num_cpu_blocks, packed_kv.num_cpu_blocks),
    )


def _picked(kv: Tensor, blocks: Sequence[int]) -> Tensor:
    return kv.index_select(1, _index(blocks, kv))


def _spread(kv: Tensor, blocks: Sequence[int], total: int) -> Tensor:
    whole = kv.new_zeros(kv.shape[0], total, *kv.shape[2:])
    return whole.index_copy_(1, _index(blocks, kv), kv)


def _index(blocks: Sequence[int], kv: Tensor) -> Tensor:
    return torch.tensor(list(blocks), dtype=torch.int64, device=kv.device)
