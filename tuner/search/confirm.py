"""Confirm that the winner is better than the default, on seeds that tuning did not use.

The best of many trials is partly lucky. So the default and the winners are measured on new seeds,
on the tuned workload and on others, each with its 95 % interval (`confirm`).

What each parameter of a winner gives shows the winner with that one at its default (`ablated`).
Both serve the same requests, so the difference of each seed comes from the parameter alone. With
the objective capacity they run at the winner's capacity, where attainment is most sensitive; with
others under the load of the trials. A parameter whose difference has 0 in its 95 % interval, or is
a gain, makes no difference that can be shown, and goes back to its default. If the winner is then
worse than it was, those with the largest losses are put back, one after another.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...harness.experiments.execution.workers import NotDoneError, together
from ...workloads.arrays import Floats
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import finite
from ..capacity.curve import student_t
from .evaluate_configuration import ConfigurationEvaluator, drifting_after_s
from .runs import Runs, Servers
from .settings import CAPACITY, COST, Aim, TuningObjective, tuning_objectives
from .space import Configuration
from .study_results import TrialRow

FRESH_SEEDS = 1_000_000  # away from those of searches and races
DEFAULT = "default"
_LEAST_SEEDS = 5
_QUANTILE = 0.975
MOST_WINNERS = 4  # of a front

Confirming = Callable[[int, int], None]  # configurations done, of how many
Verdict = Literal["better", "worse", "not distinguishable", ""]


@dataclass(frozen=True)
class Confirmed:
    """One objective of one configuration on new seeds.

    `configuration` is `default` or `trial N`; `verdict` compares the interval to the default's
    (overlapping intervals: not distinguishable). `problem`: the reason why there is no value.
    `drifting_after_s`: mean window of arrivals of its runs that are not stationary.
    """

    backend: str
    workload: str
    configuration: str
    objective: str
    value: float | None
    low: float | None
    high: float | None
    requests: int
    verdict: Verdict = ""
    problem: str | None = None
    drifting_after_s: float | None = None


def confirm(
    tuned: ConfigurationEvaluator,
    winners: Sequence[TrialRow],
    workloads: Sequence[str],
    folder: Path,
    progress: Confirming = lambda done, total: None,
) -> list[Confirmed]:
    """Measure the default and the winners again, on every workload and with new seeds.

    Args:
        tuned: of the tuned experiment; on a real backend its servers are started.
        winners: at most `MOST_WINNERS` of them are confirmed.
        workloads: workloads besides the experiment's own.
        folder: for runs and server logs.
        progress: called with (done, total).
    """
    own_workload, pool = tuned.experiment.workload[0], tuned.pool
    candidates: list[tuple[str, Configuration]] = [(DEFAULT, {})]
    candidates += [
        (f"trial {row.number}", row.configuration)
        for row in winners[:MOST_WINNERS]
        if not row.default
    ]
    calls: list[Callable[[], list[Confirmed]]] = []
    done = 0
    telling = threading.Lock()

    def confirmed_rows(
        evaluation: ConfigurationEvaluator, workload: str, candidate: tuple[str, Configuration]
    ) -> list[Confirmed]:
        nonlocal done
        rows = _confirmed(evaluation, workload, *candidate)
        with telling:
            done += 1
            progress(done, len(calls))
        return rows

    with Servers(folder / "servers", say=tuned.servers.say) as servers:
        for place, workload in enumerate(dict.fromkeys((own_workload, *workloads))):
            evaluation = tuned.again(
                folder / str(place), servers, seeds_from=FRESH_SEEDS, workload=(workload,)
            )
            calls += [
                partial(confirmed_rows, evaluation, workload, candidate) for candidate in candidates
            ]
        results = [call() for call in calls] if pool is None else together(calls, pool)
    by_workload = [
        results[k : k + len(candidates)] for k in range(0, len(results), len(candidates))
    ]
    return [
        row
        for defaults, *others in by_workload
        for rows in (defaults, *(_judged(rows, defaults, tuned.aim) for rows in others))
        for row in rows
    ]


def _judged(rows: Sequence[Confirmed], defaults: Sequence[Confirmed], aim: Aim) -> list[Confirmed]:
    """The same figures, each with its verdict against the default."""
    return [
        dataclasses.replace(row, verdict=_verdict(row, base, objective))
        for row, base, objective in zip(rows, defaults, aim.objectives, strict=True)
    ]


def _confirmed(
    evaluation: ConfigurationEvaluator, workload: str, name: str, configuration: Configuration
) -> list[Confirmed]:
    """One row for each objective of a configuration."""
    backend = evaluation.experiment.backend
    intervals: dict[str, Interval] = {}
    requests, problem, after_s = 0, None, None
    try:
        runs = evaluation.runs_of(configuration)
        intervals, after_s = _figures(evaluation, runs)
        requests = runs.requests
    except (NotDoneError, FileFormatError):  # a damaged file is not the configuration's fault
        raise
    except SloBenchError as error:
        evaluation.servers.stop()
        problem = str(error)
    rows = []
    for objective in evaluation.aim.objectives:
        interval = intervals.get(objective.name, (None, None, None))
        row = Confirmed(backend, workload, name, objective.name, *interval, requests)
        drift_s = None if objective.column is None else after_s
        rows.append(dataclasses.replace(row, problem=problem, drifting_after_s=drift_s))
    return rows


Interval = tuple[float | None, float | None, float | None]


def _figures(
    evaluation: ConfigurationEvaluator, runs: Runs
) -> tuple[dict[str, Interval], float | None]:
    """Value, low and high of every objective; `drifting_after_s` of the runs under the load."""
    aim = evaluation.aim
    gpus = float(runs.spec.instances * runs.spec.placement.gpus)
    intervals: dict[str, Interval] = {COST: (gpus, gpus, gpus)}
    after_s = None
    if aim.searches_capacity:
        capacity = evaluation.capacity(runs).capacities[0]
        high_rps = finite(capacity.high_rps)
        intervals[CAPACITY] = capacity.capacity_rps, capacity.low_rps, high_rps
    if aim.measures_level:
        assert aim.load is not None
        rate_rps, seeds = aim.load.rate_rps, evaluation.seeds(_LEAST_SEEDS)
        runs.expect(rate_rps, seeds, evaluation.requests)
        levels = [runs.level(rate_rps, seed, evaluation.requests) for seed in seeds]
        valid = [run.figures for run in levels if run.sample.valid]
        after_s = drifting_after_s([run for run in levels if run.sample.valid])
        for objective in aim.objectives:
            column = objective.column
            if column is not None:
                intervals[objective.name] = _mean([f[column] for f in valid if column in f])
    return intervals, after_s


def _half(values: Sequence[float] | Floats) -> float:
    """Half of the 95 % interval of a mean, by Student's t."""
    half = student_t(_QUANTILE, len(values) - 1) * float(np.std(values, ddof=1))
    return half / math.sqrt(len(values))


