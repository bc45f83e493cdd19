"""Solvers of the placement problem by name, and what their maps are worth.

Optuna is a check of the exact search. Also here: why devices stay unused, and how far the paper's
procedure is from the optimum over random devices, links and models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import optuna

from ...predictors.specs import gpu, link, model
from ...workloads.errors import SloBenchError
from .exact import EQUAL, Optimum, exact, filled, grouped, optimum
from .launch import even_map
from .paper import paper
from .problem import INF, MODES, CostWeights, Map, Problem, no_room, problem_of
from .topology import Machine, Topology

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
    results = []
    for method in methods:
        try:
            results.append(answer(problem, weights, method, trials=trials, seed=seed))
        except SloBenchError as error:
            results.append(SolverResult(method, refused=str(error)))
    return results


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
    parameters: dict[str, float] = {}
    for n, group in enumerate(members):
        used = [order.index(device) for device in group if device in order]
        parameters[f"count {n}"] = len(used)
        parameters[f"rank {n}"] = min(used, default=len(order)) / len(order)
    return parameters


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


def unused_reasons(problem: Problem, weights: CostWeights, placed: Map) -> dict[str, list[int]]:
    """Devices outside the map by the reason why they are.

    Of a device on which layers fit, the reason is the best map with it beside the used ones.
    """
    used = {held.device for held in placed}
    devices_of: dict[str, list[int]] = {}
    cost, reason_of = problem.cost(placed, weights), dict[object, str]()
    for device, figures in enumerate(problem.devices):
        if device in used:
            continue
        hops = tuple((problem.hop_s[i][device], problem.hop_s[device][i]) for i in sorted(used))
        alike = (figures.layer_s, figures.room, figures.head_s, hops)
        if alike not in reason_of:
            reason_of[alike] = _reason(problem, weights, placed, device, cost)
        devices_of.setdefault(reason_of[alike], []).append(device)
    return devices_of


def _reason(problem: Problem, weights: CostWeights, placed: Map, device: int, cost: float) -> str:
    if problem.devices[device].room < 1:
        return "no layer fits there"
    order = [held.device for held in placed]
    if len(order) == problem.layers:
        return "every layer has a device of its own"
    candidates = [
        filled(problem, [*order[:position], device, *order[position:]])
        for position in range(len(order) + 1)
    ]
    best = min(candidates, key=lambda candidate: problem.cost(candidate, weights))
    if not problem.fits(best):
        return "at an end of the map the embeddings or the head do not fit there"
    more_ms = 1e3 * (problem.latency_s(best) - problem.latency_s(placed))
    more = problem.cost(best, weights) / cost - 1
    return f"with one more, a pass takes {more_ms:+.2g} ms and the cost is {100 * more:+.2g} %"


_GPUS = ("a100-80g", "a100-40g", "rtx-3090", "rtx-3090@150w", "v100-32g", "l4", "a10")
_LINKS = ("nvlink3", "pix", "node", "sys", "ethernet-25g")
_MODELS = ("chatglm2-6b", "llama-3.1-8b", "qwen2.5-14b", "opt-13b", "llama-2-70b")
_SAME = 1e-6  # percent


@dataclass(frozen=True)
class Gaps:
    """The paper's procedure against the exact solver in one mode.

    Args:
        mode: the weights of latency and devices.
        cases: random problems.
        feasible: problems for which a map exists.
        nothing: of these, those for which the procedure finds no map.
        overfull: of these, those for which its map does not fit.
        gaps_percent: how much more its map costs in the others.
    """

    mode: str
    cases: int
    feasible: int
    nothing: int
    overfull: int
    gaps_percent: tuple[float, ...]

    def row(self) -> dict[str, float | int | str | None]:
        """Figures of the gaps; None where the procedure never finds a map that fits."""
        gaps = np.array(self.gaps_percent)
        has_gaps = len(gaps) > 0
        return {
            "mode": self.mode,
            "cases": self.cases,
            "feasible": self.feasible,
            "no_map": self.nothing,
            "does_not_fit": self.overfull,
            "optimal": int((gaps < _SAME).sum()),
            "gap_mean_percent": round(float(gaps.mean()), 3) if has_gaps else None,
            "gap_p95_percent": round(float(np.percentile(gaps, 95)), 3) if has_gaps else None,
            "gap_max_percent": round(float(gaps.max()), 3) if has_gaps else None,
        }


def random_gaps(cases: int, seed: int) -> list[Gaps]:
    """`cases` random problems, solved by both in every mode."""
    return [_gaps(mode, weights, cases, seed) for mode, weights in MODES.items()]


def random_problem(rng: np.random.Generator) -> Problem:
    """Two to six GPUs of random kinds and links, and a model that may need several of them."""
    n = int(rng.integers(2, 7))
    devices = tuple(Machine(f"GPU{i}", gpu(str(rng.choice(_GPUS)))) for i in range(n))
    names = rng.choice(_LINKS, (n, n))
    links = tuple(
        tuple(None if i == j else link(str(names[min(i, j)][max(i, j)])) for j in range(n))
        for i in range(n)
    )
    reserve = float(rng.choice([0, 4, 8, 12])) * 2**30
    return problem_of(
        model(str(rng.choice(_MODELS))), Topology(devices, links), reserve_bytes=reserve
    )


def _gaps(mode: str, weights: CostWeights, cases: int, seed: int) -> Gaps:
    rng = np.random.default_rng(seed)
    feasible = nothing = overfull = 0
    gaps = []
    for _ in range(cases):
        problem = random_problem(rng)
        try:
            best = problem.cost(exact(problem, weights), weights)
        except SloBenchError:
            continue
        feasible += 1
        try:
            placed = paper(problem, weights)
        except SloBenchError:
            nothing += 1
            continue
        if problem.fits(placed):
            gaps.append(100 * (problem.cost(placed, weights) / best - 1))
        else:
            overfull += 1
    return Gaps(mode, cases, feasible, nothing, overfull, tuple(gaps))
