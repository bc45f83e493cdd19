"""How often each mechanism of a system acted in a cell, those included that the records show."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ..core.counters import DROPS, OVERTAKES, RECOMPUTES, REJECTIONS, SWAPS
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


_FROM_RECORDS: Mapping[str, Callable[[Result], int]] = {
    OVERTAKES: lambda result: int(overtook(result.records).sum()),
    DROPS: lambda result: int((result.records.outcome == Outcome.DROPPED).sum()),
    REJECTIONS: lambda result: (
        int((result.records.outcome == Outcome.REJECTED).sum()) - result.overlong
    ),
    SWAPS: lambda result: int(result.records.preemptions_swap.sum()),
    RECOMPUTES: lambda result: int(result.records.preemptions_recompute.sum()),
}


def counts_of(result: Result) -> dict[str, int]:
    """Name to number of acts of every mechanism that the policies of the cell declare."""
    return {
        name: _FROM_RECORDS[name](result) if name in _FROM_RECORDS else count
        for name, count in result.counts.items()
    }
