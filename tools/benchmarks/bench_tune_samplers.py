"""Is `slo-bench tune` better than random search or TPE without racing, for the same requests?

Run `python tools/benchmarks/bench_tune_samplers.py [CASE …] [--seeds 10] [--out DIR]`.

Every point of a space is searched for its capacity. Random search and TPE without racing then draw
points and pay for each what its search took; their results are read from the grid, so that many
draws cost nothing. `tune` (TPE with racing) is run for each seed with the same budget of requests.
What it chose is read from the grid, too. All three begin with the default if it is in the space.
The share of the best point's capacity is printed: median, lowest tenth, and how many reach 99 %.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna

from slo_bench import Experiment
from slo_bench.tuner.search.evaluate_configuration import (
    ConfigurationEvaluator,
    InfeasibleError,
    RaceResult,
)
from slo_bench.tuner.search.runs import Servers
from slo_bench.tuner.search.samplers import grid_of
from slo_bench.tuner.search.settings import TuneSettings
from slo_bench.tuner.search.tuning_run import prepared, tune

BUDGETS = (0.05, 0.1, 0.2)  # of the requests of the whole grid
DRAWS = 200
TOLERANCE = 0.05
Point = dict[str, object]


@dataclass(frozen=True)
class SearchedGrid:
    """What the capacity search of each point found, and the requests that it took."""

    points: Sequence[Point]
    rates_rps: Sequence[float]
    requests: Sequence[int]
    axes: dict[str, list[object]]
    default: int | None

    def place(self, point: Point) -> int:
        """The number of a point."""
        return self.points.index(point)


CASES = {
    "sarathi": (
        Experiment(systems="sarathi", workload="azure-conv", slo="ttft=1,tpot=0.1", requests=400),
        {"chunk_tokens": "128,256,512,1024,2048,4096", "max_num_seqs": "4,8,16,32,64,128,256"},
    ),
    "llumnix": (
        Experiment(systems="llumnix", gpus=4, slo="ttft=1,tpot=0.15", requests=800),
        {
            "max_num_batched_tokens": "256,512,1024,2048,4096,8192",
            "max_num_seqs": "8,16,32,64,128,256",
        },
    ),
}


def searched_grid(name: str, folder: Path) -> SearchedGrid:
    """The grid, searched; finished points are read from the folder."""
    experiment, search = CASES[name]
    prepared_search = prepared(experiment, TuneSettings(search=search, confirm=False))
    servers = Servers(folder / "servers")
    evaluation = ConfigurationEvaluator(
        prepared_search.experiment,
        prepared_search.space,
        prepared_search.aim,
        TOLERANCE,
        folder,
        servers,
    )
    axes = grid_of(prepared_search.space.dimensions)
    points, rates_rps, requests = [], [], []
    for place in np.ndindex(*[len(values) for values in axes.values()]):
        point = {axis: axes[axis][k] for axis, k in zip(axes, place, strict=True)}
        try:
            runs = evaluation.runs_of(point)
        except InfeasibleError:
            continue
        outcome = evaluation.capacity(runs, None)
        assert not isinstance(outcome, RaceResult)
        estimate = outcome.capacities[0]
        points.append(point)
        rates_rps.append(
            estimate.low_rps if estimate.capacity_rps is None else estimate.capacity_rps
        )
        requests.append(runs.requests)
        print(f"  {point}: {rates_rps[-1]:.4g} req/s, {requests[-1]:,} requests", flush=True)
    default = prepared_search.space.default
    default_index = (
        points.index(dict(default)) if default is not None and dict(default) in points else None
    )
    return SearchedGrid(points, rates_rps, requests, axes, default_index)


def drawn(grid: SearchedGrid, budget: float, propose: Callable[[dict[int, float]], int]) -> float:
    """The best capacity among points proposed until the budget is spent."""
    tried: dict[int, float] = {}
    spent = 0
    point = grid.default
    while spent < budget and len(tried) < len(grid.points):
        if point is not None and point not in tried:
            tried[point] = grid.rates_rps[point]
            spent += grid.requests[point]
        point = propose(tried)
    return max(tried.values())


def random_search(grid: SearchedGrid, budget: float, seed: int) -> float:
    """Uniform draws without repetition."""
    order = iter(np.random.default_rng(seed).permutation(len(grid.points)))
    return drawn(grid, budget, lambda tried: int(next(order, 0)))


def tpe(grid: SearchedGrid, budget: float, seed: int) -> float:
    """Optuna's TPE as `tune` has it, with a full search for each point."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True)
    )
    rng = np.random.default_rng(seed)

    def propose(tried: dict[int, float]) -> int:
        for _ in range(10):  # a proposal that is known costs nothing; then one is drawn
            trial = study.ask()
            point = {a: trial.suggest_categorical(a, v) for a, v in grid.axes.items()}
            index = grid.place(point)
            study.tell(trial, grid.rates_rps[index])
            if index not in tried:
                return index
        return int(rng.choice([k for k in range(len(grid.points)) if k not in tried]))

    return drawn(grid, budget, propose)


def raced(name: str, grid: SearchedGrid, budget: float, seed: int, folder: Path) -> float:
    """`slo-bench tune`, run."""
    experiment, search = CASES[name]
    settings = TuneSettings(
        search=search, confirm=False, sampler_seed=seed, tolerance=TOLERANCE,
        trials=100_000, max_requests=round(budget),
    )  # fmt: skip
    study = tune(experiment, settings, folder, resume=folder.is_dir()).found
    return grid.rates_rps[grid.place(dict(study.best[0].configuration))]


def summary(label: str, shares: Sequence[float]) -> str:
    """One row of the table."""
    reached = np.mean(np.array(shares) >= 0.99)
    low = np.quantile(shares, 0.1)
    return f"{label:34} {np.median(shares):7.1%} {low:7.1%} {reached:7.1%}  ({len(shares)} seeds)"


def main() -> None:
    """Search the grid, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=" or ".join(CASES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-tune-samplers"))
    options = parser.parse_args()
    for name in options.cases or CASES:
        grid = searched_grid(name, options.out / name / "grid")
        whole, best = sum(grid.requests), max(grid.rates_rps)
        near = np.mean(np.array(grid.rates_rps) >= 0.99 * best)
        print(
            f"{name}: {len(grid.points)} points, {min(grid.rates_rps):.4g} to {best:.4g} req/s, "
            f"{near:.0%} of them within 1 % of the best; {whole:,} requests"
        )
        print(f"{'':34} {'median':>7} {'10 %':>7} {'≥ 99 %':>7}")
        for budget in BUDGETS:
            for label, method in (("random", random_search), ("TPE without racing", tpe)):
                shares = [method(grid, budget * whole, seed) / best for seed in range(DRAWS)]
                print(summary(f"{budget:.0%} of the grid, {label}", shares), flush=True)
            folder = options.out / name / f"tune-{budget:g}"
            shares = [
                raced(name, grid, budget * whole, seed, folder / str(seed)) / best
                for seed in range(options.seeds)
            ]
            print(summary(f"{budget:.0%} of the grid, tune", shares), flush=True)
            (folder / "shares.json").write_text(json.dumps(shares), encoding="utf-8")


if __name__ == "__main__":
    main()
