"""Same-architecture batch merging: texts to embed are prefilled in the language model's batches.

Source: the work that "SLO-Aware KV Cache Management for Collocated LLM-Embedding Services" compares
with in its experiment 5 (§1.2, §5.4; see docs/papers.md), with vLLM's iterations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.collocated_policy import Collocated
from ..vllm import Vllm


@dataclass(frozen=True)
class MergedBatches(Collocated, Vllm):
    """If the embedder is the language model itself, an embedding request is a prompt whose last
    hidden state is the answer: it shares iterations with all requests and holds KV while it is
    prefilled. With any other embedder nothing can be merged, and passes take any free memory.

    Deviates in one thing: the texts of a request are prefilled as one prompt, which adds attention
    between the texts.
    """

    merges: ClassVar[bool] = True
