"""The KV cache manager of an instance that finds prefixes in a shared store as well as on its own
GPU.

Source: BanaServe (docs/papers.md), §4.3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..state import RequestState
from .kv_cache_manager import KVCacheManager


class Units(Protocol):
    """A store of units (`KvStore`), as a KV cache manager needs it."""

    def __contains__(self, unit: int) -> bool: ...

    def load_s(self, units: Sequence[int]) -> float:
        """Seconds to read these units, all of which are here."""

    def put(self, units: Iterable[int]) -> None:
        """Keep these; what is there already becomes the most recently used."""


class StoreKVCacheManager(KVCacheManager):
    """Its GPU is the first tier of the store.

    Every computed unit is written to the store at once, in parallel to the computation of the next
    layer. A prefix is taken from the GPU as far as it lies there and from the store beyond; what
    comes from the store takes blocks, and time, which is hidden behind the computation as far as
    that lasts (`Limits.overlap_swap`).
    """

    __slots__ = ("store", "store_hits")

    def __init__(
        self,
        store: Units,
        total: int,
        block_size: int = 16,
        host_total: int = 0,
        prefix_block_size: int = 0,
    ) -> None:
        super().__init__(total, block_size, host_total, prefix_block_size)
        self.store = store
        self.store_hits = 0  # requests that entered with units from the store

    def get_computed_blocks(self, r: RequestState) -> int:
        refs, store = self.refs, self.store
        n = 0
        for h in r.prefix_blocks[self.stride - 1 :: self.stride]:
            if h not in refs and h not in store:
                break
            n += 1
        return min(n, (r.target_tokens - 1) // self.unit_tokens)

    def num_evictable_blocks(self, r: RequestState, units: int) -> int:
        absent = len(self._absent(r, units))
        return super().num_evictable_blocks(r, units) + absent * self.unit_blocks

    def load_s(self, r: RequestState, units: int) -> float:
        return self.store.load_s(self._absent(r, units))

    def allocate(self, r: RequestState, units: int) -> float:
        hashes, absent = self._hashes(r, units), self._absent(r, units)
        for h in absent:
            self.refs[h] = 0
            self.free -= self.unit_blocks
            self.cache_version += 1
        self.store_hits += bool(absent)
        load_s = self.store.load_s(absent)
        self.store.put(reversed(hashes))
        return load_s + super().allocate(r, units)

    def cache_blocks(self, r: RequestState, kv_tokens: int) -> None:
        units_before = len(r.shared or ())
        super().cache_blocks(r, kv_tokens)
        self.store.put(self._hashes(r, len(r.shared or ()))[units_before:])

    def _absent(self, r: RequestState, units: int) -> list[int]:
        """Of those units, what is not on this GPU."""
        return [h for h in self._hashes(r, units) if h not in self.refs]

    def _hashes(self, r: RequestState, units: int) -> tuple[int, ...]:
        return r.prefix_blocks[self.stride - 1 : units * self.stride : self.stride]
