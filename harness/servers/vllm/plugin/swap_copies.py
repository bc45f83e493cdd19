"""Copies of KV blocks between a worker's device and host memory, all layers in one. Needs torch.

On CUDA they run on a stream of their own, through pinned memory: blocks are gathered from all
layers into one buffer on the device, which then crosses the link in as few copies as the place in
host memory has pieces. Swaps are part of a step, as in the policies' costs: the stream waits for
the computation before it, and the computation behind it for the stream; the host waits for neither.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

_STAGED_BYTES = 64 * 2**20  # of device memory, beside what the server has reserved
_ALIGNED_BYTES = 16


class Ticket(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Whether it has ended."""

    def finish(self) -> float:
        """Wait until it has ended; return the seconds that it took."""


class Lane(Protocol):
    """Where copies run, in order with the computation before and after."""

    def submit(self, copy: Callable[[], None]) -> Ticket:
        """Run `copy`, now or later."""


@dataclass(frozen=True)
class Done:
    """A copy that has ended."""

    seconds: float

    def done(self) -> bool:
        return True

    def finish(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class HostLane:
    """Copies within host memory, which run at once."""

    clock: Callable[[], float] = time.perf_counter

    def submit(self, copy: Callable[[], None]) -> Ticket:
        begin_s = self.clock()
        copy()
        return Done(self.clock() - begin_s)


@dataclass(frozen=True)
class _Events:
    begin: Any
    end: Any

    def done(self) -> bool:
        return bool(self.end.query())

    def finish(self) -> float:
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1e3


class CudaLane:
    """A stream of its own on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Stream  # has no types
        self._device, self._stream = device, make(device)

    def submit(self, copy: Callable[[], None]) -> Ticket:
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        compute = torch.cuda.current_stream(self._device)
        # The last step may still write what goes out, or read what is overwritten.
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            begin.record(self._stream)
            copy()
            end.record(self._stream)
        compute.wait_event(end)
        return _Events(begin, end)


@dataclass
class Held:
    """Blocks in host memory: their slots, in order; `ticket`: of the copy that brings them."""

    slots: list[int]
    ticket: Ticket


@dataclass
class SwapCopies:
    """KV blocks of a worker's `layers` in host memory, at most `host_blocks`.

    `layers` have their blocks in the first dimension. In host memory a block is one row with the
    bytes of all layers.
    """

    layers: Sequence[Tensor]
    host_blocks: int
    lane: Lane | None = None  # by default that of the layers' device
    staged_blocks: int = 0  # of the buffer; by default as many as `_STAGED_BYTES` hold
    _returning: list[Held] = field(default_factory=list)  # slots free once their copy has ended

    def __post_init__(self) -> None:
        # Larger elements first, so that each begins at a multiple of its size.
        self.layers = sorted(map(widest, self.layers), key=lambda layer: -layer.element_size())
        self._device = device = self.layers[0].device
        self._widths = [layer[0].numel() * layer.element_size() for layer in self.layers]
        self.block_bytes = sum(self._widths)
        row_bytes = -(-self.block_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        staged = self.staged_blocks or max(1, _STAGED_BYTES // row_bytes)
        self.staged_blocks = min(staged, max(1, self.host_blocks))
        self._staging = torch.empty(
            (self.staged_blocks, row_bytes), dtype=torch.uint8, device=device
        )
        self.host = torch.empty((self.host_blocks, row_bytes), dtype=torch.uint8)
        self._free = list(range(self.host_blocks))  # a heap
        self._pinned = False
        if self.lane is None:
            self.lane = CudaLane(device) if device.type == "cuda" else HostLane()
        if device.type == "cuda" and self.host.nbytes:
            self._pin()

    def _pin(self) -> None:
        """Page-lock the host memory as it is: `pin_memory` would take the next power of two."""
        runtime: Any = torch.cuda.cudart()
        error = runtime.cudaHostRegister(self.host.data_ptr(), self.host.nbytes, 0)
        if error.value:
            raise RuntimeError(
                f"{self.host.nbytes / 2**30:.3g} GiB of host memory for swaps cannot be pinned "
                f"({error}): fewer num_cpu_blocks, or a higher `ulimit -l`"
            )
        self._pinned = True

    def out(self, block_ids: Sequence[int]) -> Held:
        """Copy blocks to host memory; steps from now on may overwrite them."""
        slots = self._take(len(block_ids))
        ids = list(block_ids)

        def copy() -> None:
            for begin, index, staged in self._parts(ids):
                for layer, part in self._split(staged):
                    torch.index_select(layer, 0, index, out=part)
                for first, rows in stretches(slots[begin : begin + len(staged)], staged):
                    self.host[first : first + len(rows)].copy_(rows, non_blocking=True)

        return Held(slots, self._submit(copy))

    def back(self, held: Held, block_ids: Sequence[int], first: int = 0) -> Ticket:
        """Copy the blocks from number `first` on to these of the device; all leave host memory.

        Steps from now on may read them.
        """
        held.ticket.finish()
        ids, slots = list(block_ids), held.slots[first : first + len(block_ids)]

        def copy() -> None:
            for begin, index, staged in self._parts(ids):
                for at_slot, rows in stretches(slots[begin : begin + len(staged)], staged):
                    rows.copy_(self.host[at_slot : at_slot + len(rows)], non_blocking=True)
                for layer, part in self._split(staged):
                    layer.index_copy_(0, index, part)

        ticket = self._submit(copy)
        self._returning.append(Held(held.slots, ticket))
        return ticket

    def drop(self, held: Held) -> None:
        """Blocks in host memory that nobody will read."""
        self._returning.append(held)

    def close(self) -> None:
        """Wait for all copies, and give the pinned memory back."""
        self._reclaim(wait=True)
        if self._pinned:
            torch.cuda.synchronize(self._device)  # what is still held has been copied, too
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.host.data_ptr())
            self._pinned = False

    def _submit(self, copy: Callable[[], None]) -> Ticket:
        assert self.lane is not None
        return self.lane.submit(copy)

    def _take(self, n: int) -> list[int]:
        """`n` free slots, the lowest, which makes for long pieces."""
        self._reclaim(wait=False)
        if n > len(self._free):
            self._reclaim(wait=True)
        if n > len(self._free):
            raise RuntimeError(
                f"{n} blocks are to be swapped out, but {len(self._free)} of {self.host_blocks} "
                "in host memory are free"
            )
        return [heapq.heappop(self._free) for _ in range(n)]

    def _reclaim(self, *, wait: bool) -> None:
        still = []
        for held in self._returning:
            if wait:
                held.ticket.finish()
            if not held.ticket.done():
                still.append(held)
                continue
            for slot in held.slots:
                heapq.heappush(self._free, slot)
        self._returning = still

    def _parts(self, ids: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Blocks by as many as the buffer holds: where they begin, their index, their rows."""
        pin = self._device.type == "cuda"
        for begin in range(0, len(ids), self.staged_blocks):
            part = ids[begin : begin + self.staged_blocks]
            index = torch.tensor(part, dtype=torch.long, pin_memory=pin)
            yield begin, index.to(self._device, non_blocking=True), self._staging[: len(part)]

    def _split(self, staged: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer with its columns of the rows, in its own type and shape."""
        end = 0
        for layer, width in zip(self.layers, self._widths, strict=True):
            begin, end = end, end + width
            columns = staged[:, begin:end].view(layer.dtype)
            yield layer, columns.view(len(staged), *layer.shape[1:])


def widest(layer: Tensor) -> Tensor:
    """The same memory in larger elements, of which there are fewer to move, where that can be."""
    try:
        return layer.view(len(layer), -1).view(torch.int64)
    except RuntimeError:
        return layer


def stretches(slots: Sequence[int], rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Rows whose slots follow each other, with the first slot."""
    begin = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            yield slots[begin], rows[begin:end]
            begin = end
