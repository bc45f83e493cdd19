"""Turns the rows of a workload into requests at the moment they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final

import numpy as np

from ....workloads.arrays import Ints
from ....workloads.errors import SloBenchError
from ....workloads.request import RequestType, Slo
from ....workloads.workload import Workload
from ...core.state import RequestState

INF: Final = float("inf")
_SLICE_ROWS: Final = 16384


class Arrivals:
    """Requests in order of arrival; only a slice of the workload exists as objects at a time.

    Open-loop rows arrive at their time. A row that follows others arrives `think_s` after the last
    of their answers (and not before its own `arrival_s`). With a concurrency limit rows arrive in
    order, one whenever another ends.
    """

    def __init__(self, workload: Workload, skip: Ints | None = None) -> None:
        """`skip`: rows that do not arrive, because they were refused at the door.

        Raises:
            SloBenchError: a concurrency below 1, or one together with rows that follow others.
        """
        self._workload = workload
        follows = workload.follows
        comes = np.ones(len(workload), dtype=np.bool_)
        if skip is not None:
            comes[skip] = False
        if workload.concurrency is not None:
            if workload.concurrency < 1:
                raise SloBenchError(f"concurrency must be at least 1 but is {workload.concurrency}")
            if (follows >= 0).any():
                raise SloBenchError(
                    "requests that follow others set their own pace; leave concurrency out"
                )
        self._open_rows = np.flatnonzero(comes & (follows < 0))
        self._followers: dict[int, list[int]] = {}
        for row in np.flatnonzero(comes & (follows >= 0)).tolist():
            self._followers.setdefault(int(follows[row]), []).append(row)
        self._awaited: dict[int, int] = {}  # answers that a row of several still waits for
        for row, others in enumerate(workload.joins or ()):
            if others and comes[row]:
                awaited = {int(follows[row]), *others}
                self._awaited[row] = len(awaited)
                for other in awaited - {int(follows[row])}:
                    self._followers.setdefault(other, []).append(row)
        self._next_open = 0
        self._slice: list[RequestState] = []
        self._at = 0
        self._first = 0  # the id of the workload's first row
        self._due: list[tuple[float, int]] = []  # followers with a known arrival time
        self._slo: Slo | None = self._common_slo()
        self._marked = bool(workload.request_type.any() or workload.priority.any())
        self.cancelled: list[int] = []  # rows that never arrive: one that they follow was lost
        self._lost: set[int] = set()  # the same
        self.has_news = False  # `next_s` may be another time than it was
        for row in np.flatnonzero(~comes).tolist():
            self._cancel_followers(row)
        self._held: list[int] = []  # rows that wait for a place, the next one last
        self._places_s: list[float] = []  # since when places are free
        self.by_places = workload.concurrency is not None
        if workload.concurrency is not None:
            self._held = self._open_rows[::-1].tolist()
            self._places_s = [0.0] * min(workload.concurrency, len(self._held))
            self._open_rows = self._open_rows[:0]

    def _common_slo(self) -> Slo | None:
        w = self._workload
        columns = (w.ttft_slo_s, w.tpot_slo_s, w.e2e_slo_s, w.deadline_s)
        if len(w) and all((c == c[0]).all() for c in columns):
            return Slo(*(float(c[0]) for c in columns))
        return None

    def _states(self, rows: Ints, arrival_s: list[float]) -> list[RequestState]:
        states = self._plain_states(rows, arrival_s)
        if self._marked:
            w = self._workload
            embeds = w.request_type[rows] == int(RequestType.EMBED)
            inputs = np.where(embeds, w.num_inputs[rows], 0).tolist()
            for r, priority, num_inputs in zip(
                states, w.priority[rows].tolist(), inputs, strict=True
            ):
                r.priority = priority
                r.num_inputs = num_inputs
        return states

    def _plain_states(self, rows: Ints, arrival_s: list[float]) -> list[RequestState]:
        w = self._workload
        ids = (rows + self._first).tolist()
        prompts = w.prompt_tokens[rows].tolist()
        outputs = w.output_tokens[rows].tolist()
        max_outputs = w.max_output_tokens[rows].tolist()
        slo = self._slo
        if slo is not None and w.prefix_blocks is None and not self._followers:
            return [
                RequestState(i, a, p, o, m, slo)
                for i, a, p, o, m in zip(ids, arrival_s, prompts, outputs, max_outputs, strict=True)
            ]
        slos = [slo] * len(ids) if slo is not None else self._slos(rows)
        hashes, leaders = w.prefix_blocks, self._followers
        return [
            RequestState(i, a, p, o, m, s, hashes[i] if hashes is not None else (), i in leaders)
            for i, a, p, o, m, s in zip(
                ids, arrival_s, prompts, outputs, max_outputs, slos, strict=True
            )
        ]

    def _state(self, row: int, arrival_s: float) -> RequestState:
        """As `_states`, of one row."""
        w = self._workload
        prefixes = w.prefix_blocks
        r = RequestState(
            row + self._first,
            arrival_s,
            w.prompt_tokens.item(row),
            w.output_tokens.item(row),
            w.max_output_tokens.item(row),
            self._slo if self._slo is not None else self._slos(np.array([row]))[0],
            prefixes[row] if prefixes is not None else (),
            self.by_places or row in self._followers,
        )
        if self._marked:
            r.priority = w.priority.item(row)
            if w.request_type.item(row) == int(RequestType.EMBED):
                r.num_inputs = w.num_inputs.item(row)
        return r

    def _slos(self, rows: Ints) -> list[Slo]:
        w = self._workload
        columns = (w.ttft_slo_s, w.tpot_slo_s, w.e2e_slo_s, w.deadline_s)
        return [Slo(*values) for values in zip(*(c[rows].tolist() for c in columns), strict=True)]

    def _head(self) -> RequestState | None:
        if self._at == len(self._slice):
            self._slice, self._at = self._next_slice(), 0  # lets go of requests that have ended
            if not self._slice:
                return None
        return self._slice[self._at]

    def _next_slice(self) -> list[RequestState]:
        """The next requests in order of arrival; none at the end."""
        rows = self._open_rows[self._next_open : self._next_open + _SLICE_ROWS]
        self._next_open += len(rows)
        return self._states(rows, self._workload.arrival_s[rows].tolist()) if len(rows) else []

    def next_s(self) -> float:
        """When the next request arrives; infinite if none is known."""
        if self._held:
            return self._places_s[0] if self._places_s else INF
        head = self._head()
        open_s = head.arrival_s if head is not None else INF
        return min(open_s, self._due[0][0]) if self._due else open_s

    def pop(self) -> RequestState:
        """The next request; one must be known."""
        if self._held:
            return self._state(self._held.pop(), heappop(self._places_s))
        head = self._head()
        if head is not None and (not self._due or head.arrival_s <= self._due[0][0]):
            self._at += 1
            return head
        arrival_s, row = heappop(self._due)
        return self._state(row, arrival_s)

    def pop_slice(self) -> list[RequestState]:
        """All open-loop requests of the present slice, or those that have a place (for workloads
        without followers).
        """
        if self.by_places:
            return [self.pop() for _ in range(min(len(self._held), len(self._places_s)))]
        if self._head() is None:
            return []
        states = self._slice[self._at :]
        self._at = len(self._slice)
        return states

    def ended(self, row: int, end_s: float, answered: bool) -> None:
        """Row `row` has ended: whoever waited for it may come."""
        self.has_news = True
        if self._held:
            heappush(self._places_s, end_s)
        if not answered:
            self._cancel_followers(row)
            return
        w = self._workload
        for follower in self._followers.pop(row, ()):
            if follower in self._lost:
                continue
            if self._awaited.get(follower, 1) > 1:
                self._awaited[follower] -= 1
                continue
            due_s = max(end_s + float(w.think_s[follower]), float(w.arrival_s[follower]))
            heappush(self._due, (due_s, follower))

    def _cancel_followers(self, row: int) -> None:
        """Whoever waits for row `row`, or for one of those, never comes."""
        lost = self._followers.pop(row, [])
        while lost:
            follower = lost.pop()
            if follower in self._lost:
                continue
            self._lost.add(follower)
            self.cancelled.append(follower)
            lost += self._followers.pop(follower, ())


class BlockArrivals(Arrivals):
    """The same of independent requests whose workload comes in blocks, in the same slices."""

    def __init__(self, blocks: Iterator[tuple[Workload, Ints]]) -> None:
        """`blocks`: each with its rows that do not arrive."""
        nothing = np.empty(0, dtype=np.int64)
        super().__init__(Workload(np.empty(0), nothing, nothing))
        self._blocks = blocks
        self._ready: list[RequestState] = []

    def _next_slice(self) -> list[RequestState]:
        while len(self._ready) < _SLICE_ROWS:
            block = next(self._blocks, None)
            if block is None:
                break
            self._first += len(self._workload)
            self._workload, skip = block
            self._slo = self._common_slo()
            self._marked = bool(self._workload.priority.any())
            rows = np.delete(np.arange(len(self._workload)), skip)
            self._ready += self._states(rows, self._workload.arrival_s[rows].tolist())
        states, self._ready = self._ready[:_SLICE_ROWS], self._ready[_SLICE_ROWS:]
        return states