def _mean(values: Sequence[float]) -> Interval:
    """The mean of runs and its 95 % interval, by Student's t."""
    if not values:
        return None, None, None
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None, None
    half = _half(values)
    return mean, max(0.0, mean - half), mean + half  # no figure is below 0


def _verdict(row: Confirmed, base: Confirmed, objective: TuningObjective) -> Verdict:
    ends = (row.low, row.high, base.low, base.high)
    if row.value is None and row.low is None:
        return ""
    low, high, base_low, base_high = (
        (-math.inf if place % 2 == 0 else math.inf) if end is None else end
        for place, end in enumerate(ends)
    )
    if low > base_high:
        return "better" if objective.maximise else "worse"
    if high < base_low:
        return "worse" if objective.maximise else "better"
    return "not distinguishable"


SEEDS = 8
_FIRST_SEED = 2 * FRESH_SEEDS  # neither of the search nor of the confirmation


@dataclass(frozen=True)
class Ablation:
    """The winner of a trial with one parameter at its default, against the winner itself.

    `objective` is what was measured at `rate_rps` (None: the arrivals have no rate); `change` is
    with the default minus with the winner's value, in the objective's unit, and `low` to `high` its
    95 % interval. `matters`: the interval lies on the worse side of 0. `problem`: why there is no
    figure.
    """

    trial: int
    parameter: str
    value: Any
    default: Any
    objective: str
    rate_rps: float | None
    change: float | None
    low: float | None
    high: float | None
    matters: bool
    problem: str | None = None


