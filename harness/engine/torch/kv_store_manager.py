"""The KV cache manager of an instance that finds prefixes in a store beyond its own device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heappop

from ...core.kv_store_manager import StoreKVCacheManager
from .kv_cache_manager import TorchKVCacheManager
from .pipeline import Traffic
from .tiers import Tiers, path_of

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
        self._keeper = ThreadPoolExecutor(1, "keeps KV")
        self._kept: dict[int, Future[None]] = {}  # on their way into the store

    def __contains__(self, unit: int) -> bool:
        if unit not in self._open and len(self._open) < _MOST_OPEN:
            found = self.tiers.open(unit)
            if found is not None:
                self._open[unit] = found
        return unit in self._open

    def load_s(self, units: Sequence[int]) -> float:
        """See `KvStore`: it is in what the iteration takes."""
        return 0.0

    def put(self, units: Iterable[int]) -> None:
        """See `KvStore`; what is not there is stored with the next iteration."""
        for unit in units:
            self._used.pop(unit, None)
            self._used[unit] = None
            known = unit in self._open or unit in self._kept or unit in self.tiers
            if not known:
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

    def __init__(
        self,
        store: SharedUnits,
        total: int,
        block_size: int = 16,
        host_total: int = 0,
        prefix_block_size: int = 0,
    ) -> None:
        super().__init__(store, total, block_size, host_total, prefix_block_size)
        self.shared_units = store
        self._coming: dict[int, None] = {}  # units that the next iteration loads

    def _ids_of(self, unit: int) -> list[int]:
        if unit not in self._unit_ids:
            TorchKVCacheManager.evict(self)  # then there are as many free ids as free blocks
            count = self.unit_blocks
            self._unit_ids[unit] = [heappop(self._free_ids) for _ in range(count)]
            self._coming[unit] = None
        return self._unit_ids[unit]

    def evict(self, held: int = 0) -> None:
        super().evict(held)
        for units in (self._coming, self.shared_units.new):
            for unit in [u for u in units if u not in self.refs]:
                del units[unit]

    def forget(self) -> None:
        super().forget()
        self._coming.clear()
        self.shared_units.new.clear()

    def traffic(self) -> Traffic:
        """Transfers of the next iteration, whose blocks have been reserved."""
        store, ids = self.shared_units, self._unit_ids
        wanted = [unit for unit in store.new if unit in ids]
        return Traffic(
            store.tiers.shape,
            [(store.path(unit), ids[unit]) for unit in self._coming],
            [(str(store.tiers.draft(unit)), ids[unit]) for unit in wanted],
        )

    def settle(self) -> None:
        """End the iteration."""
        self.shared_units.settle([u for u in self.shared_units.new if u in self._unit_ids])
        self._coming.clear()
