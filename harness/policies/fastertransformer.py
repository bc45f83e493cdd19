"""FasterTransformer: a batch runs to completion before the next one is formed.

Source: the request-level scheduling that Orca (OSDI 2022, §2) and Sarathi-Serve (OSDI 2024, §3)
describe and measure against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.decisions import UNLIMITED, Limits
from ..core.policy import Policy, parameter
from ..core.state import RequestState
from ..core.view import View


@dataclass(frozen=True)
class FasterTransformer(Policy):
    """No request enters until the whole batch has ended.

    Each answer is returned when it ends, and prompts are not padded; places of finished requests
    stay empty. (`fifo` has padded batches that are returned as a whole.)
    """

    dynamic_limits: ClassVar[bool] = True

    max_batch: int = parameter(128, 1, 8192, log=True)

    def limits(self, view: View) -> Limits:
        seqs = 0 if view.n_running else self.max_batch
        return Limits(UNLIMITED, seqs, mixed_batches=False, chunked=False)

    def reserved_blocks(self, r: RequestState, view: View) -> int:
        return -(-(r.prompt_tokens + r.max_output_tokens) // view.block_size)
