"""How often each mechanism of a system acted in a cell, those included that the records show."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...workloads.arrays import Floats
from ..core.counters import DROPS, FROM_RECORDS, OVERTAKES, RECOMPUTES, REJECTIONS, SWAPS
from ..core.records.request_records import Outcome, Records, Result


def overtook(records: Records) -> NDArray[np.bool_]:
    """Which requests began before one that had come to the same instance earlier."""
    overtaking = np.zeros(len(records), dtype=np.bool_)
    began = np.flatnonzero(np.isfinite(records.first_scheduled_s))
    for instance in np.unique(records.instance[began]):
        here = began[records.instance[began] == instance]
        here = here[np.argsort(records.queued_s[here], kind="stable")]
        latest_s = np.maximum.accumulate(records.first_scheduled_s[here])
        overtaking[here] = latest_s > records.first_scheduled_s[here]
    return overtaking


_OF_RECORDS: Mapping[str, Callable[[Records], NDArray[Any]]] = {
    DROPS: lambda records: records.outcome == Outcome.DROPPED,
    REJECTIONS: lambda records: records.outcome == Outcome.REJECTED,
    SWAPS: lambda records: records.preemptions_swap,
    RECOMPUTES: lambda records: records.preemptions_recompute,
}


def counts_of(result: Result) -> dict[str, int]:
    """Name to number of acts of every mechanism that the policies of the cell declare."""
    fold = MechanismsFold(result.counts)
    fold.add(result.records)
    return fold.counts(result)


class MechanismsFold:
    """Counts the acts that the records show, of requests in blocks in the order of arrival."""

    def __init__(self, names: Collection[str] = FROM_RECORDS) -> None:
        """`names`: the mechanisms whose counts will be asked for."""
        self._acts = {name: 0 for name in _OF_RECORDS if name in names}
        self._overtakes = _Overtakes() if OVERTAKES in names else None

    def add(self, records: Records) -> None:
        """Add the requests of a block."""
        for name in self._acts:
            self._acts[name] += int(_OF_RECORDS[name](records).sum())
        if self._overtakes is not None:
            self._overtakes.add(records)

    def counts(self, result: Result) -> dict[str, int]:
        """Name to number of acts of every mechanism of a run, whose requests these were."""
        acts = dict(self._acts)
        if REJECTIONS in acts:
            acts[REJECTIONS] -= result.overlong
        if self._overtakes is not None:
            acts[OVERTAKES] = self._overtakes.total()
        return {name: acts.get(name, count) for name, count in result.counts.items()}


class _Overtakes:
    """Requests that began before one that had come to the same instance earlier, counted in the
    order in which they came (`overtook`).
    """

    def __init__(self) -> None:
        self._count_so_far = 0
        self._latest_s: dict[int, float] = {}  # first batch of those so far, by instance
        # Instance, coming and first batch of those that came after the last arrival so far.
        self._ahead = np.empty((3, 0))

    def add(self, records: Records) -> None:
        """Add requests in order of arrival."""
        began = np.isfinite(records.first_scheduled_s)
        rows = (records.instance, records.queued_s, records.first_scheduled_s)
        begun = np.concatenate((self._ahead, np.array([row[began] for row in rows])), axis=1)
        begun = begun[:, np.argsort(begun[1], kind="stable")]
        # Later requests come after the last arrival of these.
        n = int(np.searchsorted(begun[1], records.arrival_s[-1], side="right"))
        self._count(begun[:, :n])
        self._ahead = begun[:, n:]

    def total(self) -> int:
        """How many there are among all."""
        self._count(self._ahead)
        self._ahead = self._ahead[:, :0]
        return self._count_so_far

    def _count(self, begun: Floats) -> None:
        for instance in np.unique(begun[0]).tolist():
            begins_s = begun[2, begun[0] == instance]
            before_s = self._latest_s.get(instance, -math.inf)
            latest_s = np.maximum.accumulate(np.append(before_s, begins_s))[1:]
            self._count_so_far += int((latest_s > begins_s).sum())
            self._latest_s[instance] = float(latest_s[-1])
