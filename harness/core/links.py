"""What KV moves over between instances."""

from __future__ import annotations

from typing import Protocol

from .instance import Site


class Links(Protocol):
    """Says when a transfer ends; books what it occupies."""

    def ends_s(self, source: Site, target: Site, kv_tokens: int, now_s: float) -> float:
        """When the KV of so many tokens is at `target`, if it leaves `source` now."""
        ...


class NoDelay:
    """KV is there at once."""

    def ends_s(self, source: Site, target: Site, kv_tokens: int, now_s: float) -> float:
        return now_s
