"""The read-only face of a `Loop` that policies see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ...core.counters import Counters
from ...core.decisions import NextQueue
from ...core.kv.kv_cache_manager import KVBlocks
from ...core.policy import Policy, clock_read_error, key_is_kept
from ...core.state import Phase, RequestState
from ...core.view import Predictions, View


class Waiting(Protocol):
    """A queue that can be counted and looked through."""

    @property
    def live(self) -> int: ...

    def __iter__(self) -> Iterator[RequestState]: ...


class Viewed(Protocol):
    """The state that a view shows."""

    now_s: float
    predictions: Predictions
    policy_state: Any
    counters: Counters
    kv_manager: KVBlocks
    swapped: list[RequestState]
    prefilling: list[RequestState]
    decoding: dict[RequestState, None]
    tick: int

    @property
    def waiting(self) -> Waiting: ...
    @property
    def kv_sum(self) -> int: ...
    @property
    def most_tokens(self) -> int: ...
    def admissible(self, group: NextQueue) -> list[RequestState]: ...


class LoopView:
    """Implements `harness.core.view.View` over a loop."""

    __slots__ = ("_loop",)

    def __init__(self, loop: Viewed) -> None:
        self._loop = loop

    @property
    def now_s(self) -> float:
        return self._loop.now_s

    @property
    def predict(self) -> Predictions:
        return self._loop.predictions

    @property
    def policy_state(self) -> Any:
        return self._loop.policy_state

    @property
    def counters(self) -> Counters:
        return self._loop.counters

    @property
    def block_size(self) -> int:
        return self._loop.kv_manager.block_size

    @property
    def total_blocks(self) -> int:
        return self._loop.kv_manager.total

    @property
    def free_blocks(self) -> int:
        return self._loop.kv_manager.free

    @property
    def host_free_blocks(self) -> int:
        return self._loop.kv_manager.host_free

    @property
    def n_waiting(self) -> int:
        return self._loop.waiting.live

    @property
    def n_swapped(self) -> int:
        return len(self._loop.swapped)

    @property
    def n_prefilling(self) -> int:
        return len(self._loop.prefilling)

    @property
    def remaining_prefill_tokens(self) -> int:
        return sum(r.target_tokens - r.kv_tokens for r in self._loop.prefilling)

    @property
    def n_decoding(self) -> int:
        return len(self._loop.decoding)

    @property
    def n_running(self) -> int:
        return len(self._loop.decoding) + len(self._loop.prefilling)

    @property
    def decode_kv_tokens(self) -> int:
        return self._loop.kv_sum

    @property
    def max_future_kv_tokens(self) -> int:
        loop = self._loop
        return loop.most_tokens - loop.kv_sum - sum(r.kv_tokens for r in loop.prefilling)

    def waiting(self) -> Iterable[RequestState]:
        return iter(self._loop.waiting)

    def running(self) -> Iterable[RequestState]:
        return [*self._loop.decoding, *self._loop.prefilling]

    def admissible(self, group: NextQueue) -> list[RequestState]:
        return self._loop.admissible(group)

    def kv_tokens(self, r: RequestState) -> int:
        return r.kv_tokens + self._steps(r)

    def emitted_tokens(self, r: RequestState) -> int:
        return r.emitted_tokens + self._steps(r)

    def held_blocks(self, r: RequestState) -> int:
        if r.phase is Phase.DECODE:
            return self._loop.kv_manager.blocks(self.kv_tokens(r))
        return r.blocks

    def cached_tokens(self, r: RequestState) -> int:
        kv_manager = self._loop.kv_manager
        return kv_manager.get_computed_blocks(r) * kv_manager.unit_tokens

    def _steps(self, r: RequestState) -> int:
        return self._loop.tick - r.tick0 if r.phase is Phase.DECODE else 0


class KeptKeyView(LoopView):
    """A view whose clock cannot be read, for a `queue_key` that is not computed again in time."""

    __slots__ = ("_policy",)

    def __init__(self, loop: Viewed, policy: Policy) -> None:
        super().__init__(loop)
        self._policy = policy

    @property
    def now_s(self) -> float:
        raise clock_read_error(self._policy)


def queue_key_view(loop: Viewed, policy: Policy, view: View) -> View:
    """The view that `queue_key` is given: `view`, without its clock where keys are kept."""
    return KeptKeyView(loop, policy) if key_is_kept(policy) else view
