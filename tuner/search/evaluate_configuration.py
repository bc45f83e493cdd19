"""Evaluates a configuration: its objectives, with as few requests as other trials allow.

The first configuration climbs: short runs find about where its attainment falls to the target.
Every other one makes the same runs there (same rate, same seeds), so that differences from batch to
batch come from the configuration, and is out as soon as it is hardly better by a per cent. Whoever
wins such a race leads from then on, with the runs that it has. Only who leads in the end is
searched for its capacity (`prove`), because the search of one takes as many requests as the races
of dozens.

All of a race have the same arrivals, so the control variate of `capacity` is about the same for
all, and correcting by it would change no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...harness.experiments.execution.cell_specs import CellSpec, WorkloadSpec, source
from ...harness.experiments.execution.experiment_plan import plan, step_times_of
from ...harness.experiments.execution.workers import WorkerPool
from ...harness.experiments.experiment import Experiment, backend_of, simulator_of
from ...harness.results.stationarity import backlog_growth, grows, requests_in, stationary
from ...harness.servers.launch.backend_names import SIMULATED
from ...workloads.errors import SloBenchError
from ...workloads.parsing import finite
from ..capacity.capacity_cells import Ended, without_length
from ..capacity.capacity_options import CapacityOptions
from ..capacity.capacity_search import FARTHEST, three_digits
from ..capacity.folder import search_cell, start_rps
from ..capacity.level_samples import LevelRunner, LevelSample
from ..capacity.search_options import (
    Budget,
    CapacitySearch,
    SearchOptions,
    requests_of_a_run,
    seeds_of_a_level,
)
from .runs import InfeasibleError, Run, Runs, Servers
from .settings import CAPACITY, COST, Aim
from .space import Configuration, Space, key_of

LADDER = (1 / 8, 1 / 4, 1 / 2)  # of a run of a search; the lengths of a race's runs
LEAST_REQUESTS = 200  # in a run
_OUT_SIGMAS = (4.0, 3.0)  # after each run but the last, in standard errors
_CLOSE_SIGMAS = 3.0  # below the leader, within which who lost may be as good
_WORTH = 0.01  # of the capacity; a configuration that gains less need not be found
_FARTHEST = 16.0  # times; an estimate is no lower than the best one's rate over that
_FAR_LOGITS = 1.0  # from the target, where attainment says little of differences
_OFF_LOGITS = 1.5  # where a leader's runs move; the first of them flatters, as it begins empty
_LOST_LOGITS = 3.0  # below it, where a slope says nothing either
_WIDEST_MOVE, _LEAST_MOVE = 0.2, 0.04  # of the logarithm of the rate
_NEAR = 1.6  # times a leader's rate, up to which a new leader does not climb
_NARROW = 1.25  # times, between rates that pass and fail
_SLOPES = (2.0, 60.0)  # the range of a slope


@dataclass(frozen=True)
class PruningThreshold:
    """The leader of the races: the rate of its runs, and how many requests met their SLO in each.

    `slope`: logits of attainment that are lost with an e-fold of rate. `estimate_rps`: about the
    leader's capacity.
    """

    rate_rps: float
    estimate_rps: float
    slope: float
    gpus: int
    met: tuple[tuple[float, ...], ...]  # by run and batch
    requests: tuple[int, ...]  # in each run

    @property
    def logits_above(self) -> float:
        """Logits by which the attainment of its runs is above the target."""
        return self.slope * math.log(self.estimate_rps / self.rate_rps)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> PruningThreshold:
        """From `vars` of a threshold, as a trial's attributes have them."""
        met = tuple(tuple(batches) for batches in plain["met"])
        return cls(**{**plain, "met": met, "requests": tuple(plain["requests"])})


@dataclass(frozen=True)
class RaceResult:
    """Result of a race: whether it was lost, the estimated capacity, and what was run for it.

    `close`: it may be as good as the leader, within the error of the race, and is not the same.
    `raced_rps`: the estimate by the share in SLO alone.
    """

    lost: bool
    estimate_rps: float
    runs: tuple[LevelSample, ...]
    close: bool = False
    raced_rps: float = math.nan

    @property
    def attainment(self) -> float:
        """Share of the requests in SLO; NaN without a run."""
        counted = sum(run.counted for run in self.runs)
        return sum(run.met for run in self.runs) / counted if counted else math.nan


