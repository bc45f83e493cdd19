"""Whether a deployment carries a rate: runs of a chosen length, until their verdict is certain."""

from __future__ import annotations

from dataclasses import dataclass

from ...harness.results.stationarity import SETTLED_HORIZONS, drifts, requests_in, starves
from ..capacity.curve import CapacityLevel
from ..capacity.samples import LevelRunner, LevelSample

_MOST_RUNS = 6
_LONGEST = 8  # times the length of the first run


@dataclass(frozen=True)
class RunLength:
    """How long runs are, and how many there are at least.

    A run has `requests` requests, more where they arrive in fewer than `horizons` horizons of the
    SLO or mean times in the system.
    """

    requests: int
    horizons: float
    runs: int = 1


SEARCH = RunLength(2000, 2 * SETTLED_HORIZONS)
LIGHT = RunLength(300, 2 * SETTLED_HORIZONS)
CONFIRM = RunLength(8000, 4 * SETTLED_HORIZONS, runs=3)


@dataclass(frozen=True)
class Verdict:
    """Attainment over all runs at a rate, with its 95 % interval, and whether it is carried."""

    carries: bool
    attainment: float
    low: float
    high: float
    runs: int
    requests: int  # of all runs


def verdict(
    runner: LevelRunner, rate_rps: float, target: float, first_seed: int, length: RunLength
) -> Verdict:
    """Run a rate on seeds from `first_seed` on, at most six times, until the verdict is certain.

    Where the runs are too short to show whether the system keeps up, the next one is twice as long.

    The rate is carried if the interval lies above `target` and settled runs show that the system
    keeps up. It is not if the interval lies below, the backlog grows, attainment drifts during a
    run, or requests starve. What is still undecided after the last run is not carried.
    """
    requests = length.requests
    samples: list[LevelSample] = []
    while True:
        sample = runner.run(rate_rps, first_seed + len(samples), requests)
        lasting_s = length.horizons * max(sample.horizon_s, sample.stay_s)
        needed = requests_in(lasting_s, rate_rps, sample.horizon_s)
        if not samples and sample.attainment >= target and requests < needed:
            requests = needed
            continue
        samples.append(sample)
        level = CapacityLevel(rate_rps, tuple(samples))
        low, high = level.attainment_interval
        unsteady = level.growing or any(drifts(one) or starves(one) for one in samples)
        carries = low >= target and level.sustained and len(samples) >= length.runs
        if unsteady or high < target or carries or len(samples) == _MOST_RUNS:
            return Verdict(
                carries and not unsteady,
                level.attainment,
                low,
                high,
                len(samples),
                level.requests,
            )
        if not level.sustained:
            requests = min(2 * requests, _LONGEST * max(length.requests, needed))
