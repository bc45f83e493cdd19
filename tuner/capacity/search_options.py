"""Settings and results of a capacity search."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.results.stationarity import MOST_GROWTH
from ...harness.servers.launch.backend_names import SIMULATED
from ...workloads.errors import SloBenchError
from . import capacity_options as usual
from .capacity_options import CapacityOptions
from .curve import QUANTILE, REAL_QUANTILE, CapacityLevel
from .level_samples import LevelSample

WIDEST_BRACKET = 1.25
_IN_REAL_TIME = 0.5  # of the time of its arrivals, that a run on a server takes at least
LEAST_SHARES = 15  # no run takes more than this fraction of the budget
_GROWTH_SHARE = 0.2  # of the tolerance, that a capacity may be too high for growth not seen


@dataclass(frozen=True)
class Budget:
    """What a search may spend; None is no limit.

    Both may be exceeded where an SLO takes long to miss, or an answer long: up to `horizons` times
    the horizon in seconds (an hour at most), or the requests that arrive in it at the capacity.
    """

    requests: int | None = 1_000_000
    time_s: float | None = None
    horizons: float = 0.0

    def extended(self, horizon_s: float, rate_rps: float) -> Budget:
        """The budget for an SLO with this horizon at `rate_rps`."""
        if not self.horizons:
            return self
        if self.requests is not None:
            enough = int(self.horizons * horizon_s * rate_rps)
            return replace(self, requests=max(self.requests, enough))
        if self.time_s is None:
            return self
        longer_s = min(self.horizons * horizon_s, usual.REAL_MOST_S)
        return replace(self, time_s=max(self.time_s, longer_s))

    def most_requests(self, rate_rps: float) -> float:
        """Requests at `rate_rps` for which the whole budget suffices."""
        requests = math.inf if self.requests is None else self.requests
        return min(requests, math.inf if self.time_s is None else self.time_s * rate_rps)

    def longest_run(self, rate_rps: float) -> float:
        """Most requests of a run at `rate_rps`: a small share of the budget."""
        return self.most_requests(rate_rps) / LEAST_SHARES


def requests_of_a_run(experiment: ExperimentSchema) -> int:
    """Number of requests of a run, those of a capacity search at least so many."""
    simulated = experiment.backend == SIMULATED
    usual_requests = usual.SIMULATED_REQUESTS if simulated else usual.REAL_REQUESTS
    return experiment.requests[0] or usual_requests


def seeds_of_a_level(experiment: ExperimentSchema, least: int = 0) -> range:
    """Seeds of the runs under one load, `least` or more."""
    return range(experiment.seed, experiment.seed + max(least, experiment.seeds or usual.SEEDS))


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    `requests` is the least number of requests in a run, `seeds` the number of consecutive runs of a
    level, `tolerance` half the width of the interval to reach, as a share of the estimate. Only
    rates from `low_rps` to `high_rps` are tried. Refining begins when a passing and a failing rate
    are apart by `widest_bracket` times or less. No run takes more than a share of `shares_of`, by
    default the budget. When a search is resumed with a larger budget, `shares_of` remains the first
    budget, so that the search repeats the same runs.
    """

    targets: tuple[float, ...] = (0.9, 0.99)
    tolerance: float = 0.03
    requests: int = 2000
    seeds: int = 3
    first_seed: int = 0
    budget: Budget = field(default_factory=Budget)
    shares_of: Budget | None = None
    low_rps: float = 0.0
    high_rps: float = math.inf
    most_horizons: float = usual.SIMULATED_HORIZONS
    quantile: float = QUANTILE
    widest_bracket: float = WIDEST_BRACKET

    @classmethod
    def of(cls, experiment: ExperimentSchema, options: CapacityOptions) -> Self:
        """Those of an experiment's searches, with what is not asked filled in."""
        simulated = experiment.backend == SIMULATED
        budget = Budget(None, usual.REAL_BUDGET_S, usual.REAL_BUDGET_HORIZONS)
        if simulated:
            budget = Budget(usual.SIMULATED_BUDGET, horizons=usual.SIMULATED_BUDGET_HORIZONS)
        if options.has_budget:
            budget = Budget(options.max_requests, options.max_time_s)
        targets, tolerance = options.targets, options.tolerance
        if not simulated:
            set_fields = options.model_fields_set
            targets = targets if "targets" in set_fields else usual.REAL_TARGETS
            tolerance = tolerance if "tolerance" in set_fields else usual.REAL_TOLERANCE
        return cls(
            targets=targets,
            tolerance=tolerance,
            requests=requests_of_a_run(experiment),
            seeds=experiment.seeds or (usual.SEEDS if simulated else usual.REAL_SEEDS),
            first_seed=experiment.seed,
            budget=budget,
            most_horizons=usual.SIMULATED_HORIZONS if simulated else usual.REAL_HORIZONS,
            quantile=QUANTILE if simulated else REAL_QUANTILE,
        )

    @property
    def most_growth(self) -> float:
        """Growth of a backlog, as a share of the arrivals, up to which a level keeps up."""
        return max(MOST_GROWTH, _GROWTH_SHARE * self.tolerance)

    def __post_init__(self) -> None:
        if not self.targets:
            raise SloBenchError("give at least one target, as in 0.9")
        for target in self.targets:
            if not 0 < target < 1:
                raise SloBenchError(f"target must lie between 0 and 1 but is {target:g}")
        if len(set(self.targets)) < len(self.targets):
            raise SloBenchError("each target can be given once")
        if not 0.001 <= self.tolerance <= 0.5:
            raise SloBenchError(f"tolerance must lie in 0.001..0.5 but is {self.tolerance:g}")
        for name, least in (("requests", 100), ("seeds", 1), ("first_seed", 0)):
            if getattr(self, name) < least:
                raise SloBenchError(f"{name} must be at least {least} but is {getattr(self, name)}")
        for name in ("requests", "time_s"):
            limit = getattr(self.budget, name)
            if limit is not None and limit <= 0:
                raise SloBenchError(f"max_{name} must be positive but is {limit}")
        if not 0 <= self.low_rps < self.high_rps:
            raise SloBenchError(
                f"the lowest rate ({self.low_rps:g}) must be below the highest ({self.high_rps:g})"
            )


