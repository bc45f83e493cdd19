"""A workload shared out to sending processes, and how many it needs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...workloads.workload import Workload
from .machine import cores

# CPU time that sending takes, generously; `slo-bench selftest` measures it.
REQUEST_CPU_S = 0.4e-3
TOKEN_CPU_S = 10e-6
_LITTLE_WORK_S = 0.5  # is done when another process would have started
_BUSY_SHARE = 0.5  # of a core; above it, stamps begin to wait for each other


@dataclass(frozen=True)
class Share:
    """The `index`-th of `count` equal shares. Requests of one session stay in one share."""

    index: int
    count: int

    def of(self, workload: Workload) -> Workload:
        """The workload as this share sees it: all rows, its part of the concurrency."""
        if self.count == 1 or workload.concurrency is None:
            return workload
        each, more = divmod(workload.concurrency, self.count)
        return dataclasses.replace(workload, concurrency=each + (self.index < more))


def rows_elsewhere(workload: Workload, share: Share) -> NDArray[np.int64]:
    """The rows that other shares send."""
    root = np.arange(len(workload))
    for row in np.flatnonzero(workload.follows >= 0).tolist():
        root[row] = root[workload.follows[row]]  # the earlier request of a session comes first
    return np.flatnonzero(root % share.count != share.index)


def rows_of(workload: Workload, share: Share) -> set[int]:
    """The rows that a share sends."""
    return set(range(len(workload))).difference(rows_elsewhere(workload, share).tolist())


def processes_for(workload: Workload, most: int | None = None) -> int:
    """Return the number of processes needed to send the workload on time, at most `most` (the
    number of cores).

    In a closed loop the rate is not known beforehand: one process.
    """
    if workload.concurrency is not None or workload.span_s <= 0:
        return 1
    work_s = len(workload) * REQUEST_CPU_S + float(workload.output_tokens.sum()) * TOKEN_CPU_S
    if work_s < _LITTLE_WORK_S:
        return 1
    busy_cores = work_s / workload.span_s
    return max(1, min(math.ceil(busy_cores / _BUSY_SHARE), most or cores()))
