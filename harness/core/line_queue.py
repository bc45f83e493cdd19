"""A queue whose order changes with time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .decisions import Line
from .policy import Policy
from .state import RequestState
from .view import View

_EARLY_S = 1e-9  # asked a hair early nothing is lost; a hair late would be a step late


def overtaken_s(lines: Sequence[Line], now_s: float) -> float:
    """When the smallest of these lines is first crossed by another; infinite if never."""
    if len(lines) < 2:
        return math.inf
    keys = np.array([line.at(now_s) for line in lines])
    return _crossed_s(keys, np.array([line.per_s for line in lines]), int(keys.argmin()), now_s)


def _crossed_s(keys: np.ndarray, per_s: np.ndarray, first: int, now_s: float) -> float:
    faster = per_s < per_s[first]
    if not faster.any():
        return math.inf
    waits_s = (keys[faster] - keys[first]) / (per_s[first] - per_s[faster])
    return now_s + max(0.0, float(waits_s.min()) - _EARLY_S)


class LineQueue:
    """Keys are lines in time: the head in one pass over columns, and when it will be overtaken."""

    def __init__(self, policy: Policy, view: View) -> None:
        self._policy = policy
        self._view = view
        self._requests: list[RequestState | None] = []
        self._time_s = np.empty(64)
        self._value = np.empty(64)
        self._per_s = np.empty(64)
        self._seq = np.empty(64, dtype=np.int64)
        self._row: dict[RequestState, int] = {}
        self._head_row = -1
        self._known = np.empty(0)  # keys of all rows at `_known_s`
        self._known_s = math.nan

    @property
    def live(self) -> int:
        """How many wait."""
        return len(self._row)

    def push(self, r: RequestState) -> None:
        """`r` enters."""
        if len(self._requests) == len(self._value):
            self._compact()
        row = len(self._requests)
        line = self._policy.urgency_line(r, self._view)
        self._time_s[row] = line.time_s
        self._value[row] = line.value
        self._per_s[row] = line.per_s
        self._seq[row] = r.seq
        self._requests.append(r)
        self._row[r] = row
        r.version += 1

    def _compact(self) -> None:
        rows = list(self._row.values())
        size = max(64, 2 * len(rows))
        for name in ("_time_s", "_value", "_per_s", "_seq"):
            old = getattr(self, name)
            new = np.empty(size, dtype=old.dtype)
            new[: len(rows)] = old[rows]
            setattr(self, name, new)
        self._requests = list(self._row)
        self._row = {r: row for row, r in enumerate(self._row)}
        self._known_s = math.nan

    def _keys(self) -> np.ndarray:
        n, now_s = len(self._requests), self._view.now_s
        if now_s != self._known_s or n != len(self._known):
            self._known = (now_s - self._time_s[:n]) * self._per_s[:n]
            self._known += self._value[:n]
            self._known_s = now_s
        return self._known

    def head(self) -> RequestState:
        """The next request by today's keys; the queue must not be empty."""
        keys = self._keys()
        row = int(keys.argmin())
        equal = np.flatnonzero(keys == keys[row])
        if len(equal) > 1:
            row = int(equal[self._seq[equal].argmin()])
        self._head_row = row
        r = self._requests[row]
        assert r is not None
        return r

    def take_head(self) -> None:
        """The request that `head` has just named leaves."""
        r = self._requests[self._head_row]
        assert r is not None
        self.remove(r)

    def remove(self, r: RequestState) -> None:
        """`r` leaves from wherever it stands."""
        row = self._row.pop(r)
        self._requests[row] = None
        self._value[row] = math.inf
        if row < len(self._known):
            self._known[row] = math.inf
        self._per_s[row] = 0.0
        r.version += 1

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._row))

    def ordered(self) -> Iterator[RequestState]:
        """All, the next one first; sorted only if more than that one is wanted."""
        if not self._row:
            return
        yield self.head()
        order = np.lexsort((self._seq[: len(self._requests)], self._keys()))
        for row in order[1 : self.live].tolist():
            r = self._requests[row]
            assert r is not None
            yield r

    def overtaken_s(self) -> float:
        """When another request becomes the next one if nothing else happens; infinite if never."""
        if self.live < 2:
            return math.inf
        self.head()
        per_s = self._per_s[: len(self._requests)]
        return _crossed_s(self._keys(), per_s, self._head_row, self._view.now_s)
