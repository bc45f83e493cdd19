"""The KV cache manager with ids: which blocks hold a request's KV, and which hold cached prefixes.

The loop counts blocks when it decides; ids are taken when they are needed, right before an
iteration is executed. Counts never fall behind, so there is always an id.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from ...core.kv_cache_manager import KVCacheManager
from ...core.state import RequestState
from .pipeline import Traffic


class TorchKVCacheManager(KVCacheManager):
    """The lowest free ids are taken first: what is in use stays close together."""

    def __init__(
        self,
        total: int,
        block_size: int = 16,
        host_total: int = 0,
        prefix_block_size: int = 0,
    ) -> None:
        super().__init__(total, block_size, host_total, prefix_block_size)
        self._free_ids = list(range(total))
        self._tables: dict[RequestState, list[int]] = {}
        self._unit_ids: dict[int, list[int]] = {}  # by hash
        self.last_released: list[int] = []

    def table(self, r: RequestState) -> list[int]:
        """The ids of the blocks of `r`, in the order of its tokens; emptied when it is released."""
        if r not in self._tables:
            self._tables[r] = []
        return self._tables[r]

    def allocate_slots(self, r: RequestState, tokens: int) -> None:
        """Assign blocks for that many tokens of `r`, which the scheduler has counted already."""
        table = self.table(r)
        for _ in range(len(table), self.blocks(tokens)):
            table.append(heappop(self._free_ids))
        if r.shared:
            self._name_units(r, table)

    def allocate(self, r: RequestState, units: int) -> Any:
        found: Any = super().allocate(r, units)
        assert r.shared is not None
        table = self.table(r)
        for unit in r.shared:
            table += self._ids_of(unit)
        return found

    def _ids_of(self, unit: int) -> list[int]:
        return self._unit_ids[unit]

    def cache_blocks(self, r: RequestState, kv_tokens: int) -> None:
        """Cache units as `KVCacheManager` does; units whose blocks have no ids yet get them in
        `allocate_slots`.
        """
        super().cache_blocks(r, kv_tokens)
        self._name_units(r, self.table(r))

    def _name_units(self, r: RequestState, table: list[int]) -> None:
        size = self.unit_blocks
        for place, unit in enumerate(r.shared or ()):
            if unit not in self._unit_ids and len(table) >= (place + 1) * size:
                self._unit_ids[unit] = table[place * size : (place + 1) * size]

    def ids_in_use(self) -> list[int]:
        """Ids of blocks that a request holds or that hold a cached prefix."""
        free = set(self._free_ids)
        return [block for block in range(self.total) if block not in free]

    def traffic(self) -> Traffic | None:
        """What the next iteration brings from a store, and writes there; None: there is none."""
        return None

    def settle(self) -> None:
        """End the iteration."""

    def release(self, r: RequestState) -> None:
        """Free the blocks of `r`. Their contents stay readable until the next `allocate_slots`."""
        table = self._tables.pop(r, [])
        self.last_released = table.copy()
        for block in table[len(r.shared or ()) * self.unit_blocks :]:
            heappush(self._free_ids, block)
        table.clear()
        super().release(r)

    def evict(self, held: int = 0) -> None:
        before = len(self.idle)
        excess = self.idle_blocks - max(0, self.free - held)
        oldest = list(islice(self.idle, -(-excess // self.unit_blocks))) if excess > 0 else []
        super().evict(held)
        assert before - len(self.idle) == len(oldest)
        for unit in oldest:
            for block in self._unit_ids.pop(unit):
                heappush(self._free_ids, block)

    def forget(self) -> None:
        super().forget()
        for blocks in self._unit_ids.values():
            self._free_ids += blocks
        heapify(self._free_ids)
        self._unit_ids.clear()

    def check(self) -> None:
        """Every block is free, in one table, or of a cached unit; for tests."""
        seen = list(self._free_ids)
        cached = {block for blocks in self._unit_ids.values() for block in blocks}
        seen += cached
        for r, table in self._tables.items():
            shared = len(r.shared or ()) * self.unit_blocks
            seen += table[shared:]
            assert all(block in cached for block in table[:shared])
        assert sorted(seen) == list(range(self.total)), "a block is lost or held twice"
