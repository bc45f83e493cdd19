"""Read-only view of a vLLM engine for policies, and the engine's settings for the run folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ....core.counters import Counters
from ....core.decisions import NextQueue
from ....core.policy import Policy, clock_read_error
from ....core.state import RequestState
from ....core.view import Predictions


class Scheduled(Protocol):
    """The parts of the scheduler that the view reads."""

    now_s: float
    predictions: Predictions
    policy_state: Any
    counters: Counters
    num_cpu_blocks: int
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
    def admissible(self, group: NextQueue) -> list[RequestState]: ...
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
    def policy_state(self) -> Any:
        return self._scheduler.policy_state

    @property
    def counters(self) -> Counters:
        return self._scheduler.counters

    @property
    def block_size(self) -> int:
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
        return self._scheduler.num_cpu_blocks - used

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
        return self._scheduler.n_running

    @property
    def decode_kv_tokens(self) -> int:
        scheduler = self._scheduler
        return sum(r.num_computed_tokens for r in scheduler.batch if not scheduler.prefills(r))

    @property
    def max_future_kv_tokens(self) -> int:
        batch = self._scheduler.batch
        return sum(r.num_prompt_tokens + r.max_tokens - r.num_computed_tokens for r in batch)

    def admissible(self, group: NextQueue) -> list[RequestState]:
        return self._scheduler.admissible(group)

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
        return -(-tokens // self.block_size)


class KeptKeyView(VllmView):
    """A view whose clock cannot be read, for a `queue_key` that is not computed again as time
    passes.
    """

    def __init__(self, scheduler: Scheduled, policy: Policy) -> None:
        super().__init__(scheduler)
        self._policy = policy

    @property
    def now_s(self) -> float:
        raise clock_read_error(self._policy)


def engine_settings(scheduler: Any) -> dict[str, Any]:
    """Settings of the engine, with the names of a log's `meta.json`."""
    config = scheduler.vllm_config
    limits, cache, model = config.scheduler_config, config.cache_config, config.model_config
    return {
        "engine_kwargs": {
            "max_num_seqs": int(limits.max_num_seqs),
            "max_num_batched_tokens": int(limits.max_num_batched_tokens),
            "max_model_len": int(model.max_model_len),
            "tensor_parallel_size": int(config.parallel_config.tensor_parallel_size),
            "async_scheduling": bool(limits.async_scheduling),
            "enforce_eager": bool(model.enforce_eager),
        },
        "kv_cache": {
            "num_gpu_blocks": int(cache.num_gpu_blocks),
            "block_size": int(scheduler.block_size),
            "enable_prefix_caching": bool(cache.enable_prefix_caching),
        },
    }
