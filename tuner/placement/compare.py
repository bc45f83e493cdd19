"""Solvers of the placement problem by name, and Optuna as a check of the exact search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optuna

from ...workloads.errors import SloBenchError
from .exact import exact
from .launch import even_map
from .paper import paper
from .problem import INF, CostWeights, LayerRange, Map, Problem, no_room

METHODS = ("exact", "helr", "even", "optuna")


@dataclass(frozen=True)
class SolverResult:
    """One solver's map and its cost; `refused` is the reason why there is no map."""

    method: str
    placed: Map = ()
    latency_s: float = INF
    cost: float = INF
    refused: str = ""

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
    if method == "exact":
        placed = exact(problem, weights)
    elif method == "helr":
        placed = paper(problem, weights)
    elif method == "even":
        placed = even_map(problem.layers, len(problem.devices))
    elif method == "optuna":
        placed = search(problem, weights, trials=trials, seed=seed)
    else:
        raise SloBenchError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    return SolverResult(method, placed, problem.latency_s(placed), problem.cost(placed, weights))


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


def search(problem: Problem, weights: CostWeights, *, trials: int = 300, seed: int = 0) -> Map:
    """The best map of `trials` trials of Optuna's TPE sampler.

    Raises:
        SloBenchError: no trial's map fits.
    """
    if trials < 1:
        raise SloBenchError(f"trials must be at least 1 but is {trials}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=False)
    study = optuna.create_study(sampler=sampler)
    best: list[tuple[float, Map]] = []

    def objective(trial: optuna.Trial) -> float:
        placed = _map_of(problem, trial)
        cost = problem.cost(placed, weights)
        if cost < INF and (not best or cost < best[0][0]):
            best[:] = [(cost, placed)]
        missing = problem.layers - sum(held.layers for held in placed)
        return cost if cost < INF else 1e6 + missing

    study.optimize(objective, n_trials=trials)
    if not best:
        raise SloBenchError(f"none of {trials} trials fits; allow more. {no_room(problem)}")
    return best[0][1]


def _map_of(problem: Problem, trial: optuna.Trial) -> Map:
    wanted = []
    for i, device in enumerate(problem.devices):
        rank = trial.suggest_float(f"rank {i}", 0.0, 1.0)
        layers = trial.suggest_int(f"layers {i}", 0, max(0, device.room))
        if layers:
            wanted.append((rank, i, layers))
    order, rest = list[list[int]](), problem.layers
    for _, i, layers in sorted(wanted):
        if rest:
            order.append([i, min(rest, layers)])
            rest -= order[-1][1]
    last = len(order) - 1
    for n, held in enumerate(order):
        room = problem.devices[held[0]].holds(first=n == 0, last=n == last)
        more = min(rest, max(0, room - held[1]))
        held[1] += more
        rest -= more
    return tuple(LayerRange(i, layers) for i, layers in order)
