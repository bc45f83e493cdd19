"""vLLM as published, but the preempted are swapped to host memory instead of recomputed.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), §4.5; the baseline vLLM-swap of AdaptiveLLM (§4).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.decisions import PreemptBy
from ..core.policy import knob
from ..core.state import RequestState
from ..core.view import View
from .vllm_v0 import VllmV0


@dataclass(frozen=True)
class VllmSwap(VllmV0):
    """Preempts by swapping to host memory; the swapped come back before anybody new enters.

    What happens when host memory is full is not published (the AdaptiveLLM paper, which uses it
    as a baseline, blames host memory for its throughput). `host_full`: `stall` lets the victim
    keep its blocks and sit out; `recompute` throws its KV away.
    """

    host_full: str = knob("stall", choices=("stall", "recompute"))

    def preempt_by(self, r: RequestState, view: View) -> PreemptBy:
        if view.held_blocks(r) <= view.host_free_blocks:
            return PreemptBy.SWAP
        return PreemptBy(self.host_full)
