"""Several ways to answer the same question, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...workloads.errors import SloBenchError
from .exact import exact
from .launch import even_map
from .paper import paper
from .problem import INF, CostWeights, Map, Problem
from .search import search

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
