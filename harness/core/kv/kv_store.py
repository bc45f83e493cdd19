"""A KV store that all instances share: prefixes in host memory, and below it on disk.

Source: BanaServe (docs/papers.md), §4.3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....predictors.specs import LinkSpec
from ....workloads.errors import SloBenchError


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A kind of memory that holds KV: how much, and the link over which a GPU reads it."""

    name: str
    capacity_bytes: int
    link: LinkSpec


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
        self._tiers = tiers
        self._units: list[dict[int, None]] = [{} for _ in tiers]  # least recently used first
        self._tier_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tier_of)

    def __contains__(self, unit: int) -> bool:
        return unit in self._tier_of

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """Bytes stored in each tier."""
        return tuple(len(units) * self.unit_bytes for units in self._units)

    def put(self, units: Iterable[int]) -> None:
        """Keep these; what is there already becomes the most recently used."""
        for unit in units:
            self._forget(unit)
            self._place(unit, 0)

    def by_tier(self, units: Sequence[int]) -> list[int]:
        """Of the leading `units` that the store holds, how many lie in each tier."""
        tier_units = [0] * len(self._tiers)
        for unit in units:
            tier = self._tier_of.get(unit)
            if tier is None:
                break
            tier_units[tier] += 1
        return tier_units

    def load_s(self, units: Sequence[int]) -> float:
        """Seconds to read these units, all of which are here, each over the link of its tier."""
        return sum(
            tier.link.transfer_s(n * self.unit_bytes)
            for tier, n in zip(self._tiers, self.by_tier(units), strict=True)
            if n
        )

    def _forget(self, unit: int) -> None:
        tier = self._tier_of.pop(unit, None)
        if tier is not None:
            del self._units[tier][unit]

    def _place(self, unit: int, level: int) -> None:
        """Store the unit in this tier or the next one that is large enough; the oldest units are
        evicted.
        """
        for tier in range(level, len(self._tiers)):
            capacity, units = self._tiers[tier].capacity_bytes // self.unit_bytes, self._units[tier]
            if capacity:
                if len(units) >= capacity:
                    oldest = next(iter(units))
                    self._forget(oldest)
                    self._place(oldest, tier + 1)
                units[unit] = None
                self._tier_of[unit] = tier
                return
