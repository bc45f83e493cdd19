"""What each parameter of a winner gives: the winner with that one at its default, on new seeds.

Both serve the same requests, so the difference of each seed comes from the parameter alone. With
the objective capacity they run at the winner's capacity, where attainment is most sensitive; with
one at a rate, at that rate. A parameter whose difference has 0 in its 95 % interval, or is a gain,
makes no difference that can be shown, and goes back to its default. If the winner is then worse
than it was, those with the largest losses are put back, one after another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...harness.experiments.execution.workers import NotDoneError, WorkerPool
from ...harness.experiments.experiment import Experiment
from ...workloads.errors import SloBenchError
from ..capacity.cells import Ended
from ..capacity.curve import student_t
from .confirm import FRESH_SEEDS
from .evaluate import ConfigurationEvaluator
from .objectives import CAPACITY, OBJECTIVES, Aim
from .runs import Servers
from .space import Configuration, Space
from .study_results import TrialRow

SEEDS = 8
_FIRST_SEED = 2 * FRESH_SEEDS  # neither of the search nor of the confirmation
_QUANTILE = 0.975


@dataclass(frozen=True)
class Ablation:
    """The winner of a trial with one parameter at its default, against the winner itself.

    `objective` is what was measured at `rate_rps`; `change` is with the default minus with the
    winner's value, in the objective's unit, and `low` to `high` its 95 % interval. `matters`: the
    interval lies on the worse side of 0. `problem`: why there is no figure.
    """

    trial: int
    parameter: str
    value: Any
    default: Any
    objective: str
    rate_rps: float
    change: float | None
    low: float | None
    high: float | None
    matters: bool
    problem: str | None = None

    def plain(self) -> dict[str, Any]:
        """The row as plain values for JSON."""
        return dataclasses.asdict(self)


def ablated(
    experiment: Experiment,
    space: Space,
    aim: Aim,
    row: TrialRow,
    folder: Path,
    *,
    tolerance: float,
    ended: Ended | None = None,
    pool: WorkerPool | None = None,
) -> tuple[TrialRow, list[Ablation]]:
    """The winner with parameters that make no difference at their defaults, and the comparisons.

    Args:
        experiment: the tuned experiment, simulated.
        space: the search space; a dimension without a default is kept.
        aim: the objectives; the first one that a run has is compared.
        row: the winner.
        folder: for the runs.
        tolerance: of capacity searches.
        ended: called within a run.
        pool: processes that simulate; None: this process.
    """
    changed = [
        name
        for name, value in row.configuration.items()
        if name in space.defaults and value != space.defaults[name]
    ]
    objective = next((o for o in aim.objectives if o.column is not None), OBJECTIVES["attainment"])
    rate_rps = aim.rate_rps
    if aim.searches_capacity and row.values is not None:
        rate_rps = row.values[aim.names.index(CAPACITY)]
    if not changed or not rate_rps:
        return row, []
    table = experiment.model_dump(exclude_unset=True) | {"seed": experiment.seed + _FIRST_SEED}
    with Servers(folder / "servers") as servers:
        evaluation = ConfigurationEvaluator(
            Experiment(**table), space, aim, tolerance, folder, servers, ended, pool
        )

        def figures(configuration: Configuration) -> Sequence[float]:
            assert objective.column is not None
            options, runs = evaluation.options, evaluation.runs_of(configuration)
            seeds = range(options.first_seed, options.first_seed + SEEDS)
            runs.expect(rate_rps, seeds, options.requests)
            found = [runs.level(rate_rps, seed, options.requests).figures for seed in seeds]
            return [one.get(objective.column, math.nan) for one in found]

        sign = 1.0 if objective.maximise else -1.0
        whole = figures(row.configuration)
        rows = []
        for name in changed:
            value, default = row.configuration[name], space.defaults[name]
            told = (row.number, name, value, default, objective.name, rate_rps)
            try:
                without = figures({**row.configuration, name: default})
                change, half = _difference(without, whole)
            except NotDoneError:
                raise
            except SloBenchError as error:
                rows.append(Ablation(*told, None, None, None, True, str(error)))
                continue
            matters = not sign * change + half >= 0
            rows.append(Ablation(*told, change, change - half, change + half, matters))
        reduced = _reduced(row.configuration, rows, figures, whole, sign)
    return dataclasses.replace(row, configuration=reduced), rows


def _difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences by seed, and half of its 95 % interval (Student's t).

    Raises:
        SloBenchError: a run has no figure.
    """
    by_seed = np.subtract(one, other)
    if not np.isfinite(by_seed).all():
        raise SloBenchError("a run has no figure of the objective")
    half = student_t(_QUANTILE, len(by_seed) - 1) * float(by_seed.std(ddof=1))
    return float(by_seed.mean()), half / math.sqrt(len(by_seed))


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
