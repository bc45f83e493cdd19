"""vLLM that loads cached KV layer by layer, in parallel to the computation.

Source: BanaServe (docs/papers.md), §4.3.3; Mooncake (Qin et al., FAST 2025), §5.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.decisions import Limits
from ..core.view import View
from .vllm import Vllm


@dataclass(frozen=True)
class LayerwiseVllm(Vllm):
    """Schedules as vLLM does; loading lengthens a step only by what exceeds its computation."""

    def limits(self, view: View) -> Limits:
        return replace(super().limits(view), overlap_swap=True)
