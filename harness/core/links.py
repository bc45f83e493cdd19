"""What KV moves over between instances."""

from __future__ import annotations

from typing import Protocol

from .instance import Instance


class Links(Protocol):
    """Says when a transfer ends; books what it occupies."""

    def ends_s(self, source: Instance, target: Instance, kv_tokens: int, now_s: float) -> float:
        """Time at which the KV of `tokens` tokens is at `target` if it leaves `source` now."""


class NoDelay:
    """Links without delay: KV arrives at once."""

    def ends_s(self, source: Instance, target: Instance, kv_tokens: int, now_s: float) -> float:
        """Time at which the KV of `tokens` tokens is at `target` if it leaves `source` now."""
        return now_s
