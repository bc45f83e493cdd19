"""Counters of what a policy's mechanisms did: offloads, batches closed by a threshold, moves.

A policy declares them in `mechanisms()` and counts in one line: `view.counters.add("offloads", r)`.
The engine keeps the counters; their sums over all instances are the columns `count_*` of
`cells.csv`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping

from ...workloads.errors import UnknownNameError
from .state import RequestState

COUNT = "count_"  # `count_offloads` is the column of `offloads`

# Counted after the run from the records of all requests, where a policy declares them.
OVERTAKES = "overtakes"
DROPS = "drops"
REJECTIONS = "rejections"
SWAPS = "swaps"
RECOMPUTES = "recomputes"
FROM_RECORDS = (OVERTAKES, DROPS, REJECTIONS, SWAPS, RECOMPUTES)
"""`overtakes`: requests that began before one that had come to the same instance earlier.
`drops`, `rejections`: requests with that outcome; overlong ones are left out. `swaps`,
`recomputes`: preemptions of that mode.
"""

# Counted by the engine, where a policy declares them.
CLOSED_BY_MEMORY = "closed_by_memory"  # static batches cut to what fits
ANSWERS_CUT = "answers_cut"  # answers of static batches that `StaticPolicy.output_cap_tokens` ends
STORE_HITS = "store_hits"  # requests with a part of their prefix from a KV store
QUOTA_HITS = "quota_hits"  # preemptions and waits by a model's quota while memory was free
ADAPTER_LOADS = "adapter_loads"  # copies of an adapter into a slot of the GPU

_OF_ENGINES = {*FROM_RECORDS, CLOSED_BY_MEMORY, ANSWERS_CUT, STORE_HITS, QUOTA_HITS}


class Counters(dict[str, int]):
    """How often each mechanism has acted, by its name; 0 from the start."""

    def __init__(self, mechanisms: Iterable[str] = ()) -> None:
        super().__init__(dict.fromkeys(mechanisms, 0))

    def add(self, name: str, r: RequestState | None = None, why: str = "") -> None:
        """Count one act of the mechanism `name`, on the request `r` if it was on one; `why` is the
        reason, where there are several.

        Raises:
            UnknownNameError: the policy does not declare it.
        """
        if name not in self:
            raise UnknownNameError("mechanism", name, self)
        self[name] += 1

    def of_policy(self) -> dict[str, int]:
        """Those that the policy counts itself, which are known wherever it runs."""
        return {name: n for name, n in self.items() if name not in _OF_ENGINES}


class TimedCounters(Counters):
    """Counters that keep the times of all acts, by mechanism and reason."""

    def __init__(self, mechanisms: Iterable[str], clock: Callable[[], float]) -> None:
        super().__init__(mechanisms)
        self._clock = clock
        self.times_s: dict[str, array[float]] = {}

    def add(self, name: str, r: RequestState | None = None, why: str = "") -> None:
        label = f"{name}: {why}" if why else name
        times_s = self.times_s.get(label)
        if times_s is None:
            if name not in self:
                raise UnknownNameError("mechanism", name, self)
            times_s = self.times_s[label] = array("d")
        self[name] += 1
        times_s.append(self._clock())


def summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts of several instances together."""
    total: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    return total