def pace_of(
    runner: LevelRunner,
    options: SearchOptions,
    start_rps: float,
    *,
    gpus: int,
    first_seed: int,
) -> PruningThreshold | None:
    """The threshold that a configuration sets for others; None if no rate is near the target, or
    the client was late.
    """
    (target,) = options.targets
    climbed = _climbed(runner, options, start_rps, first_seed)
    if climbed is None:
        return None
    rate_rps, slope, sample = climbed
    longest = requests_in(
        options.most_horizons * max(sample.horizon_s, sample.stay_s), rate_rps, sample.horizon_s
    )
    budget = options.budget.extended(sample.horizon_s, rate_rps)
    longest = max(options.requests, int(min(longest, budget.longest_run(rate_rps))))
    # In less, a system that is overloaded has not missed an SLO yet.
    least = max(LEAST_REQUESTS, sample.requests_to_settle)
    requests = tuple(max(least, math.ceil(longest * share)) for share in LADDER)
    climbed_pace = PruningThreshold(rate_rps, rate_rps, slope, gpus, (), requests)
    return _moved_pace(runner, climbed_pace, rate_rps, target, first_seed)


def _moved_pace(
    runner: LevelRunner, pace: PruningThreshold, rate_rps: float, target: float, first_seed: int
) -> PruningThreshold | None:
    """The threshold that a configuration sets at about that rate, with runs that last as long as
    those of `pace`; None if hardly a request meets its SLO, or the client was late.
    """
    slope, rate_rps, runs = pace.slope, three_digits(rate_rps), list[LevelSample]()
    requests = tuple(
        math.ceil(count * max(rate_rps / pace.rate_rps, 1.0)) for count in pace.requests
    )
    widest = _WIDEST_MOVE  # halved at each move, so that moves end
    while len(runs) < len(requests):
        place = len(runs)
        runs.append(runner.run(rate_rps, first_seed + place, requests[place]))
        if not runs[-1].valid:
            return None
        away = from_target(runs, target)
        if abs(away) > _OFF_LOGITS and widest > _LEAST_MOVE:
            move = min(max(away / slope, -widest), widest) if away > -_LOST_LOGITS else -widest
            rate_rps, runs, widest = three_digits(moved(rate_rps, move)), [], widest / 2
        elif away < -2 * _LOST_LOGITS:
            return None  # hardly a request meets its SLO, and no other would be told from it
    met, estimate_rps = tuple(run.batch_met for run in runs), moved(rate_rps, away / slope)
    return PruningThreshold(rate_rps, estimate_rps, slope, pace.gpus, met, requests)


def _climbed(
    runner: LevelRunner, options: SearchOptions, start_rps: float, seed: int
) -> tuple[float, float, LevelSample] | None:
    """The rate at which runs of the same requests fall to the target, about, the slope of their
    logits there, and a run that passes; None: none was found, or a run takes a whole budget.
    """
    (target,), requests, budget = options.targets, options.requests, Budget(None)
    passing: tuple[float, float, LevelSample] | None = None
    failing: tuple[float, float] | None = None
    rate_rps = start_rps
    while start_rps / FARTHEST <= rate_rps <= start_rps * FARTHEST and (
        passing is not None or requests <= budget.most_requests(rate_rps)
    ):
        rate_rps = three_digits(rate_rps)
        run = runner.run(rate_rps, seed, requests)
        budget = options.budget.extended(run.horizon_s, rate_rps)
        if run.valid and not run.settled and from_target([run], target) >= 0:
            # A system that is overloaded may not have missed an SLO yet.
            longest = max(requests, int(budget.longest_run(rate_rps)))
            run = runner.run(rate_rps, seed, min(run.requests_to_settle, longest))
        if not run.valid:
            return None
        away = from_target([run], target)
        if away >= 0:
            passing = rate_rps, away, run
        else:
            failing = rate_rps, away
        if passing is None or failing is None:
            rate_rps = rate_rps / 2 if passing is None else 2 * rate_rps
        elif failing[0] > _NARROW * passing[0]:
            rate_rps = math.sqrt(passing[0] * failing[0])
        else:
            slope = (passing[1] - failing[1]) / math.log(failing[0] / passing[0])
            crossing_rps = passing[0] * math.exp(passing[1] / slope)
            slope = min(max(slope, _SLOPES[0]), _SLOPES[1])
            return three_digits(crossing_rps), slope, passing[2]
    return None


def race(
    runner: LevelRunner,
    pace: PruningThreshold,
    *,
    target: float,
    first_seed: int,
    races_on: bool = False,
) -> RaceResult:
    """Run at the threshold's rate until the race is lost, the rate is far too low, or the last run
    is done. `races_on`: whoever is behind before that has lost, since a last race follows.
    """
    runs: list[LevelSample] = []
    for place, requests in enumerate(pace.requests):
        run = runner.run(pace.rate_rps, first_seed + place, requests)
        if not run.valid:
            break  # inconclusive: a search must decide
        runs.append(run)
        if _lost(runs, pace, last=place >= len(pace.requests) - 1 - races_on):
            return _outcome(runs, pace, lost=True)
        far_ahead = min(from_target(runs, target), _ahead(runs, pace)) > _FAR_LOGITS
        if far_ahead and len(runs) > 1:  # the first run starts empty, and flatters
            break
    return _outcome(runs, pace, lost=False)


