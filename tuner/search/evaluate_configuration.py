"""Evaluates a configuration: its objectives, with as few requests as other trials allow.

A race, short runs at the best configuration's capacity, decides whether to search another's. At its
capacity, the best configuration has just the target's share of requests in SLO. A configuration
with more capacity has a larger share there. Both serve the same requests (same rate, same seed), so
batch-by-batch differences come from the configuration, and most configurations are pruned after the
first, shortest run. A short run that starts empty has a bias besides its scatter, so the threshold
after one run is higher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...harness.experiments.execution.cell_specs import CellSpec, WorkloadSpec, source
from ...harness.experiments.execution.experiment_plan import plan
from ...harness.experiments.execution.workers import WorkerPool
from ...harness.experiments.experiment import Experiment, backend_of
from ...harness.results.stationarity import backlog_growth, grows, stationary
from ...harness.servers.launch.backend_names import SIMULATED
from ...workloads.errors import SloBenchError
from ...workloads.parsing import finite
from ..capacity.capacity_cells import Ended, without_length
from ..capacity.capacity_options import CapacityOptions
from ..capacity.capacity_search import SearchProgress
from ..capacity.folder import search_cell, start_rps
from ..capacity.level_samples import LevelRunner, LevelSample
from ..capacity.search_options import (
    CapacitySearch,
    SearchOptions,
    requests_of_a_run,
    seeds_of_a_level,
)
from .runs import InfeasibleError, Run, Runs, Servers
from .settings import CAPACITY, COST, Aim
from .space import Configuration, Space, key_of

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

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> PruningThreshold:
        """From `vars` of a threshold, as a trial's attributes have them."""
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
    capacity = search.capacities[0]
    if not capacity.capacity_rps or not math.isfinite(capacity.slope):
        return None
    rate_rps = capacity.capacity_rps
    longest = max(run.requests for level in search.levels for run in level.samples)
    requests = tuple(max(LEAST_REQUESTS, math.ceil(longest * share)) for share in LADDER)
    runs = [runner.run(rate_rps, first_seed + k, n) for k, n in enumerate(requests)]
    if not all(run.valid for run in runs):
        return None
    met = tuple(run.batch_met for run in runs)
    return PruningThreshold(trial, rate_rps, capacity.slope, gpus, met, requests)


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
    run_met = sum(run.met for run in runs)
    best = sum(sum(batches) for batches in pace.met[: len(runs)])
    away = (_logit(run_met, counted) - _logit(best, counted)) / max(pace.slope, 0.1)
    estimate = pace.rate_rps * math.exp(min(max(away, -math.log(_FARTHEST)), math.log(_FARTHEST)))
    if lost:
        served_share = 1 - backlog_growth(runs) if grows(runs) else 1.0
        estimate = min(estimate, max(served_share, 1 / _FARTHEST) * pace.rate_rps)
    return RaceResult(lost, estimate, sum(run.requests for run in runs), run_met / counted)


def _logit(met: float, counted: int) -> float:
    share = (met + 0.5) / (counted + 1)
    return math.log(share / (1 - share))


_MORE_TRIES = 2
_ALONE = 50  # part of the estimated capacity at which requests hardly ever meet
_ALONE_REQUESTS = 200
DRIFTING = "drifting_after_s"  # figure of a trial: arrivals of its runs that are not stationary
ANSWERED = "answered"  # figure of a trial: share of the requests, where not all were answered
RACE_SEEDS = 500_000  # away from those of searches


@dataclass(frozen=True)
class ConfigurationResult:
    """Result of an evaluation. `values` are those of the objectives, in order.

    `lost`: it was pruned by a race, and a capacity among the values is an estimate. `missed`:
    target share in SLO minus measured share, for objectives with a required attainment.
    """

    values: tuple[float, ...]
    lost: bool = False
    missed: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    pace: PruningThreshold | None = None


