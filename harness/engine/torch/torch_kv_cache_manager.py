"""The KV cache manager with ids: which blocks hold a request's KV, and which hold cached prefixes.

The loop counts blocks when it decides; ids are taken when they are needed, right before an
iteration is executed. Counts never fall behind, so there is always an id. With a store,
prefixes are also found beyond the instance's own device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from ...core.kv.kv_cache_manager import KVCacheManager
from ...core.kv.kv_store_manager import StoreKVCacheManager
from ...core.state import RequestState
from .pipeline import Traffic
from .threads import unpin
from .tiers import Tiers, path_of


class TorchKVCacheManager(KVCacheManager):
    """The lowest free ids are taken first: what is in use stays close together. `spare`: blocks
    that it may be given beside its `total`.
    """

    def __init__(
        self,
        total: int,
        block_size: int = 16,
        host_total: int = 0,
        prefix_block_size: int = 0,
        spare: int = 0,
    ) -> None:
        super().__init__(total, block_size, host_total, prefix_block_size)
        self._ids = total + spare
        self._free_ids = list(range(self._ids))
        self._tables: dict[RequestState, list[int]] = {}
        self._unit_ids: dict[int, list[int]] = {}  # by hash
        self.last_released: list[int] = []

    def table(self, r: RequestState) -> list[int]:
        """The ids of the blocks of `r`, in the order of its tokens; emptied when it is released."""
        return self._tables.setdefault(r, [])

    def allocate_slots(self, r: RequestState, tokens: int) -> None:
        """Assign blocks for that many tokens of `r`, which the scheduler has counted already."""
        table = self.table(r)
        for _ in range(len(table), self.blocks(tokens)):
            table.append(heappop(self._free_ids))
        if r.shared:
            self._name_units(r, table)

    def allocate(self, r: RequestState, units: int) -> Any:
        seconds: Any = super().allocate(r, units)
        assert r.shared is not None
        table = self.table(r)
        for unit in r.shared:
            table += self._ids_of(unit)
        return seconds

    def _ids_of(self, unit: int) -> list[int]:
        return self._unit_ids[unit]

    def cache_blocks(self, r: RequestState, kv_tokens: int) -> None:
        """Cache units as `KVCacheManager` does; units whose blocks have no ids yet get them in
        `allocate_slots`.
        """
        super().cache_blocks(r, kv_tokens)
        self._name_units(r, self.table(r))

    def cache_scheduled(self, r: RequestState, kv_tokens: int) -> None:
        self.allocate_slots(r, kv_tokens)
        super().cache_scheduled(r, kv_tokens)

    def _name_units(self, r: RequestState, table: list[int]) -> None:
        size = self.unit_blocks
        for place, unit in enumerate(r.shared or ()):
            if unit not in self._unit_ids and len(table) >= (place + 1) * size:
                self._unit_ids[unit] = table[place * size : (place + 1) * size]

    def resize(self, total: int) -> None:
        super().resize(min(total, self._ids))

    def ids_in_use(self) -> list[int]:
        """Ids of blocks that a request holds or that hold a cached prefix."""
        free = set(self._free_ids)
        return [block for block in range(self._ids) if block not in free]

    def traffic(self) -> Traffic | None:
        """What the next iteration brings from a store, and writes there; None: there is none."""
        return None

    def settle(self) -> None:
        """Called after each iteration; with a store, what was written there becomes usable."""

    def flush(self) -> None:
        """Return when all that goes to a store is there."""

    def _give_back(self, r: RequestState) -> None:
        # Contents of freed blocks stay readable until the next `allocate_slots`.
        table = self._tables.pop(r, [])
        self.last_released = table.copy()
        self._name_units(r, table)
        for block in table[len(r.shared or ()) * self.unit_blocks :]:
            heappush(self._free_ids, block)
        table.clear()
        super()._give_back(r)

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


_MOST_OPEN = 512  # units held open between a look and the iteration that loads them


class SharedUnits:
    """What one instance sees of a store, and what it wants to write there.

    A unit that was found stays readable until the next iteration is over, whatever other processes
    do to the store. Files move between tiers in a thread of their own.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.new: dict[int, None] = {}  # to be stored
        self._open: dict[int, int] = {}
        self._used: dict[int, None] = {}  # least recently used first
        self._keeper = ThreadPoolExecutor(1, "keeps KV", unpin)
        self._kept: dict[int, Future[None]] = {}  # on their way into the store

    def __contains__(self, unit: int) -> bool:
        if unit not in self._open and len(self._open) < _MOST_OPEN:
            opened = self.tiers.open(unit)
            if opened is not None:
                self._open[unit] = opened
        return unit in self._open

    def load_s(self, units: Sequence[int]) -> float:
        """0: loading is part of the time of the iteration."""
        return 0.0

    def put(self, units: Iterable[int]) -> None:
        """Mark units as used; those that the store lacks are stored with the next iteration."""
        for unit in units:
            self._used.pop(unit, None)
            self._used[unit] = None
            stored = unit in self._open or unit in self._kept or unit in self.tiers
            if not stored:
                self.new[unit] = None

    def path(self, unit: int) -> str:
        """Of a unit that was found, for any process."""
        return path_of(self._open[unit])

    def settle(self, stored: Iterable[int]) -> None:
        """End the iteration: its stored units become readable for all."""
        for unit in stored:
            del self.new[unit]
            self._used.setdefault(unit)
        self._forget_kept(wait=False)
        if self._used:
            units = list(self._used)
            self._kept |= dict.fromkeys(units, self._keeper.submit(self.tiers.keep, units))
            self._used.clear()
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def flush(self) -> None:
        """Return when all is there for all."""
        self.settle(())
        self._forget_kept(wait=True)

    def _forget_kept(self, *, wait: bool) -> None:
        done = {u: future for u, future in self._kept.items() if wait or future.done()}
        for unit, future in done.items():
            future.result()
            del self._kept[unit]


