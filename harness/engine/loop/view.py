"""The read-only face of a `Loop` that policies see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ...core.decisions import Refill
from ...core.kv_cache_manager import BlockLedger
from ...core.state import Phase, RequestState
from ...core.view import Predictions


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
    ledger: BlockLedger
    resident: list[RequestState]
    prefilling: list[RequestState]
    decoding: dict[RequestState, None]
    tick: int

    @property
    def waiting(self) -> Waiting: ...
    @property
    def kv_sum(self) -> int: ...
    @property
    def most_tokens(self) -> int: ...
    def would_enter(self, group: Refill) -> list[RequestState]: ...


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
    def state(self) -> Any:
        return self._loop.policy_state

    @property
    def block_tokens(self) -> int:
        return self._loop.ledger.block_tokens

    @property
    def total_blocks(self) -> int:
        return self._loop.ledger.total

    @property
    def free_blocks(self) -> int:
        return self._loop.ledger.free

    @property
    def host_free_blocks(self) -> int:
        return self._loop.ledger.host_free

    @property
    def n_waiting(self) -> int:
        return self._loop.waiting.live

    @property
    def n_resident(self) -> int:
        return len(self._loop.resident)

    @property
    def n_prefilling(self) -> int:
        return len(self._loop.prefilling)

    @property
    def unfilled_tokens(self) -> int:
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
    def future_tokens(self) -> int:
        loop = self._loop
        return loop.most_tokens - loop.kv_sum - sum(r.kv_tokens for r in loop.prefilling)

    def waiting(self) -> Iterable[RequestState]:
        return iter(self._loop.waiting)

    def running(self) -> Iterable[RequestState]:
        return [*self._loop.decoding, *self._loop.prefilling]

    def would_enter(self, group: Refill) -> list[RequestState]:
        return self._loop.would_enter(group)

    def kv_tokens(self, r: RequestState) -> int:
        return r.kv_tokens + self._steps(r)

    def emitted_tokens(self, r: RequestState) -> int:
        return r.emitted_tokens + self._steps(r)

    def held_blocks(self, r: RequestState) -> int:
        if r.phase is Phase.DECODE:
            return self._loop.ledger.blocks(self.kv_tokens(r))
        return r.blocks

    def cached_tokens(self, r: RequestState) -> int:
        ledger = self._loop.ledger
        return ledger.match_units(r) * ledger.unit_tokens

    def _steps(self, r: RequestState) -> int:
        return self._loop.tick - r.tick0 if r.phase is Phase.DECODE else 0