def _lost(runs: Sequence[LevelSample], pace: PruningThreshold, *, last: bool) -> bool:
    """Whether fewer requests meet their SLO than with the leader, or hardly more."""
    gained, error = gained_by_batch([run.batch_met for run in runs], pace.met)
    total = float(gained.sum())
    if grows(runs) and total <= 0:
        return True
    counted, met = sum(run.counted for run in runs), _leaders(runs, pace)
    if (last and total <= 0) or len(runs) == len(pace.requests) or not gained.any():
        # The very same twice makes no difference, unless both met all.
        return total <= 0 and len(runs) > 1 and bool(gained.any() or met < counted)
    share = met / counted
    worth = _WORTH * pace.slope * share * (1 - share) * counted
    return total - worth < -_OUT_SIGMAS[len(runs) - 1] * error


def gained_by_batch(
    met: Sequence[Sequence[float]], leaders: Sequence[Sequence[float]]
) -> tuple[np.ndarray, float]:
    """Requests in SLO above the leader's in each batch of as many runs as both have, shape
    (batches,), and the standard error of their sum.
    """
    pairs = zip(met, leaders, strict=False)
    gained = np.concatenate([np.subtract(batches, best) for batches, best in pairs]).astype(float)
    return gained, float(gained.std(ddof=1)) * math.sqrt(len(gained))


def _leaders(runs: Sequence[LevelSample], pace: PruningThreshold) -> float:
    """Requests of the leader that met their SLO in as many runs, of those that count in these:
    with sessions arrivals, and so what counts, depend on answers.
    """
    met = sum(sum(batches) for batches in pace.met[: len(runs)])
    return min(met, sum(run.counted for run in runs))


def _ahead(runs: Sequence[LevelSample], pace: PruningThreshold) -> float:
    """Logits by which the attainment of runs is above the leader's."""
    counted = sum(run.counted for run in runs)
    return logit(sum(run.met for run in runs), counted) - logit(_leaders(runs, pace), counted)


def _outcome(runs: Sequence[LevelSample], pace: PruningThreshold, *, lost: bool) -> RaceResult:
    """Estimate the capacity with the leader's slope of attainment over the rate.

    A loser whose backlog grows without end carries no more than the rate at which requests left.
    """
    if not runs:
        return RaceResult(lost, pace.estimate_rps, ())
    gained, error = gained_by_batch([run.batch_met for run in runs], pace.met)
    close = bool(gained.any()) and float(gained.sum()) > -_CLOSE_SIGMAS * error
    raced_rps = estimate_rps = moved(pace.estimate_rps, _ahead(runs, pace) / pace.slope)
    if lost:
        served_share = 1 - backlog_growth(runs) if grows(runs) else 1.0
        most_rps = min(pace.estimate_rps, max(served_share, 1 / _FARTHEST) * pace.rate_rps)
        estimate_rps = min(estimate_rps, most_rps)
    return RaceResult(lost, estimate_rps, tuple(runs), close, raced_rps)


def moved(rate_rps: float, log_factor: float) -> float:
    """The rate times e to the `log_factor`, which is limited."""
    farthest = math.log(_FARTHEST)
    return rate_rps * math.exp(min(max(log_factor, -farthest), farthest))


def from_target(runs: Sequence[LevelSample], target: float) -> float:
    """Logits by which the attainment of runs is above the target."""
    met, counted = sum(run.met for run in runs), sum(run.counted for run in runs)
    return logit(met, counted) - math.log(target / (1 - target))


def logit(met: float, counted: int) -> float:
    """Logit of a share of requests, finite where all or none met their SLO."""
    share = (met + 0.5) / (counted + 1)
    return math.log(share / (1 - share))


_MORE_TRIES = 2
LEAST_RUNS = 10  # of a capacity search for which few requests are left
_ALONE = 50  # part of the estimated capacity at which requests hardly ever meet
_ALONE_REQUESTS = 200
DRIFTING = "drifting_after_s"  # figure of a trial: arrivals of its runs that are not stationary
ANSWERED = "answered"  # figure of a trial: share of the requests, where not all were answered
RACE_SEEDS = 500_000  # away from those of searches


