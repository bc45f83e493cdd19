"""Read-only view of a vLLM engine for policies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ....core.decisions import NextQueue
from ....core.state import RequestState
from ...plugin.hosted import HostedPolicy, HostedView


class VllmView(HostedView):
    """Implements `harness.core.view.View` over vLLM's scheduler, a `PolicyScheduler`."""

    def __init__(self, scheduler: Any, hosted: HostedPolicy) -> None:
        super().__init__(hosted)
        self._scheduler = scheduler

    @property
    def block_size(self) -> int:
        return int(self._scheduler.block_size)

    @property
    def total_blocks(self) -> int:
        return int(self._scheduler.cache_config.num_gpu_blocks) - 1  # vLLM keeps one for itself

    @property
    def free_blocks(self) -> int:
        return int(self._scheduler.seen_free_blocks())

    @property
    def host_free_blocks(self) -> int:
        used = sum(self._blocks(tokens) for tokens in self._scheduler.swapped.values())
        return int(self._scheduler.num_cpu_blocks) - used

    @property
    def n_waiting(self) -> int:
        return len(self._scheduler.waiting.waiting)

    @property
    def n_swapped(self) -> int:
        return len(self._scheduler.waiting.swapped)

    @property
    def n_prefilling(self) -> int:
        return sum(self._scheduler.prefills(r) for r in self._scheduler.batch)

    @property
    def remaining_prefill_tokens(self) -> int:
        scheduler = self._scheduler
        left = (r.num_tokens - r.num_computed_tokens for r in scheduler.batch)
        return sum(n for n, r in zip(left, scheduler.batch, strict=True) if scheduler.prefills(r))

    @property
    def n_decoding(self) -> int:
        return self.n_running - self.n_prefilling

    @property
    def n_running(self) -> int:
        return int(self._scheduler.n_running)

    @property
    def decode_kv_tokens(self) -> int:
        scheduler = self._scheduler
        return sum(r.num_computed_tokens for r in scheduler.batch if not scheduler.prefills(r))

    @property
    def max_future_kv_tokens(self) -> int:
        batch = self._scheduler.batch
        return sum(r.num_prompt_tokens + r.max_tokens - r.num_computed_tokens for r in batch)

    def admissible(self, group: NextQueue) -> list[RequestState]:
        return list(self._scheduler.admissible(group))

    def waiting(self) -> Iterable[RequestState]:
        return [self._scheduler.states[entry[2]] for entry in self._scheduler.waiting.waiting]

    def running(self) -> Iterable[RequestState]:
        return [self._scheduler.states[r.request_id] for r in self._scheduler.batch]

    def kv_tokens(self, r: RequestState) -> int:
        request = self._scheduler.request_of(r)
        swapped = self._scheduler.swapped.get(request.request_id)
        return int(request.num_computed_tokens if swapped is None else swapped)

    def emitted_tokens(self, r: RequestState) -> int:
        return int(self._scheduler.request_of(r).num_output_tokens)

    def held_blocks(self, r: RequestState) -> int:
        return self._blocks(self.kv_tokens(r))

    def cached_tokens(self, r: RequestState) -> int:
        scheduler = self._scheduler
        if not scheduler.cache_config.enable_prefix_caching:
            return 0
        return int(scheduler.kv_cache_manager.get_computed_blocks(scheduler.request_of(r))[1])

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
