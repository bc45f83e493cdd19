"""Waiting queues, by how often their keys are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Final

from ..kv.kv_cache_manager import KVBlocks
from ..policy import Key, Policy, overrides
from ..state import RequestState
from ..view import View

# SGLang orders longer queues by arrival as well (Sheng et al., SGLang).
REKEY_AT_MOST: Final = 128


class WaitQueue:
    """Keys are computed once, on entry; a heap with lazy removal. An entry is stale when its
    version differs from the request's.
    """

    __slots__ = ("_by_arrival", "_heap", "_policy", "_view", "live")

    def __init__(self, policy: Policy, view: View) -> None:
        self._policy = policy
        self._by_arrival = not overrides(policy, "queue_key")
        self._view = view
        self._heap: list[tuple[Any, int, int, RequestState]] = []
        self.live = 0

    def __len__(self) -> int:
        return self.live

    def push(self, r: RequestState) -> None:
        """Add `r` to the queue."""
        self.live += 1
        r.version += 1
        key = r.arrival_s if self._by_arrival else self._policy.queue_key(r, self._view)
        heappush(self._heap, (key, r.seq, r.version, r))

    def head(self) -> RequestState:
        """The next request; the queue must not be empty."""
        heap = self._heap
        while heap[0][3].version != heap[0][2]:
            heappop(heap)
        return heap[0][3]

    def take_head(self) -> None:
        """The request that `head` has just named leaves."""
        heappop(self._heap)[3].version += 1
        self.live -= 1

    def remove(self, r: RequestState) -> None:
        """`r` leaves from wherever it stands."""
        r.version += 1
        self.live -= 1

    def __iter__(self) -> Iterator[RequestState]:
        return (entry[3] for entry in self._heap if entry[3].version == entry[2])

    def ordered(self) -> Iterator[RequestState]:
        """All waiting requests in queue order, the next first."""
        if not self.live:
            return iter(())
        self.head()
        return (entry[3] for entry in sorted(self._heap) if entry[3].version == entry[2])

    def overtaken_s(self) -> float:
        """When another request becomes the next one if nothing else happens; infinite if never."""
        return math.inf


class CacheOrderedQueue(WaitQueue):
    """Keys depend on the prefix cache and are computed again when it changes. Long queues are in
    order of arrival.
    """

    __slots__ = ("_kv_manager", "_seen")

    def __init__(self, policy: Policy, view: View, kv_manager: KVBlocks) -> None:
        super().__init__(policy, view)
        self._kv_manager = kv_manager
        self._seen = 0

    def head(self) -> RequestState:
        """The next request by today's cache."""
        by_arrival = self.live > REKEY_AT_MOST
        changed = self._kv_manager.cache_version != self._seen
        if by_arrival != self._by_arrival or (changed and not by_arrival):
            self._seen = self._kv_manager.cache_version
            self._by_arrival = by_arrival
            queue_key, view = self._policy.queue_key, self._view
            self._heap = [
                (r.arrival_s if by_arrival else queue_key(r, view), r.seq, r.version, r)
                for r in super().__iter__()
            ]
            heapify(self._heap)
        return super().head()


class ViewOrderedQueue:
    """Keys depend on the view and are computed for all waiting requests before each admission."""

    __slots__ = ("_head", "_policy", "_view", "_waiting")

    def __init__(self, policy: Policy, view: View) -> None:
        self._policy = policy
        self._view = view
        self._waiting: dict[RequestState, None] = {}
        self._head: RequestState | None = None

    @property
    def live(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def push(self, r: RequestState) -> None:
        """Add `r` to the queue."""
        self._waiting[r] = None
        r.version += 1

    def _rank(self, r: RequestState) -> tuple[Key, int]:
        return self._policy.queue_key(r, self._view), r.seq

    def head(self) -> RequestState:
        """The next request by today's keys; the queue must not be empty."""
        waiting = self._waiting
        head = next(iter(waiting)) if len(waiting) == 1 else min(waiting, key=self._rank)
        self._head = head
        return head

    def take_head(self) -> None:
        """The request that `head` has just named leaves."""
        assert self._head is not None
        self.remove(self._head)

    def remove(self, r: RequestState) -> None:
        """`r` leaves from wherever it stands."""
        del self._waiting[r]
        r.version += 1

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._waiting)

    def ordered(self) -> Iterator[RequestState]:
        """All waiting requests in queue order, the next first."""
        return iter(sorted(self._waiting, key=self._rank))

    def overtaken_s(self) -> float:
        """Infinite: keys are computed again after events, not by time alone."""
        return math.inf
