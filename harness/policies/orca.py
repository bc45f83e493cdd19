"""Orca: iteration-level scheduling with the maximum length reserved at entry.

Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models"
(OSDI 2022), Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.decisions import UNLIMITED, Limits
from ..core.policy import Policy, parameter
from ..core.state import RequestState
from ..core.view import View


@dataclass(frozen=True)
class Orca(Policy):
    """First come, first served; whole prompts run together with decodes (selective batching).

    KV slots for prompt and maximum output are reserved for life, so no request is ever preempted
    and much memory stays empty.
    """

    max_batch: int = parameter(256, 1, 8192, log=True)

    def limits(self, view: View) -> Limits:
        return Limits(UNLIMITED, self.max_batch, chunked=False)

    def reserved_blocks(self, r: RequestState, view: View) -> int:
        return -(-(r.prompt_tokens + r.max_output_tokens) // view.block_size)