@dataclass(frozen=True)
class ConfigurationEvaluator:
    """Evaluates configurations of one experiment, all with the same seeds.

    `report` of `worth` receives intermediate values by step, and returns whether to prune.
    """

    experiment: Experiment
    space: Space
    aim: Aim
    tolerance: float
    folder: Path
    servers: Servers
    ended: Ended | None = None
    pool: WorkerPool | None = None
    max_search_s: float | None = None  # of a capacity search on a real server; None: its default

    @property
    def simulated(self) -> bool:
        """Whether configurations are simulated; else real servers run them."""
        return self.experiment.backend == SIMULATED

    @property
    def options(self) -> SearchOptions:
        """Options of every capacity search."""
        limit_s = None if self.simulated else self.max_search_s
        capacity_options = CapacityOptions(
            targets=(self.aim.target,), tolerance=self.tolerance, max_time_s=limit_s
        )
        return SearchOptions.of(self.experiment, capacity_options)

    @property
    def requests(self) -> int:
        """Number of requests of a run under the load."""
        return requests_of_a_run(self.experiment)

    def seeds(self, least: int = 0) -> range:
        """Seeds of the runs under the load, `least` or more."""
        return seeds_of_a_level(self.experiment, least)

    def again(
        self, folder: Path, servers: Servers, *, seeds_from: int, **changes: Any
    ) -> ConfigurationEvaluator:
        """The same with `changes` of the experiment, on seeds that are `seeds_from` further on."""
        table = self.experiment.model_dump(exclude_unset=True) | changes
        table["seed"] = self.experiment.seed + seeds_from
        experiment = Experiment(**table)
        return replace(
            self, experiment=experiment, folder=folder, servers=servers, max_search_s=None
        )

    def runs_of(self, configuration: Configuration) -> Runs:
        """The runs of a configuration so far.

        Raises:
            InfeasibleError: the configuration cannot be deployed.
        """
        try:
            applied = self.space.applied(self.experiment, configuration)
            spec = cell_of(applied, key_of(configuration))
            if not self.simulated:
                backend_of(applied).check(spec)
        except SloBenchError as error:
            raise InfeasibleError(str(error)) from error
        return Runs(
            self.folder / "runs" / f"{spec.cell}.jsonl",
            spec,
            lambda: self.servers.of(applied, spec),
            self.ended,
            self.pool,
        )

    def worth(
        self,
        runs: Runs,
        *,
        trial: int = 0,
        pace: PruningThreshold | None = None,
        fewest_gpus: int | None = None,
        report: Callable[[int, float], bool] = lambda step, value: False,
    ) -> ConfigurationResult:
        """Evaluate a configuration: race, capacity search and runs under the load, as the
        objectives need.

        Args:
            runs: of the configuration.
            trial: its number.
            pace: the best configuration's result, which it must beat; None: there is none yet.
            fewest_gpus: GPUs of a configuration that already carries the load (objective cost
                alone).
            report: receives (step, value of the only objective); returns True to prune.

        Raises:
            InfeasibleError: it leaves models on no GPU.
            SloBenchError: no run was valid, or a server did not start or died.
        """
        gpus = gpus_of(runs.spec)
        figures: dict[str, Any] = {"gpus": gpus}
        values: dict[str, float] = {COST: float(gpus)}
        own_pace, lost = None, False
        if self.aim.must_attain and fewest_gpus is not None and gpus >= fewest_gpus:
            return ConfigurationResult(self._values(values), lost=True, figures=figures)
        if self.aim.searches_capacity:
            search = self.capacity(runs, pace)
            if isinstance(search, RaceResult):
                values[CAPACITY], lost = search.estimate_rps, True
                assert pace is not None
                figures |= {
                    "raced_at_rps": pace.rate_rps,
                    "raced_attainment": search.attainment,
                    "raced_requests": search.requests,
                }
                report(search.requests, search.estimate_rps)
            else:
                capacity = search.capacities[0]
                values[CAPACITY] = (
                    capacity.low_rps if capacity.capacity_rps is None else capacity.capacity_rps
                )
                figures |= {
                    "low_rps": capacity.low_rps,
                    "high_rps": finite(capacity.high_rps),
                    "precise": capacity.precise,
                    "outcome": capacity.outcome.value,
                    "stopped": search.stopped,
                }
                if pace is None or (capacity.capacity_rps or 0.0) > pace.rate_rps:
                    first = self.options.first_seed + RACE_SEEDS
                    own_pace = pace_of(runs, search, trial=trial, gpus=gpus, first_seed=first)
        missed = 0.0
        if self.aim.measures_level:
            level, stopped = self._level(runs, report)
            lost = lost or stopped
            values |= level
            figures |= level
            if self.aim.must_attain:
                missed = self.aim.target - level["attainment"]
        return ConfigurationResult(self._values(values), lost, missed, figures, own_pace)

    def _values(self, by_name: Mapping[str, float]) -> tuple[float, ...]:
        return tuple(by_name.get(name, math.nan) for name in self.aim.names)

    def capacity(self, runs: Runs, pace: PruningThreshold | None) -> CapacitySearch | RaceResult:
        """The capacity search of a configuration, or the race that it lost."""
        near: Sequence[float] = ()
        if pace is not None:
            raced = race(runs, pace, first_seed=self.options.first_seed + RACE_SEEDS)
            if raced.lost:
                return raced
            near = (min(raced.estimate_rps, 2 * pace.rate_rps),)

        def watch(progress: SearchProgress) -> None:
            """Stop the search when its interval lies below the best capacity."""
            (crossing,) = progress.crossings
            if pace is not None and crossing is not None and crossing.high_rps < pace.rate_rps:
                estimate = min(crossing.rate_rps, pace.rate_rps)
                raise _OvertakenError(RaceResult(True, estimate, progress.requests_spent, math.nan))

        experiment = self.experiment
        begin_rps = near[0] if near else start_rps(experiment, runs.spec, runs)
        most_rows = experiment.requests[0]
        try:
            return search_cell(
                runs, runs.spec, self.options, begin_rps, near, most_rows, watch, runs.expect
            )
        except _OvertakenError as overtaken:
            return overtaken.raced

    def _level(
        self, runs: Runs, report: Callable[[int, float], bool]
    ) -> tuple[dict[str, float], bool]:
        """The figures under the load, means over the seeds; True if they were not all run."""
        assert self.aim.load is not None
        seeds = len(self.seeds())
        kept: list[Run] = []
        stopped = False
        for seed in self.seeds(seeds + _MORE_TRIES):
            if len(kept) == seeds:
                break
            run = runs.level(self.aim.load.rate_rps, seed, self.requests)
            if not run.sample.valid:
                continue  # the client may have been late by accident
            kept.append(run)
            only = self.aim.single
            if only is not None and only.column is not None and len(kept) < seeds:
                mean = _mean(kept, only.column)
                if not math.isnan(mean) and report(len(kept) - 1, mean):
                    stopped = True
                    break
        if not kept:
            raise SloBenchError(f"no valid run {self.aim.load.text}: {run.sample.invalid_because}")
        columns = {o.name: o.column for o in self.aim.objectives if o.column is not None}
        figures = {name: _mean(kept, column) for name, column in columns.items()}
        after_s = drifting_after_s(kept)
        if after_s is not None:
            figures[DRIFTING] = after_s
        answered = _mean(kept, "finished") / _mean(kept, "requests")
        if answered < 1:
            figures[ANSWERED] = answered
        return {**figures, "attainment": _mean(kept, "attainment")}, stopped