@dataclass(frozen=True)
class ConfigurationResult:
    """Result of an evaluation. `values` are those of the objectives, in order.

    `lost`: it was pruned by a race, and a capacity among the values is an estimate; so it is where
    it leads with a `pace` for others. `missed`: target share in SLO minus measured share, for
    objectives with a required attainment.
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
    def races_on(self) -> bool:
        """Whether close configurations race on in the end: for the capacity alone, and simulated,
        since a server would have to be started for every run.
        """
        return self.simulated and self.aim.names == (CAPACITY,)

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
            simulator_of(step_times_of([spec])) if self.simulated else {},
        )

    def worth(
        self,
        runs: Runs,
        *,
        pace: PruningThreshold | None = None,
        prove: bool = True,
        near_rps: float | None = None,
        most_requests: int | None = None,
        fewest_gpus: int | None = None,
        report: Callable[[int, float], bool] = lambda step, value: False,
    ) -> ConfigurationResult:
        """Evaluate a configuration: race or capacity search, and runs under the load, as the
        objectives need.

        Args:
            runs: of the configuration.
            pace: the leader, which it must beat; None: there is none yet.
            prove: search its capacity, where a race is enough to compare it.
            near_rps: an estimate of its capacity, where that search begins.
            most_requests: of that search; None: as many as it needs.
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
            raced = None if prove else self._raced(runs, pace, gpus)
            if raced is None:
                search = self.capacity(runs, near_rps, most_requests)
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
            elif isinstance(raced, RaceResult):
                values[CAPACITY], lost = raced.estimate_rps, True
                assert pace is not None
                raced_requests = sum(run.requests for run in raced.runs)
                figures |= {
                    "raced_at_rps": pace.rate_rps,
                    "raced_attainment": raced.attainment,
                    "raced_requests": raced_requests,
                    "raced_rps": finite(raced.raced_rps),
                    "close": raced.close,
                }
                report(raced_requests, raced.estimate_rps)
            else:
                values[CAPACITY], own_pace = raced.estimate_rps, raced
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

    def _raced(
        self, runs: Runs, pace: PruningThreshold | None, gpus: int
    ) -> RaceResult | PruningThreshold | None:
        """The race that it lost, or the threshold that it sets; None: a search must decide."""
        if source(runs.spec.workload).has_arrivals:
            return None
        first_seed = self.options.first_seed + RACE_SEEDS
        if pace is None:
            begin_rps = start_rps(self.experiment, runs.spec, runs)
        else:
            raced = race(
                runs,
                pace,
                target=self.aim.target,
                first_seed=first_seed,
                races_on=self.races_on,
            )
            if raced.lost:
                return raced
            far = from_target(raced.runs, self.aim.target) > _FAR_LOGITS
            if len(raced.runs) == len(pace.requests) and not far:
                met = tuple(run.batch_met for run in raced.runs)
                return replace(pace, gpus=gpus, met=met, estimate_rps=raced.estimate_rps)
            begin_rps = min(raced.estimate_rps, 2 * pace.rate_rps)
        own_pace = None
        if pace is not None and begin_rps <= _NEAR * pace.rate_rps:
            # The slope is about the leader's, and a climb takes half of a race's requests.
            near, rate_rps = replace(pace, gpus=gpus), min(begin_rps, _NARROW * pace.rate_rps)
            own_pace = _moved_pace(runs, near, rate_rps, self.aim.target, first_seed)
        if own_pace is None or own_pace.logits_above > _OFF_LOGITS:
            own_pace = pace_of(runs, self.options, begin_rps, gpus=gpus, first_seed=first_seed)
        if own_pace is None or pace is None or raced.estimate_rps <= pace.estimate_rps:
            return own_pace
        # On the same requests it was better, whatever others say.
        least_rps = (1 + _WORTH) * pace.estimate_rps
        return replace(own_pace, estimate_rps=max(own_pace.estimate_rps, least_rps))

    def capacity(
        self, runs: Runs, near_rps: float | None = None, most_requests: int | None = None
    ) -> CapacitySearch:
        """The capacity search of a configuration.

        Args:
            runs: of the configuration.
            near_rps: an estimate of its capacity, where the search begins.
            most_requests: that the search may take, if they are fewer than usual; it gets ten
                short runs at least.
        """
        options, experiment = self.options, self.experiment
        usual_requests = options.budget.requests
        if most_requests is not None and most_requests < (usual_requests or math.inf):
            enough = max(most_requests, LEAST_RUNS * options.requests)
            budget = replace(options.budget, requests=enough, horizons=0)
            shortest = max(LEAST_REQUESTS, min(options.requests, enough // (2 * LEAST_RUNS)))
            options = replace(options, budget=budget, requests=shortest)
        neighbours = [] if near_rps is None else [near_rps]
        begin_rps = near_rps or start_rps(experiment, runs.spec, runs)
        return search_cell(
            runs,
            runs.spec,
            options,
            begin_rps,
            neighbours,
            experiment.requests[0],
            lambda progress: None,
            runs.expect,
        )

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
