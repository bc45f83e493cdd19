"""The placement problem solved by Optuna, as an independent check of the exact search.

A trial gives every device a rank and a number of layers (0: not used). Devices are visited by rank,
and each takes its number of layers or those that are left; remaining layers go to the visited
devices in the same order, as far as they fit. Every map can be reached in this way, and every trial
is a map or does not fit on the devices that it uses.
"""

from __future__ import annotations

import optuna

from ...workloads.errors import SloBenchError
from .problem import INF, CostWeights, LayerRange, Map, Problem, no_room


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