class PagedStoreKVCacheManager(StoreKVCacheManager, TorchKVCacheManager):
    """A prefix is taken from the device as far as it lies there, and from the store beyond."""

    store: SharedUnits

    def __init__(self, store: SharedUnits, *counts: int) -> None:
        """`counts`: the arguments of `TorchKVCacheManager`."""
        TorchKVCacheManager.__init__(self, *counts)
        self.store, self.store_hits = store, 0
        self._coming: dict[int, None] = {}  # units that the next iteration loads

    def _ids_of(self, unit: int) -> list[int]:
        if unit not in self._unit_ids:
            TorchKVCacheManager.evict(self)  # then there are as many free ids as free blocks
            count = self.unit_blocks
            if len(self._free_ids) < count:  # requests of this step have ids not yet counted
                TorchKVCacheManager.evict(self, self.free - self.idle_blocks + count)
            self._unit_ids[unit] = [heappop(self._free_ids) for _ in range(count)]
            self._coming[unit] = None
        return self._unit_ids[unit]

    def evict(self, held: int = 0) -> None:
        super().evict(held)
        for units in (self._coming, self.store.new):
            for unit in [u for u in units if u not in self.refs]:
                del units[unit]

    def forget(self) -> None:
        super().forget()
        self._coming.clear()
        self.store.new.clear()

    def traffic(self) -> Traffic:
        """Transfers of the next iteration, whose blocks have been reserved."""
        store, ids = self.store, self._unit_ids
        units = [unit for unit in store.new if unit in ids]
        return Traffic(
            store.tiers.shape,
            [(store.path(unit), ids[unit]) for unit in self._coming],
            [(str(store.tiers.draft(unit)), ids[unit]) for unit in units],
        )

    def settle(self) -> None:
        """Mark the blocks that this iteration wrote as present in the store."""
        self.store.settle([u for u in self.store.new if u in self._unit_ids])
        self._coming.clear()

    def flush(self) -> None:
        self.store.flush()
