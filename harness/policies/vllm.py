"""vLLM, V1 engine: running requests first, chunked prefill, preemption by recomputation.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), as the V1 scheduler of the vLLM project schedules today.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.decisions import Limits
from ..core.policy import Policy, parameter
from ..core.view import View


@dataclass(frozen=True)
class Vllm(Policy):
    """Decodes, then prompts in progress, then new prompts share one token budget.

    KV blocks are taken chunk by chunk; a new request enters only if its whole prompt would fit.
    Under KV pressure the last comer is recomputed later. Names of parameters are vLLM's own.
    Batches, victims and ends equal those of vLLM 0.32's schedulers step by step, with and without
    asynchronous scheduling and prefix caching
    (`tests/harness/servers/vllm/test_stock_scheduler.py`).

    Deviates from vLLM in one thing: two requests that enter in the same iteration do not share
    the prefix that one of them is just computing.
    """

    max_num_batched_tokens: int = parameter(2048, 16, 131072, log=True)
    max_num_seqs: int = parameter(256, 1, 8192, log=True)
    # The next batch is decided while the present one runs, as vLLM does from 0.14 on.
    async_scheduling: bool = parameter(False, choices=(False, True))

    def limits(self, view: View) -> Limits:
        return Limits(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            allocate_per_chunk=True,
            async_scheduling=self.async_scheduling,
        )
