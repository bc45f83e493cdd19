"""Instances that serve whole batches, with all waiting requests in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from ...core.counters import Counters
from ...core.decisions import NextQueue
from ...core.device import StageDevice
from ...core.kv.kv_cache_manager import KVBlocks
from ...core.state import Release, RequestState
from ...core.view import Predictions
from .batch_state import INF
from .loop_view import LoopView
from .measures import Measures


class ArrivalQueue:
    """A list in order of arrival."""

    def __init__(self) -> None:
        self._requests: list[RequestState] = []

    @property
    def live(self) -> int:
        """Number of waiting requests."""
        return len(self._requests)

    def push(self, r: RequestState) -> None:
        """Add `r` at the end."""
        self._requests.append(r)

    def push_back(self, returned: Iterable[RequestState]) -> None:
        """Those were here before and take their old places."""
        self._requests = sorted((*self._requests, *returned), key=lambda r: r.seq)

    def remove_all(self, gone: Iterable[RequestState]) -> None:
        """Remove these requests in one pass."""
        ids = {r.id for r in gone}
        self._requests = [r for r in self._requests if r.id not in ids]

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests)


class BatchInstance:
    """State of an instance that serves one batch after the other, without preemption.

    `decoding` is the batch in progress, until the clock goes past its end.
    """

    def __init__(
        self,
        policy_state: Any,
        counters: Counters,
        kv_manager: KVBlocks,
        predictions: Predictions,
        stages: tuple[StageDevice, ...],
        measures: Measures,
        index: int,
    ) -> None:
        self.policy_state = policy_state
        self.counters = counters
        self.kv_manager = kv_manager
        self.predictions = predictions
        self.stages = stages
        self.measures = measures
        self.index = index
        self.now_s = 0.0
        self.inbox: deque[RequestState] = deque()
        self.outbox: list[Release] = []
        self.finished: list[RequestState] = []
        self.waiting = ArrivalQueue()
        self.swapped: list[RequestState] = []
        self.stalled: list[RequestState] = []
        self.prefilling: list[RequestState] = []
        self.decoding: dict[RequestState, None] = {}
        self.kv_sum = self.tick = self.most_tokens = 0
        self.chunks: list[tuple[int, int]] = []  # of the iteration loop alone
        self.prefill_only = self.reports_all_ends = self.reports_empty_queue = False
        self.view = LoopView(self)
        self._arrived = 0

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs, not counting arrivals still in the inbox."""
        return not (self.waiting.live or self.decoding)

    @property
    def n_requests(self) -> int:
        """Requests that wait, run or are in transit to this instance."""
        return len(self.decoding) + self.waiting.live + len(self.inbox)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait."""
        return sum(r.target_tokens for r in self.waiting)

    def next_lookup_s(self) -> float:
        return self.ready_s()

    def ready_s(self) -> float:
        """When it would act next; infinite if never."""
        if not self.idle:
            return self.now_s
        return max(self.now_s, self.inbox[0].visible_s) if self.inbox else INF

    def admissible(self, group: NextQueue) -> list[RequestState]:
        """None: batches are formed, not refilled."""
        return []

    def _next_arrival(self) -> RequestState:
        """Take the first request out of the inbox."""
        r = self.inbox.popleft()
        self._arrived += 1
        r.seq = self._arrived
        r.instance = self.index
        return r
