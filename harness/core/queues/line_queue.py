"""Waiting queue whose keys are linear in time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, merge
from operator import itemgetter

import numpy as np

from ..decisions import Line
from ..policy import Policy
from ..state import RequestState
from ..view import View

# (rank in its row, order of arrival, version, request, its line)
_Entry = tuple[float, int, int, RequestState, Line]

_NO_LINE = Line(0.0, math.inf, 0.0)
_EARLY_S = 1e-9  # a little too early costs nothing; too late would delay the change by a step


def overtaken_s(lines: Sequence[Line], now_s: float) -> float:
    """When the smallest of these lines is first crossed by another; infinite if never."""
    if len(lines) < 2:
        return math.inf
    keys = np.array([line.at(now_s) for line in lines])
    return _crossed_s(keys, np.array([line.per_s for line in lines]), int(keys.argmin()), now_s)


def _crossed_s(keys: np.ndarray, per_s: np.ndarray, first: int, now_s: float) -> float:
    faster = (per_s < per_s[first]).nonzero()[0]
    if not len(faster):
        return math.inf
    waits_s = (keys.take(faster) - keys[first]) / (per_s[first] - per_s.take(faster))
    return now_s + max(0.0, float(waits_s.min()) - _EARLY_S)


class LineQueue:
    """Keys are lines in time: the head in one pass over columns, and when it will be overtaken.

    Lines of one slope never cross, so only the first of each slope has a row in the columns. The
    head is kept until it leaves, another line crosses its own, or a request with a smaller key
    comes; a request that comes is compared with the head alone.
    """

    def __init__(self, policy: Policy, view: View) -> None:
        self._policy = policy
        self._view = view
        self._row: dict[RequestState, int] = {}  # all waiting requests
        self._kinds: dict[tuple[float, float], int] = {}  # row of a slope
        self._heaps: list[list[_Entry]] = []  # by row
        self._time_s = np.empty(64)
        self._value = np.empty(64)
        self._per_s = np.empty(64)
        self._seq = np.empty(64, dtype=np.int64)
        self._head_row = -1  # negative: not known
        self._head_until_s = -math.inf  # what is known of the head holds up to and including then
        self._crossing_known = False  # whether that is when the head is overtaken
        self._known = np.empty(0)  # keys of all rows at `_known_s`
        self._known_s = math.nan

    @property
    def live(self) -> int:
        """Number of waiting requests."""
        return len(self._row)

    def push(self, r: RequestState) -> None:
        """Add `r` to the queue."""
        r.version += 1
        line = self._policy.queue_key_line(r, self._view)
        kind, rank = _kind_and_rank(line)
        row = self._kinds.get(kind)
        if row is None:
            row = self._new_row(kind)
        heap = self._heaps[row]
        heappush(heap, (rank, r.seq, r.version, r, line))
        self._row[r] = row
        if heap[0][3] is r:
            self._show(row)
            self._compare_with_head(row)

    def _compare_with_head(self, row: int) -> None:
        """The first request of this row has just come: is it the head, or when will it be?"""
        now_s, head_row = self._view.now_s, self._head_row
        if head_row < 0:
            return
        if now_s > self._head_until_s:
            self._head_row = -1
            return
        _, seq, _, _, line = self._heaps[row][0]
        _, head_seq, _, _, head_line = self._heaps[head_row][0]
        key, head_key = line.at(now_s), head_line.at(now_s)
        if row == head_row or key < head_key or (key == head_key and seq < head_seq):
            self._set_head(row, now_s)
        elif self._crossing_known and line.per_s < head_line.per_s:
            wait_s = (key - head_key) / (head_line.per_s - line.per_s)
            crossed_s = now_s + max(0.0, wait_s - _EARLY_S)
            self._head_until_s = min(self._head_until_s, crossed_s)

    def _set_head(self, row: int, now_s: float) -> None:
        self._head_row = row
        self._head_until_s = now_s
        self._crossing_known = False

    def _new_row(self, kind: tuple[float, float]) -> int:
        if len(self._heaps) == len(self._value):
            self._compact()
        self._kinds[kind] = row = len(self._heaps)
        self._heaps.append([])
        return row

    def _compact(self) -> None:
        """Drop slopes that no waiting request has."""
        kinds = [(kind, row) for kind, row in self._kinds.items() if self._heaps[row]]
        rows = [row for _, row in kinds]
        size = max(64, 2 * len(rows))
        for name in ("_time_s", "_value", "_per_s", "_seq"):
            old = getattr(self, name)
            new = np.empty(size, dtype=old.dtype)
            new[: len(rows)] = old[rows]
            setattr(self, name, new)
        self._heaps = [self._heaps[row] for row in rows]
        self._kinds = {kind: row for row, (kind, _) in enumerate(kinds)}
        moved = {old: row for row, old in enumerate(rows)}
        self._row = {r: moved[old] for r, old in self._row.items()}
        self._known_s = math.nan
        self._head_row = -1

    def _show(self, row: int) -> None:
        """Update the columns to the first request of this row."""
        heap = self._heaps[row]
        while heap and heap[0][3].version != heap[0][2]:
            heappop(heap)
        line = heap[0][4] if heap else _NO_LINE
        self._time_s[row] = line.time_s
        self._value[row] = line.value
        self._per_s[row] = line.per_s
        self._seq[row] = heap[0][1] if heap else -1
        if row < len(self._known):
            self._known[row] = line.at(self._known_s)

    def _keys(self) -> np.ndarray:
        n, now_s = len(self._heaps), self._view.now_s
        if now_s != self._known_s or n != len(self._known):
            self._known = (now_s - self._time_s[:n]) * self._per_s[:n]
            self._known += self._value[:n]
            self._known_s = now_s
        return self._known

    def head(self) -> RequestState:
        """The next request by today's keys; the queue must not be empty."""
        now_s = self._view.now_s
        if self._head_row < 0 or now_s > self._head_until_s:
            keys = self._keys()
            row = int(keys.argmin())
            equal = (keys == keys[row]).nonzero()[0]
            if len(equal) > 1:
                row = int(equal[self._seq[equal].argmin()])
            self._set_head(row, now_s)
        return self._heaps[self._head_row][0][3]

    def take_head(self) -> None:
        """The request that `head` has just named leaves."""
        self.remove(self._heaps[self._head_row][0][3])

    def remove(self, r: RequestState) -> None:
        """`r` leaves from wherever it stands."""
        row = self._row.pop(r)
        r.version += 1
        if self._heaps[row][0][3] is r:
            self._show(row)
            if row == self._head_row or self._crossing_known:
                self._head_row = -1  # another is the head, or the line that was to cross is gone

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._row))

    def ordered(self) -> Iterator[RequestState]:
        """All, the next one first; looked up only if more than that one is wanted."""
        if not self._row:
            return
        head = self.head()
        yield head
        now_s = self._view.now_s
        for _, _, r in merge(*(_in_order(heap, now_s) for heap in self._heaps if heap)):
            if r is not head:
                yield r

    def overtaken_s(self) -> float:
        """When another request becomes the next one if nothing else happens; infinite if never."""
        if self.live < 2:
            return math.inf
        self.head()
        if not self._crossing_known:
            per_s = self._per_s[: len(self._heaps)]
            self._head_until_s = _crossed_s(self._keys(), per_s, self._head_row, self._view.now_s)
            self._crossing_known = True
        return self._head_until_s


def _kind_and_rank(line: Line) -> tuple[tuple[float, float], float]:
    """Lines of one kind never change places; their rank in it, the smallest first."""
    if not line.per_s:
        return (0.0, 0.0), line.value
    return (line.per_s, line.value), line.time_s if line.per_s < 0 else -line.time_s


def _in_order(heap: list[_Entry], now_s: float) -> Iterator[tuple[float, int, RequestState]]:
    """Key, order of arrival and request of those in a row; sorted once the first is taken."""
    _, seq, _, r, line = heap[0]
    yield line.at(now_s), seq, r
    for _, seq, version, other, line in sorted(heap, key=itemgetter(0, 1)):
        if other.version == version and other is not r:
            yield line.at(now_s), seq, other
