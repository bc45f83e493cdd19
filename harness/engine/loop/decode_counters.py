"""Requests that decode, as counters: a decode step touches none of them.

A tick counts the steps; a heap holds the tick at which each will end; `kv_sum` is the sum of their
KV lengths; `residues[k]` counts those that need a new block whenever tick = k (mod block size).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import Final

from ....workloads.errors import SloBenchError
from ...core.compiled import mypyc_attr
from ...core.kv.kv_cache_manager import KVBlocks
from ...core.state import Phase, RequestState
from .measures import Measures

_DECODE: Final = Phase.DECODE


@mypyc_attr(allow_interpreted_subclasses=True)
class DecodeCounters:
    """The decoding part of a batch. What stands on a request holds as of the tick it began at."""

    __slots__ = (
        "_entered",
        "_mask",
        "_ticks0",
        "begins",
        "decoding",
        "ends",
        "kv_manager",
        "kv_sum",
        "measures",
        "residues",
        "tick",
    )

    def __init__(self, kv_manager: KVBlocks, measures: Measures) -> None:
        bs = kv_manager.block_size
        if bs & (bs - 1):
            raise SloBenchError(f"block_size must be a power of two but is {bs}")
        self.kv_manager = kv_manager
        self.measures = measures
        self.decoding: dict[RequestState, None] = {}
        self.tick = 0
        self._ticks0 = 0  # sum of their `tick0`
        self.kv_sum = 0
        self.residues = [0] * bs
        # When each will end. The first entry is of a decoding request; others may be stale.
        self.ends: list[tuple[int, int, int, RequestState]] = []
        # tick - KV tokens of each request, ascending (the longest first); None: not kept track of.
        self.begins: list[int] | None = None
        self._mask = bs - 1
        self._entered = 0

    def _start_decode(self, r: RequestState) -> None:
        tick = self.tick
        r.phase = _DECODE
        r.tick0 = tick
        self._ticks0 += tick
        r.residue = residue = (tick - r.kv_tokens) & self._mask
        self.residues[residue] += 1
        self.kv_sum += r.kv_tokens
        if r.last_token_s != self.measures.last_decode_s:
            self.measures.join(r.last_token_s, not self.decoding)
        self.decoding[r] = None
        self._entered = entered = self._entered + 1
        end_tick = tick + r.output_tokens - r.emitted_tokens
        heappush(self.ends, (end_tick, entered, r.version, r))
        if self.begins is not None:
            insort(self.begins, tick - r.kv_tokens)

    def _stop_decode(self, r: RequestState) -> None:
        """Bring the lengths of `r` up to the present tick and take it out of the counters."""
        steps = self.tick - r.tick0
        self._ticks0 -= r.tick0
        self.measures.decode_tokens += steps
        if steps:
            r.last_token_s = self.measures.last_decode_s
        else:
            self.measures.unjoin(r.last_token_s)
        r.kv_tokens += steps
        r.emitted_tokens += steps
        r.blocks = -(-r.kv_tokens // self.kv_manager.block_size)
        self.residues[r.residue] -= 1
        self.kv_sum -= r.kv_tokens
        if self.begins is not None:
            del self.begins[bisect_left(self.begins, self.tick - r.kv_tokens)]
        del self.decoding[r]
        r.version += 1
        ends = self.ends
        while ends and ends[0][3].version != ends[0][2]:
            heappop(ends)

    def finish_due(self) -> bool:
        """Finish decoding requests whose last token is out. Returns True if there was one."""
        ends, tick, bs = self.ends, self.tick, self.kv_manager.block_size
        ended = False
        while ends:
            end_tick, _, version, r = ends[0]
            if version == r.version:
                if end_tick > tick:
                    break
                steps = tick - r.tick0
                self._ticks0 -= r.tick0
                r.emitted_tokens = r.output_tokens
                r.kv_tokens = kv_tokens = r.kv_tokens + steps
                r.blocks = -(-kv_tokens // bs)
                self.residues[r.residue] -= 1
                self.kv_sum -= kv_tokens
                if self.begins is not None:
                    del self.begins[bisect_left(self.begins, tick - kv_tokens)]
                del self.decoding[r]
                self.measures.decode_tokens += steps
                self._finish(r)
                ended = True
            heappop(ends)
        return ended

    def _finish(self, r: RequestState) -> None:
        """`r` has all its tokens and decodes no more."""
        raise NotImplementedError
