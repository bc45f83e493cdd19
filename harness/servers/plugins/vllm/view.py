"""What a policy sees of a vLLM engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ....core.decisions import Refill
from ....core.state import RequestState
from ....core.view import Predictions


class Scheduled(Protocol):
    """The parts of vLLM's scheduler and of ours that the view reads."""

    now_s: float
    predictions: Predictions
    policy_state: Any
    host_blocks: int
    states: dict[str, RequestState]
    block_size: Any
    cache_config: Any
    waiting: Any

    @property
    def batch(self) -> Sequence[Any]: ...
    @property
    def swapped(self) -> Mapping[str, int]: ...
    @property
    def n_running(self) -> int: ...
    def prefills(self, request: Any) -> bool: ...
    def seen_free_blocks(self) -> int: ...
    def would_enter(self, group: Refill) -> list[RequestState]: ...
    def request_of(self, r: RequestState) -> Any: ...
    def cached_tokens(self, request: Any) -> int: ...


class VllmView:
    """Implements `harness.core.view.View` over vLLM's scheduler."""

    def __init__(self, scheduler: Scheduled) -> None:
        self._scheduler = scheduler

    @property
    def now_s(self) -> float:
        return self._scheduler.now_s

    @property
    def predict(self) -> Predictions:
        return self._scheduler.predictions

    @property
    def state(self) -> Any:
        return self._scheduler.policy_state

    @property
    def block_tokens(self) -> int:
        return int(self._scheduler.block_size)

    @property
    def total_blocks(self) -> int:
        return int(self._scheduler.cache_config.num_gpu_blocks) - 1  # vLLM keeps one for itself

    @property
    def free_blocks(self) -> int:
        return self._scheduler.seen_free_blocks()

    @property
    def host_free_blocks(self) -> int:
        used = sum(self._blocks(tokens) for tokens in self._scheduler.swapped.values())
        return self._scheduler.host_blocks - used

    @property
    def n_waiting(self) -> int:
        return len(self._scheduler.waiting.waiting)

    @property
    def n_resident(self) -> int:
        return len(self._scheduler.waiting.resident)

    @property
    def n_prefilling(self) -> int:
        return sum(self._scheduler.prefills(r) for r in self._scheduler.batch)

    @property
    def unfilled_tokens(self) -> int:
        scheduler = self._scheduler
        left = (r.num_tokens - r.num_computed_tokens for r in scheduler.batch)
        return sum(n for n, r in zip(left, scheduler.batch, strict=True) if scheduler.prefills(r))

    @property
    def n_decoding(self) -> int:
        return self.n_running - self.n_prefilling

    @property
    def n_running(self) -> int:
        return self._scheduler.n_running

    @property
    def decode_kv_tokens(self) -> int:
        scheduler = self._scheduler
        return sum(r.num_computed_tokens for r in scheduler.batch if not scheduler.prefills(r))

    @property
    def future_tokens(self) -> int:
        batch = self._scheduler.batch
        return sum(r.num_prompt_tokens + r.max_tokens - r.num_computed_tokens for r in batch)

    def would_enter(self, group: Refill) -> list[RequestState]:
        return self._scheduler.would_enter(group)

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
        return self._scheduler.cached_tokens(self._scheduler.request_of(r))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)
