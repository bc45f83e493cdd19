"""vLLM as published, but the preempted are swapped to host memory instead of recomputed.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), §4.5; the baseline vLLM-swap of AdaptiveLLM (§4).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..core.counters import SWAPS
from ..core.decisions import Limits, PreemptionMode
from ..core.policy import parameter
from ..core.state import RequestState
from ..core.view import View
from .vllm_v0 import VllmV0


@dataclass(frozen=True)
class VllmSwap(VllmV0):
    """Preempts by swapping to host memory; swapped requests return before any new one enters.

    What happens when host memory is full is not published (the AdaptiveLLM paper, which uses it as
    a baseline, blames host memory for its small batches). `host_full`: `admit-none` admits no
    request with which the batch, at full output lengths, could outgrow GPU and host memory
    together, so that a victim can be swapped (by tokens: where whole blocks take more, it is
    recomputed); `stall` lets the victim keep its blocks and sit out; `recompute` throws its KV
    away. A request by itself may always enter.
    """

    overlap_swap: bool = parameter(False)  # copies run in parallel to the layers' computation
    host_full: str = parameter("admit-none", choices=("admit-none", "stall", "recompute"))

    def mechanisms(self) -> dict[str, str]:
        return {SWAPS: "requests preempted to host memory"}

    def limits(self, view: View) -> Limits:
        return dataclasses.replace(super().limits(view), overlap_swap=self.overlap_swap)

    def preemption_mode(self, r: RequestState, view: View) -> PreemptionMode:
        if self.host_full != "stall" or view.held_blocks(r) <= view.host_free_blocks:
            return PreemptionMode.SWAP
        return PreemptionMode.STALL

    def headroom_blocks(self, r: RequestState, view: View) -> int:
        if self.host_full != "admit-none" or not view.n_running:
            return 0
        to_come = view.max_future_kv_tokens + r.max_output_tokens - view.emitted_tokens(r)
        if view.n_prefilling:  # the blocks of prompts are taken already
            to_come -= sum(max(0, x.target_tokens - view.kv_tokens(x)) for x in view.running())
        return max(0, -(-to_come // view.block_size) - view.host_free_blocks)
