"""Whether requests met their SLO: the one place where times are compared with bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....workloads.request import SLO_COLUMNS
from ....workloads.workload import Workload
from .request_records import Outcome, Records

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Sums of floating-point times may pass a bound by rounding alone: a nanosecond is not late.
TOLERANCE_S = 1e-9


@dataclass(frozen=True)
class Judged:
    """Which requests met their SLO, and which bound the others missed.

    `late` holds a mask for each key of `SLO_COLUMNS`, true for finished requests only; one request
    may miss several bounds.
    """

    met: Mask
    late: Mapping[str, Mask]


def late(
    seconds: Floats | float, bound_s: Floats | float, tolerance_s: float = TOLERANCE_S
) -> Mask:
    """Which times exceed their bound. NaN (one token has no TPOT) exceeds none."""
    with np.errstate(invalid="ignore"):
        missed: Mask = np.asarray(seconds) > np.asarray(bound_s) + tolerance_s
    return missed


def judge_times(
    finished: Mask, seconds: Mapping[str, Floats], bounds_s: Mapping[str, Floats | float]
) -> Judged:
    """Compare times with bounds, both by the keys of `SLO_COLUMNS`; a deadline with the finish."""
    missed = {name: finished & late(times_s, bounds_s[name]) for name, times_s in seconds.items()}
    return Judged(finished & ~np.any(list(missed.values()), axis=0), missed)


def judge(workload: Workload, records: Records) -> Judged:
    """Compare the times of every request with its own bounds."""
    bounds_s = {name: getattr(workload, column) for name, column in SLO_COLUMNS.items()}
    return judge_records(records, records.outcome == Outcome.FINISHED, bounds_s)


def judge_records(
    records: Records, finished: Mask, bounds_s: Mapping[str, Floats | float]
) -> Judged:
    """Compare the times of every request with bounds, by the keys of `SLO_COLUMNS`."""
    seconds = {
        "ttft": records.ttft_s,
        "tpot": records.tpot_s,
        "e2e": records.e2e_s,
        "deadline": records.finish_s,
    }
    return judge_times(finished, seconds, bounds_s)
