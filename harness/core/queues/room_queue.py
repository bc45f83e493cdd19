"""A queue in which requests that do not fit stand behind those that do."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from ..state import RequestState

_Entry = tuple[float, int, int, RequestState]  # worth, order of arrival, version, request
_SPARE = 64  # stale entries that are not worth sweeping out


class RoomQueue:
    """Yields the smallest `worth` among the requests whose `blocks` fit; if none fits, among all.

    `worth` and `blocks` of a request are constant while it waits; `room` (free blocks) is read at
    each access. There is one heap of all requests and one for each number of blocks: if the first
    of all does not fit, only the heaps that fit are searched, at most as many as there are free
    blocks.
    """

    __slots__ = (
        "_all",
        "_blocks",
        "_by_blocks",
        "_head",
        "_new",
        "_room",
        "_sizes",
        "_worth",
        "live",
    )

    def __init__(
        self,
        worth: Callable[[RequestState], float],
        blocks: Callable[[RequestState], int],
        room: Callable[[], int],
    ) -> None:
        self._worth, self._blocks, self._room = worth, blocks, room
        self._all: list[_Entry] = []
        self._new: list[_Entry] = []  # not yet in `_by_blocks`
        self._by_blocks: dict[int, list[_Entry]] = {}
        self._sizes: list[int] = []  # keys of `_by_blocks`, ascending
        self._head: RequestState | None = None
        self.live = 0

    def push(self, r: RequestState) -> None:
        """Add `r` to the queue."""
        self.live += 1
        r.version += 1
        if len(self._all) + len(self._new) > 4 * self.live + _SPARE:
            self._sweep()
        entry = (self._worth(r), r.seq, r.version, r)
        heappush(self._all, entry)
        self._new.append(entry)

    def _file_new(self) -> None:
        for entry in self._new:
            if entry[3].version != entry[2]:
                continue
            blocks = self._blocks(entry[3])
            heap = self._by_blocks.get(blocks)
            if heap is None:
                self._by_blocks[blocks] = [entry]
                insort(self._sizes, blocks)
            else:
                heappush(heap, entry)
        self._new.clear()

    def _sweep(self) -> None:
        """Forget the stale entries, of which each heap keeps those below its top."""
        self._all = [e for e in self._all if e[3].version == e[2]]
        heapify(self._all)
        self._by_blocks.clear()
        self._sizes.clear()
        self._new = list(self._all)

    def head(self) -> RequestState:
        """The next request by today's room; the queue must not be empty."""
        best = _top(self._all)
        assert best is not None
        room = self._room()
        if self._blocks(best[3]) > room:
            self._file_new()
            fitting: _Entry | None = None
            empty: list[int] = []
            for blocks in self._sizes:
                if blocks > room:
                    break
                top = _top(self._by_blocks[blocks])
                if top is None:
                    empty.append(blocks)
                elif fitting is None or top < fitting:
                    fitting = top
            for blocks in empty:
                del self._by_blocks[blocks]
                self._sizes.remove(blocks)
            best = fitting or best
        self._head = best[3]
        return best[3]

    def take_head(self) -> None:
        """The request that `head` has just named leaves."""
        assert self._head is not None
        self.remove(self._head)

    def remove(self, r: RequestState) -> None:
        """`r` leaves from wherever it stands."""
        r.version += 1
        self.live -= 1

    def __iter__(self) -> Iterator[RequestState]:
        return (e[3] for e in self._all if e[3].version == e[2])

    def ordered(self) -> Iterator[RequestState]:
        """All waiting requests in queue order, the next first."""
        room = self._room()
        entries = sorted(e for e in self._all if e[3].version == e[2])
        entries.sort(key=lambda e: self._blocks(e[3]) > room)
        return (e[3] for e in entries)

    def overtaken_s(self) -> float:
        """Infinite: the order does not change by time alone."""
        return math.inf


def _top(heap: list[_Entry]) -> _Entry | None:
    while heap and heap[0][3].version != heap[0][2]:
        heappop(heap)
    return heap[0] if heap else None
