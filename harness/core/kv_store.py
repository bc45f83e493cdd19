"""A KV store that all instances share: prefixes in host memory, and below it on disk.

Source: BanaServe (docs/papers.md), §4.3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...predictors.specs import LinkSpec
from ...workloads.errors import SloBenchError
from .network import MemoryPool


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A kind of memory that holds KV: how much, and the link over which a GPU reads it."""

    name: str
    capacity_bytes: int
    link: LinkSpec


class _Tier:
    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self.memory = MemoryPool(spec.name, spec.capacity_bytes)
        self.units: dict[int, None] = {}  # least recently used first


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading units of a prefix that the store holds; of those, how many lie in each tier."""

    units: int
    by_tier: tuple[int, ...]


class KvStore:
    """Units of KV by the hash of their prefix; least recently used go one tier down, then out.

    What is in use on a GPU is the business of that instance's own KV cache manager: the GPU is the
    tier above these. A hash names its tokens and all before them, so that equal hashes are equal KV
    on every instance that serves the same model.
    """

    def __init__(self, tiers: Sequence[TierSpec], unit_bytes: int) -> None:
        """`tiers`: fastest first. `unit_bytes`: KV of one unit, all layers.

        Raises:
            SloBenchError: no tier, or units without bytes.
        """
        if not tiers or unit_bytes <= 0:
            raise SloBenchError("a KV store needs a tier, and units of at least one byte")
        self.unit_bytes = unit_bytes
        self._tiers = [_Tier(spec) for spec in tiers]
        self._where: dict[int, _Tier] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, unit: int) -> bool:
        return unit in self._where

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """Bytes stored in each tier."""
        return tuple(tier.memory.used_bytes for tier in self._tiers)

    def put(self, units: Iterable[int]) -> None:
        """Keep these; what is there already becomes the most recently used."""
        for unit in units:
            self._forget(unit)
            self._place(unit, 0)

    def find(self, units: Sequence[int]) -> PrefixHit:
        """How many of the leading `units` are here, and where. Changes nothing."""
        by_tier = [0] * len(self._tiers)
        n = 0
        for unit in units:
            tier = self._where.get(unit)
            if tier is None:
                break
            by_tier[self._tiers.index(tier)] += 1
            n += 1
        return PrefixHit(n, tuple(by_tier))

    def load_s(self, units: Sequence[int]) -> float:
        """Seconds to read these units, all of which are here, each over the link of its tier."""
        by_tier = self.find(units).by_tier
        return sum(
            tier.spec.link.transfer_s(n * self.unit_bytes)
            for tier, n in zip(self._tiers, by_tier, strict=True)
            if n
        )

    def use(self, units: Sequence[int]) -> float:
        """Read these units (`load_s`); they are then in the first tier, most recently used."""
        seconds = self.load_s(units)
        self.put(reversed(units))  # of a prefix its end goes first
        return seconds

    def _forget(self, unit: int) -> None:
        tier = self._where.pop(unit, None)
        if tier is not None:
            del tier.units[unit]
            tier.memory.give_back(self.unit_bytes)

    def _place(self, unit: int, level: int) -> None:
        """Store the unit in this tier or the next one that is large enough; the oldest units are
        evicted.
        """
        while level < len(self._tiers):
            tier = self._tiers[level]
            if tier.memory.capacity_bytes >= self.unit_bytes:
                break
            level += 1
        else:
            return
        if tier.memory.free_bytes < self.unit_bytes:
            oldest = next(iter(tier.units))
            self._forget(oldest)
            self._place(oldest, level + 1)
        tier.memory.take(self.unit_bytes)
        tier.units[unit] = None
        self._where[unit] = tier