def drifting_after_s(runs: Sequence[Run]) -> float | None:
    """Mean window of arrivals, in seconds, of the runs that are not stationary; None: all are, or
    all requests came at once.
    """
    windows_s = [
        run.figures["arrival_window_s"]
        for run in runs
        if run.figures.get("arrival_window_s") and stationary(run.sample) is False
    ]
    return sum(windows_s) / len(windows_s) if windows_s else None


def unmet_alone(evaluation: ConfigurationEvaluator) -> str | None:
    """A sentence if the default misses the target even where requests hardly ever meet.

    Simulated at a fiftieth of the estimated capacity; None on a real server, for arrivals without
    a rate, and for objectives without a target.
    """
    aim = evaluation.aim
    at_a_rate = aim.load is None or aim.load.rate_rps is not None
    if not (evaluation.simulated and at_a_rate and (aim.searches_capacity or aim.must_attain)):
        return None
    try:
        runs = evaluation.runs_of({})
        rate_rps = start_rps(evaluation.experiment, runs.spec, runs) / _ALONE
        sample = runs.run(rate_rps, evaluation.options.first_seed, _ALONE_REQUESTS)
    except SloBenchError:
        return None  # the default cannot be deployed: its trial says why
    if sample.attainment >= aim.target:
        return None
    return (
        f"the default configuration cannot meet this SLO: at {rate_rps:.2g} req/s, almost without "
        f"load, {sample.attainment:.0%} of the requests do, and the target is {aim.target:.0%}; "
        "unless another configuration makes single requests faster, allow a longer SLO (--slo) or "
        "take faster hardware"
    )


class _OvertakenError(Exception):
    """A capacity search stopped early: the configuration is worse than the best one."""

    def __init__(self, raced: RaceResult) -> None:
        super().__init__()
        self.raced = raced


def _mean(kept: Sequence[Run], column: str) -> float:
    values = [run.figures[column] for run in kept if column in run.figures]
    return sum(values) / len(values) if len(values) == len(kept) else math.nan


def cell_of(experiment: Experiment, name: str) -> CellSpec:
    """The one cell of an experiment, called `name`; the load is a run's.

    Raises:
        SloBenchError: it makes no experiment, or several cells.
    """
    closed = source(WorkloadSpec.first_of(experiment)).closed_loop
    single = {
        "rates": None if closed else (1.0,),
        "replay_speeds": None,
        "load_factors": None,
        "seeds": 1,
        **without_length(experiment),
    }
    cells = plan(experiment.model_copy(update=single)).cells
    if len(cells) > 1:
        raise SloBenchError(
            f"tuning needs one system under one load, but there are {len(cells)} cells: give one "
            "value of each setting, and search others with --search"
        )
    return replace(cells[0], cell=name)


def gpus_of(spec: CellSpec) -> int:
    """Number of GPUs of a configuration."""
    gpus = spec.columns["gpus"]
    assert isinstance(gpus, int)
    return gpus
