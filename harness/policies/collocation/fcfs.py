"""First come, first served over one queue of generation and embedding requests.

Source: the FIFO baseline of "SLO-Aware KV Cache Management for Collocated LLM-Embedding Services"
(§3.4; see docs/papers.md), with vLLM's iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.collocated_policy import Beside, Collocated, EmbedView
from ...core.decisions import NextQueue
from ...core.state import RequestState
from ...core.view import View
from ..vllm import Vllm


@dataclass(frozen=True)
class CollocatedFcfs(Collocated, Vllm):
    """First come, first served over both kinds of request; memory is allocated as requests
    begin.
    """

    def next_queue(self, view: View) -> NextQueue:
        state: Beside = view.policy_state
        if state.embedder is not None:
            embeds = state.embedder.waiting(view.now_s)
            first_s = min((r.arrival_s for r in view.waiting()), default=math.inf)
            if embeds and embeds[0].arrival_s < first_s:
                return NextQueue.NONE
        return super().next_queue(view)

    def embed_batch(self, embedder: EmbedView) -> Sequence[RequestState]:
        before_s = embedder.oldest_llm_arrival_s()
        batch = self.first_come(embedder, embedder.free_blocks)
        return [r for r in batch if r.arrival_s <= before_s]
