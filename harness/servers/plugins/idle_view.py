"""A view of an instance on which nothing is: for what is asked before a server is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.decisions import NextQueue
from ...core.policy import Policy
from ...core.predictions import LearnedPredictions
from ...core.state import RequestState
from ...core.view import Predictions


class IdleView:
    """Implements `harness.core.view.View` with nobody there."""

    now_s = 0.0
    host_free_blocks = 0
    n_waiting = n_swapped = n_prefilling = n_decoding = n_running = 0
    decode_kv_tokens = max_future_kv_tokens = remaining_prefill_tokens = 0

    def __init__(self, policy: Policy, num_gpu_blocks: int = 10_000, block_size: int = 16) -> None:
        self.predict: Predictions = LearnedPredictions()
        self.policy_state: Any = policy.new_state()
        self.total_blocks = self.free_blocks = num_gpu_blocks
        self.block_size = block_size

    def waiting(self) -> Iterable[RequestState]:
        return ()

    def running(self) -> Iterable[RequestState]:
        return ()

    def admissible(self, group: NextQueue) -> list[RequestState]:
        return []

    def kv_tokens(self, r: RequestState) -> int:
        return 0

    def emitted_tokens(self, r: RequestState) -> int:
        return 0

    def held_blocks(self, r: RequestState) -> int:
        return 0

    def cached_tokens(self, r: RequestState) -> int:
        return 0