class SearchOutcome(Enum):
    """What a search has concluded about one target."""

    FOUND = "found"
    NEVER_MISSED = "never missed"  # no rate in the range misses the target: capacity_rps is None
    NEVER_MET = "never met"  # not even the lowest rate in the range meets it: capacity_rps is 0
    UNDECIDED = "undecided"  # the budget does not suffice to decide: capacity_rps is None


@dataclass(frozen=True)
class Capacity:
    """Result for one target.

    `low_rps` is 0 or a rate that was run and carried; `high_rps` is infinite where no rate tried
    misses the target. Where the capacity was `FOUND`, the interval has `CONFIDENCE`. `precise`: it
    is within the tolerance. `limited_by`: the setting to raise for a decision or a narrower
    interval.
    """

    target: float
    capacity_rps: float | None
    low_rps: float
    high_rps: float
    precise: bool
    outcome: SearchOutcome = SearchOutcome.FOUND
    slope: float = math.nan
    dispersion: float = math.nan
    runs: int = 0
    limited_by: str | None = None


@dataclass(frozen=True)
class CapacitySearch:
    """A finished search: capacities by target, levels by rate, what it took and why it ended."""

    capacities: tuple[Capacity, ...]
    levels: tuple[CapacityLevel, ...]
    requests_spent: int
    wall_s: float
    stopped: str


@dataclass(frozen=True)
class SpentBudget:
    """What ended a search: the setting that allows no further run, and what is left of it.

    `fitting_requests`: the length of a run for which the time that is left suffices.
    """

    setting: str
    left: str
    fitting_requests: int = 0


def budget_spent(
    budget: Budget,
    spent: int,
    wall_s: float,
    requests: int,
    levels: Iterable[CapacityLevel],
    rate_rps: float,
) -> SpentBudget | None:
    """The part of the budget that does not suffice for a run of `requests` at `rate_rps`, or
    None.
    """
    if budget.requests is not None and spent + requests > budget.requests:
        return SpentBudget(
            "max_requests",
            f"the next run needs {requests:,} requests, "
            f"{max(0, budget.requests - spent):,} of {budget.requests:,} are left",
        )
    runs = [run for level in levels for run in level.samples]
    if budget.time_s is None or not runs:
        return None
    request_s = _request_s(runs, rate_rps)
    left_s = max(0.0, budget.time_s - wall_s)
    if request_s * requests <= left_s:
        return None
    return SpentBudget(
        "max_time_s",
        f"the search ended by time: the next run needs {request_s * requests:.3g} s, "
        f"{left_s:.3g} of {budget.time_s:g} s are left",
        int(left_s / request_s),
    )


def _request_s(runs: Iterable[LevelSample], rate_rps: float) -> float:
    """Time that a run at `rate_rps` takes for each of its requests, by the one at the nearest rate:
    on a real server that of an arrival, and what that run took longer than its arrivals.
    """
    nearest = min(runs, key=lambda run: abs(math.log(run.rate_rps / rate_rps)))
    took_s, arrival_s = nearest.wall_s / nearest.requests, 1 / nearest.rate_rps
    if took_s < _IN_REAL_TIME * arrival_s:
        return took_s
    return 1 / rate_rps + max(0.0, took_s - arrival_s)
