"""Sarathi-Serve: stall-free batches of decodes and prompt chunks under a small token budget.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve"
(OSDI 2024), Algorithm 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.decisions import Limits
from ..core.policy import Policy, parameter
from ..core.view import View


@dataclass(frozen=True)
class Sarathi(Policy):
    """All decodes first, then prompts in progress, then new prompts, up to `chunk_tokens`.

    The paper uses 512 tokens under a strict TBT objective and 2048 under a relaxed one. Blocks
    of a whole prompt are taken at entry, above a watermark.
    """

    chunk_tokens: int = parameter(512, 16, 16384, log=True)
    max_num_seqs: int = parameter(256, 1, 8192, log=True)
    watermark: float = parameter(0.01, 0.0, 0.5)  # share of blocks left free after an entry

    def limits(self, view: View) -> Limits:
        return Limits(
            self.chunk_tokens,
            self.max_num_seqs,
            watermark_blocks=int(self.watermark * view.total_blocks),
        )
