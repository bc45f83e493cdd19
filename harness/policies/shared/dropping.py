"""Baselines that drop who has not begun when its time to first token has passed.

Source: Ascendra (see docs/papers.md), §6.3 and §8.6: in its test of overload all systems drop.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..sarathi import Sarathi
from ..vllm import Vllm
from ..vllm_v0 import VllmV0
from .timeouts import DropsOverdue


@dataclass(frozen=True)
class VllmDrop(DropsOverdue, Vllm):
    """vLLM V1 that drops the overdue."""


@dataclass(frozen=True)
class VllmV0Drop(DropsOverdue, VllmV0):
    """vLLM 0.2 that drops the overdue."""


@dataclass(frozen=True)
class SarathiDrop(DropsOverdue, Sarathi):
    """Sarathi-Serve that drops the overdue."""
