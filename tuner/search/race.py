"""A race: short runs at the best configuration's capacity decide whether to search another's.

At its capacity, the best configuration has just the target's share of requests in SLO. A
configuration with more capacity has a larger share there. Both serve the same requests (same rate,
same seed), so batch-by-batch differences come from the configuration, and most configurations are
pruned after the first, shortest run. A short run that starts empty has a bias besides its scatter,
so the threshold after one run is higher.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...harness.results.stationarity import backlog_growth, grows
from ..capacity.options import CapacitySearch
from ..capacity.samples import LevelRunner, LevelSample

LADDER = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of a run of the best one's search
LEAST_REQUESTS = 200  # in a run
_OUT_SIGMAS = (4.0, 3.0, 2.0)  # after each run but the last, in standard errors
_FARTHEST = 16.0  # times; an estimate is no lower than the best one's rate over that


@dataclass(frozen=True)
class PruningThreshold:
    """The best configuration's capacity, and how many requests met their SLO in each run there."""

    trial: int
    rate_rps: float
    slope: float  # logits of attainment that are lost with an e-fold of rate
    gpus: int
    met: tuple[tuple[float, ...], ...]  # by run and batch
    requests: tuple[int, ...]  # in each run

    def plain(self) -> dict[str, Any]:
        """The threshold as plain values, for a trial's attributes."""
        return vars(self)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> PruningThreshold:
        """The inverse of `plain`."""
        met = tuple(tuple(batches) for batches in plain["met"])
        return cls(**{**plain, "met": met, "requests": tuple(plain["requests"])})


@dataclass(frozen=True)
class RaceResult:
    """Result of a race: whether it was lost, and the estimated capacity."""

    lost: bool
    estimate_rps: float
    requests: int
    attainment: float


def pace_of(
    runner: LevelRunner, search: CapacitySearch, *, trial: int, gpus: int, first_seed: int
) -> PruningThreshold | None:
    """The threshold that a searched configuration sets for others; None if it found no crossing."""
    found = search.capacities[0]
    if not found.capacity_rps or not math.isfinite(found.slope):
        return None
    rate_rps = found.capacity_rps
    longest = max(run.requests for level in search.levels for run in level.samples)
    requests = tuple(max(LEAST_REQUESTS, math.ceil(longest * share)) for share in LADDER)
    runs = [runner.run(rate_rps, first_seed + k, n) for k, n in enumerate(requests)]
    if not all(run.valid for run in runs):
        return None
    met = tuple(run.batch_met for run in runs)
    return PruningThreshold(trial, rate_rps, found.slope, gpus, met, requests)


def race(runner: LevelRunner, pace: PruningThreshold, *, first_seed: int) -> RaceResult:
    """Run at the threshold's rate until the race is lost, or the last run is done."""
    runs: list[LevelSample] = []
    for place, requests in enumerate(pace.requests):
        run = runner.run(pace.rate_rps, first_seed + place, requests)
        if not run.valid:
            break  # inconclusive: a search must decide
        runs.append(run)
        last = place == len(pace.requests) - 1
        if _lost(runs, pace.met, last=last):
            return _outcome(runs, pace, lost=True)
    return _outcome(runs, pace, lost=False)


def _lost(runs: Sequence[LevelSample], met: Sequence[Sequence[float]], *, last: bool) -> bool:
    """Whether clearly fewer requests meet their SLO than with the best configuration."""
    gained = np.concatenate(
        [np.subtract(run.batch_met, best) for run, best in zip(runs, met, strict=False)]
    ).astype(float)
    total = float(gained.sum())
    if grows(runs) and total <= 0:
        return True
    if last or (len(runs) > 1 and not gained.any()):  # the same all along: it makes no difference
        return total <= 0
    error = float(gained.std(ddof=1)) * math.sqrt(len(gained))
    return total < -_OUT_SIGMAS[len(runs) - 1] * error


def _outcome(runs: Sequence[LevelSample], pace: PruningThreshold, *, lost: bool) -> RaceResult:
    """Estimate the capacity with the best configuration's slope of attainment over the rate.

    A loser whose backlog grows without end carries no more than the rate at which requests left.
    """
    if not runs:
        return RaceResult(lost, pace.rate_rps, 0, math.nan)
    counted = sum(run.counted for run in runs)
    own = sum(run.met for run in runs)
    best = sum(sum(batches) for batches in pace.met[: len(runs)])
    away = (_logit(own, counted) - _logit(best, counted)) / max(pace.slope, 0.1)
    estimate = pace.rate_rps * math.exp(min(max(away, -math.log(_FARTHEST)), math.log(_FARTHEST)))
    if lost:
        served_share = 1 - backlog_growth(runs) if grows(runs) else 1.0
        estimate = min(estimate, max(served_share, 1 / _FARTHEST) * pace.rate_rps)
    return RaceResult(lost, estimate, sum(run.requests for run in runs), own / counted)


def _logit(met: float, counted: int) -> float:
    share = (met + 0.5) / (counted + 1)
    return math.log(share / (1 - share))
