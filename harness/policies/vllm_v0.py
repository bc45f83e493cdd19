"""vLLM as published (V0 engine, 0.2 series): whole prompts first, decodes wait for them.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), §4.5: all-or-nothing preemption of the last comer by recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.decisions import Limits
from ..core.policy import Policy, parameter
from ..core.view import View


@dataclass(frozen=True)
class VllmV0(Policy):
    """Prefill-only iterations while prompts wait and fit, otherwise decode-only ones."""

    max_num_batched_tokens: int = parameter(4096, 16, 131072, log=True)
    max_num_seqs: int = parameter(256, 1, 8192, log=True)
    watermark: float = parameter(0.01, 0.0, 0.5)  # share of blocks left free after an entry

    def limits(self, view: View) -> Limits:
        return Limits(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            mixed_batches=False,
            chunked=False,
            watermark_blocks=int(self.watermark * view.total_blocks),
            decode_headroom_blocks=1,
        )
