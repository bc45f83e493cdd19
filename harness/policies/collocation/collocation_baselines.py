"""Baselines of collocation, with vLLM's iterations.

Source: "SLO-Aware KV Cache Management for Collocated LLM-Embedding Services" (see docs/papers.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...core.collocated_policy import PASSES_CUT, Beside, Collocated, EmbedView
from ...core.counters import REJECTIONS
from ...core.decisions import Admission, Limits, NextQueue
from ...core.policy import parameter
from ...core.state import RequestState
from ...core.view import View
from ..shared.timeouts import DropsOverdue
from ..vllm import Vllm


@dataclass(frozen=True)
class CollocatedFcfs(Collocated, Vllm):
    """First come, first served over one queue of generation and embedding requests.

    Source: the FIFO baseline of §3.4. Memory is allocated as requests begin.
    """

    def mechanisms(self) -> dict[str, str]:
        return {PASSES_CUT: "passes of the embedder cut because an older generation request waits"}

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
        eligible = [r for r in batch if r.arrival_s <= before_s]
        if 0 < len(eligible) < len(batch):
            embedder.counters.add(PASSES_CUT)
        return eligible


@dataclass(frozen=True)
class MergedBatches(Collocated, Vllm):
    """Same-architecture batch merging: texts to embed are prefilled in the language model's
    batches.

    Source: the work that experiment 5 compares with (§1.2, §5.4). If the embedder is
    the language model itself, an embedding request is a prompt whose last hidden state is the
    answer: it shares iterations with all requests and holds KV while it is prefilled. With any
    other embedder nothing can be merged, and passes take any free memory.

    Deviates in one thing: the texts of a request are prefilled as one prompt, which adds attention
    between the texts.
    """

    merges: ClassVar[bool] = True

    def mechanisms(self) -> dict[str, str]:
        return {"merged": "embedding requests computed in batches of the language model"}

    def on_finished(self, r: RequestState, view: View) -> None:
        if r.num_inputs:
            view.counters.add("merged", r)


@dataclass(frozen=True)
class StaticSplit(Collocated, Vllm):
    """Static split: a fixed share of the memory for the language model, the rest for the embedder.

    Source: the static partition that the paper sets out to beat (§3.3). Neither model
    uses the other's share, not even while it lies idle.

    Embedding requests that are larger than the embedder's share are rejected.
    """

    dynamic_limits: ClassVar[bool] = True

    llm_share: float = parameter(0.9, 0.01, 0.99)

    def mechanisms(self) -> dict[str, str]:
        return {
            PASSES_CUT: "passes of the embedder made smaller by its share",
            REJECTIONS: "embedding requests larger than the embedder's share",
        }

    def _embed_blocks(self, total: int) -> int:
        return total - int(self.llm_share * total)

    def limits(self, view: View) -> Limits:
        state: Beside = view.policy_state
        held = state.embedder.held_blocks if state.embedder else 0
        kept = max(0, self._embed_blocks(view.total_blocks) - held)
        limits = super().limits(view)
        return replace(limits, watermark_blocks=kept, decode_headroom_blocks=kept)

    def embed_admit(self, r: RequestState, embedder: EmbedView) -> Admission:
        fits = embedder.blocks((r,)) <= self._embed_blocks(embedder.total_blocks)
        return Admission.ADMIT if fits else Admission.REJECT

    def embed_batch(self, embedder: EmbedView) -> Sequence[RequestState]:
        share = self._embed_blocks(embedder.total_blocks)
        batch = self.first_come(embedder, min(share, embedder.free_blocks))
        if batch and share < embedder.free_blocks:
            self.count_cut(batch, embedder)
        return batch


@dataclass(frozen=True)
class CollocatedFcfsDrop(DropsOverdue, CollocatedFcfs):
    """`collocated-fcfs` that drops overdue requests, as collocation rejects them."""


@dataclass(frozen=True)
class MergedBatchesDrop(DropsOverdue, MergedBatches):
    """`merged-batches` that drops overdue requests, as collocation rejects them."""


@dataclass(frozen=True)
class StaticSplitDrop(DropsOverdue, StaticSplit):
    """`static-split` that drops overdue requests, as collocation rejects them."""
