"""Solvers of the placement problem by name, and Optuna as a check of the exact search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optuna

from ...workloads.errors import SloBenchError
from .exact import EQUAL, Optimum, filled, grouped, optimum
from .launch import even_map
from .paper import paper
from .problem import INF, CostWeights, Map, Problem, no_room

METHODS = ("exact", "helr", "even", "optuna")
CHECK = "optuna-alone"  # without the exact solver's map, as a check of it


@dataclass(frozen=True)
class SolverResult:
    """One solver's map and its cost.

    `bound_gap`: by what share the cost is above a lower bound on all maps, at most; None if the
    solver knows none. `refused` is the reason why there is no map.
    """

    method: str
    placed: Map = ()
    latency_s: float = INF
    cost: float = INF
    refused: str = ""
    bound_gap: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the map can be deployed."""
        return self.cost < INF

    def gap(self, best: SolverResult) -> float:
        """How much more it costs than `best`, as a share."""
        return self.cost / best.cost - 1 if self.fits and best.fits else INF


def answer(
    problem: Problem, weights: CostWeights, method: str, *, trials: int = 300, seed: int = 0
) -> SolverResult:
    """The map of one of METHODS.

    Raises:
        SloBenchError: the method finds no map.
    """
    gap = None
    if method == "exact":
        best = optimum(problem, weights)
        placed, gap = best.placed, best.gap
    elif method == "helr":
        placed = paper(problem, weights)
    elif method == "even":
        placed = even_map(problem.layers, len(problem.devices))
    elif method == "optuna":
        start = optimum(problem, weights)
        placed = search(problem, weights, trials=trials, seed=seed, start=start)
    elif method == CHECK:
        placed = search(problem, weights, trials=trials, seed=seed)
    else:
        raise SloBenchError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    cost = problem.cost(placed, weights)
    return SolverResult(method, placed, problem.latency_s(placed), cost, bound_gap=gap)


def answers(
    problem: Problem,
    weights: CostWeights,
    methods: Sequence[str],
    *,
    trials: int = 300,
    seed: int = 0,
) -> list[SolverResult]:
    """The results of several methods in order; one without a map has the reason."""
    found = []
    for method in methods:
        try:
            found.append(answer(problem, weights, method, trials=trials, seed=seed))
        except SloBenchError as error:
            found.append(SolverResult(method, refused=str(error)))
    return found


def search(
    problem: Problem,
    weights: CostWeights,
    *,
    trials: int = 300,
    seed: int = 0,
    start: Optimum | None = None,
) -> Map:
    """The best map of `trials` trials of Optuna's TPE sampler.

    A trial draws how many devices of each group of equal ones it uses and the order of the groups;
    layers go to the fastest of them. With a `start`, its map is the first trial, and the search
    ends when a map reaches its lower bound.

    Raises:
        SloBenchError: no trial's map fits.
    """
    if trials < 1:
        raise SloBenchError(f"trials must be at least 1 but is {trials}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=False)
    study = optuna.create_study(sampler=sampler)
    groups = grouped(problem)
    best: list[tuple[float, Map]] = []
    bound = -INF
    if start is not None:
        cost = problem.cost(start.placed, weights)
        best, bound = [(cost, start.placed)], cost / (1 + start.gap)
        study.enqueue_trial(_as_trial(groups.members, start.placed))

    def objective(trial: optuna.Trial) -> float:
        placed, missing = _map_of(problem, groups.members, trial)
        cost = problem.cost(placed, weights) if placed else INF
        if cost < INF and (not best or cost < best[0][0]):
            best[:] = [(cost, placed)]
        return cost if cost < INF else 1e6 + missing

    def reached(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if best and best[0][0] <= bound * (1 + EQUAL):
            study.stop()

    study.optimize(objective, n_trials=trials, callbacks=[reached])
    if not best:
        raise SloBenchError(f"none of {trials} trials fits; allow more. {no_room(problem)}")
    return best[0][1]


def _as_trial(members: Sequence[Sequence[int]], placed: Map) -> dict[str, float]:
    """Parameters of a trial whose map uses the same devices, groups in order of first use."""
    order = [held.device for held in placed]
    found: dict[str, float] = {}
    for n, group in enumerate(members):
        used = [order.index(device) for device in group if device in order]
        found[f"count {n}"] = len(used)
        found[f"rank {n}"] = min(used, default=len(order)) / len(order)
    return found


def _map_of(
    problem: Problem, members: Sequence[Sequence[int]], trial: optuna.Trial
) -> tuple[Map, int]:
    """The trial's map, and how many layers do not fit on it."""
    drawn = [
        (
            trial.suggest_float(f"rank {n}", 0.0, 1.0),
            n,
            trial.suggest_int(f"count {n}", 0, len(group)),
        )
        for n, group in enumerate(members)
    ]
    order = [device for _, n, count in sorted(drawn) for device in members[n][:count]]
    order = order[: problem.layers]
    placed = filled(problem, order) if order else ()
    return placed, problem.layers - sum(held.layers for held in placed)
