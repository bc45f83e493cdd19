"""A long workload in blocks: the same requests as drawn at once, in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .arrays import Floats, Ints
from .workload import Workload

BLOCK_ROWS = 16_384


@dataclass(frozen=True)
class WorkloadBlocks:
    """Requests in order of arrival, independent of each other's answers and without shared
    prefixes, of one class and one model; drawn anew each time that they are asked for.

    Attributes:
        requests: how many there are.
        first_s: when the first one arrives.
        last_s: when the last one arrives.
    """

    requests: int
    first_s: float
    last_s: float
    draw_arrivals: Callable[[], Iterator[Floats]]
    draw: Callable[[], Iterator[Workload]]

    @classmethod
    def of(
        cls, draw_arrivals: Callable[[], Iterator[Floats]], draw: Callable[[], Iterator[Workload]]
    ) -> WorkloadBlocks:
        """Blocks, with what one pass over their arrivals shows."""
        requests, first_s, last_s = 0, 0.0, 0.0
        for arrival_s in draw_arrivals():
            first_s = first_s if requests else float(arrival_s[0])
            last_s = float(arrival_s[-1])
            requests += len(arrival_s)
        return cls(requests, first_s, last_s, draw_arrivals, draw)

    def __len__(self) -> int:
        return self.requests

    def before(self, time_s: float) -> int:
        """Number of requests that arrive before that time."""
        return sum(int(np.searchsorted(block_s, time_s)) for block_s in self.draw_arrivals())

    def arrivals_at(self, rows: Ints) -> Floats:
        """Arrival times of these rows, in seconds."""
        arrivals_s, first = np.empty(len(rows)), 0
        for block_s in self.draw_arrivals():
            mine = (rows >= first) & (rows < first + len(block_s))
            arrivals_s[mine] = block_s[rows[mine] - first]
            first += len(block_s)
        return arrivals_s
