"""Static split: a fixed share of the memory for the language model, the rest for the embedder.

Source: the static partition that "SLO-Aware KV Cache Management for Collocated LLM-Embedding
Services" sets out to beat (§3.3; see docs/papers.md), with vLLM's iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...core.collocated_policy import Beside, Collocated, EmbedView
from ...core.decisions import Admission, Limits
from ...core.policy import parameter
from ...core.state import RequestState
from ...core.view import View
from ..vllm import Vllm


@dataclass(frozen=True)
class StaticSplit(Collocated, Vllm):
    """Neither model uses the other's share, not even while it lies idle.

    Embedding requests that are larger than the embedder's share are rejected.
    """

    dynamic_limits: ClassVar[bool] = True

    llm_share: float = parameter(0.9, 0.01, 0.99)

    def _embed_blocks(self, total: int) -> int:
        return total - int(self.llm_share * total)

    def limits(self, view: View) -> Limits:
        state: Beside = view.policy_state
        held = state.embedder.held_blocks if state.embedder else 0
        kept = max(0, self._embed_blocks(view.total_blocks) - held)
        return Limits(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            allocate_per_chunk=True,
            async_scheduling=self.async_scheduling,
            watermark_blocks=kept,
            decode_headroom_blocks=kept,
        )

    def embed_admit(self, r: RequestState, embedder: EmbedView) -> Admission:
        fits = embedder.blocks((r,)) <= self._embed_blocks(embedder.total_blocks)
        return Admission.ADMIT if fits else Admission.REJECT

    def embed_batch(self, embedder: EmbedView) -> Sequence[RequestState]:
        share = self._embed_blocks(embedder.total_blocks)
        return self.first_come(embedder, min(share, embedder.free_blocks))