def ablated(
    tuned: ConfigurationEvaluator, row: TrialRow, folder: Path
) -> tuple[TrialRow, list[Ablation]]:
    """The winner with parameters that make no difference at their defaults, and the comparisons.

    Args:
        tuned: of the tuned experiment, simulated. A dimension whose default is not in the searched
            space is kept; its first objective that a run has is compared.
        row: the winner.
        folder: for the runs.
    """
    space, aim = tuned.space, tuned.aim
    changed = [
        dimension.name
        for dimension in space.dimensions
        if dimension.holds(space.defaults.get(dimension.name))
        and row.configuration[dimension.name] != space.defaults[dimension.name]
    ]
    attainment = tuning_objectives()["attainment"]
    objective = next((o for o in aim.objectives if o.column is not None), attainment)
    rate_rps = None if aim.load is None else aim.load.rate_rps
    if aim.searches_capacity and row.values is not None:
        rate_rps = row.values[aim.names.index(CAPACITY)]
    if not changed or rate_rps == 0:
        return row, []
    with Servers(folder / "servers", say=tuned.servers.say) as servers:
        evaluation = tuned.again(folder, servers, seeds_from=_FIRST_SEED)

        def figures(configuration: Configuration) -> Sequence[float]:
            assert objective.column is not None
            runs, seeds = evaluation.runs_of(configuration), evaluation.seeds(SEEDS)[:SEEDS]
            runs.expect(rate_rps, seeds, evaluation.requests)
            by_seed = [runs.level(rate_rps, seed, evaluation.requests).figures for seed in seeds]
            return [run_figures.get(objective.column, math.nan) for run_figures in by_seed]

        sign = 1.0 if objective.maximise else -1.0
        whole = figures(row.configuration)
        rows = []
        for name in changed:
            value, default = row.configuration[name], space.defaults[name]
            compared = (row.number, name, value, default, objective.name, rate_rps)
            try:
                without = figures({**row.configuration, name: default})
                change, half = _difference(without, whole)
            except NotDoneError:
                raise
            except SloBenchError as error:
                rows.append(Ablation(*compared, None, None, None, True, str(error)))
                continue
            matters = not sign * change + half >= 0
            rows.append(Ablation(*compared, change, change - half, change + half, matters))
        reduced = _reduced(row.configuration, rows, figures, whole, sign)
    return dataclasses.replace(row, configuration=reduced), rows


def _difference(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences by seed, and half of its 95 % interval (Student's t).

    Raises:
        SloBenchError: a run has no figure.
    """
    by_seed = np.subtract(values, others)
    if not np.isfinite(by_seed).all():
        raise SloBenchError("a run has no figure of the objective")
    return float(by_seed.mean()), _half(by_seed)


def _reduced(
    winner: Configuration,
    rows: Sequence[Ablation],
    figures: Callable[[Configuration], Sequence[float]],
    whole: Sequence[float],
    sign: float,
) -> Configuration:
    """The winner with defaults where they make no difference, together, either."""
    idle = sorted(
        (row for row in rows if not row.matters), key=lambda row: sign * (row.change or 0.0)
    )
    while idle:
        tried = {**winner, **{row.parameter: row.default for row in idle}}
        try:
            change, half = _difference(figures(tried), whole)
            if sign * change + half >= 0:
                return tried
        except NotDoneError:
            raise
        except SloBenchError:
            pass  # together they cannot be deployed or measured
        idle = idle[1:]
    return winner
