"""Is `slo-bench tune` better than random search or TPE without racing, for the same requests?

Run `python tools/benchmarks/bench_tune.py [CASE …] [--seeds 10] [--share 0.05] [--out DIR]`.

Every point of a space is searched for its capacity. `tune` is then run for each seed, of sampler
and requests, with a share of the requests that this took. Random search and Optuna's TPE draw
points and pay for each what its search took, until they have spent as many requests as `tune` did;
so many draws cost nothing. All begin with the default if it is in the space. Their last search may
exceed the requests.

The grid's estimates are within 5 %, and the best of them was also lucky. So what each chose is
judged by long runs: every point that the grid puts within CONTENDING of its best has runs of
LONG_REQUESTS at about its capacity, with the same SEEDS for all. Other points keep the grid's
estimate.

Printed is the share of the best point's capacity: mean with a 95 % bootstrap interval over the
seeds, median, lowest tenth, and how many reach 99 %; by how much the mean of `tune` is ahead; and
by how much the capacity that `tune` told of its choice differs from the long runs.
The method was settled without the spaces HELD_BACK; all but `sarathi`, `edf-drop` and `vllm` were
so at first.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import optuna

from slo_bench import Experiment
from slo_bench.tuner.capacity.capacity_search import three_digits
from slo_bench.tuner.search.evaluate_configuration import (
    ConfigurationEvaluator,
    InfeasibleError,
)
from slo_bench.tuner.search.runs import Runs, Servers
from slo_bench.tuner.search.samplers import grid_of
from slo_bench.tuner.search.settings import TuneSettings
from slo_bench.tuner.search.tuning_run import prepared, tune

DRAWS = 200
RESAMPLES = 2000
HELD_BACK = ("ascendra", "vllm-v0")
TOLERANCE = 0.05
CONTENDING = 0.06  # below the best by the grid's estimates, that a point may be the best one
LONG_REQUESTS = 40_000
SEEDS = range(1_000_000, 1_000_005)  # away from those of searches and races
STUDY_SEEDS = 1000  # of requests, that a study may use
APART = 1.02  # times, from the capacity to the rates by which the slope is found
Point = dict[str, object]


@dataclass(frozen=True)
class SearchedGrid:
    """What the capacity search of each point found, and the requests that it took; and its capacity
    by long runs (those of all SEEDS, shape (points, seeds)), where it contends.
    """

    points: Sequence[Point]
    rates_rps: Sequence[float]
    requests: Sequence[int]
    long_rps: np.ndarray
    axes: dict[str, list[object]]
    default: int | None

    def place(self, point: Mapping[str, object]) -> int:
        """The number of a point."""
        return self.points.index(dict(point))

    @property
    def capacities_rps(self) -> np.ndarray:
        """The capacity of each point as well as it is known."""
        return np.array(self.long_rps.mean(axis=1))

    def close(self) -> list[str]:
        """A line for each point within CONTENDING of the best, with what it is below it."""
        best = int(self.capacities_rps.argmax())
        below = 1 - self.long_rps / self.long_rps[best]  # by seed: all have the same requests
        errors = below.std(axis=1, ddof=1) / np.sqrt(below.shape[1])
        order = np.argsort(-self.capacities_rps)
        return [
            f"  {self.points[k]}: {self.capacities_rps[k]:.4g} req/s, {below[k].mean():.2%} "
            f"(± {errors[k]:.2%}) below the best; the grid's estimate {self.rates_rps[k]:.4g}"
            for k in order
            if below[k].mean() < CONTENDING
        ]


CODE = {"workload": "azure-code", "requests": 400}
CASES = {
    "sarathi": (
        Experiment(systems="sarathi", workload="azure-conv", slo="ttft=1,tpot=0.1", requests=400),
        {"chunk_tokens": "128,256,512,1024,2048,4096", "max_num_seqs": "4,8,16,32,64,128,256"},
    ),
    "edf-drop": (
        Experiment(systems="edf-drop", slo="ttft=uniform(0.5,4),tpot=0.1", **CODE),
        {"caution": "0,0.5,1,2", "max_num_batched_tokens": "256,512,1024,2048,4096,8192"},
    ),
    "vllm": (
        Experiment(systems="vllm", gpus=4, slo="ttft=1,tpot=0.08", **CODE),
        {"tp": "1,2,4", "max_num_batched_tokens": "512,2048,8192", "max_num_seqs": "8,32,128"},
    ),
    "distserve": (
        Experiment(systems="distserve", gpus=3, slo="ttft=1,tpot=0.1", **CODE),
        {
            "prefill_instances": "1,2",
            "max_num_batched_tokens": "512,1024,2048,8192",
            "max_num_seqs": "16,64",
        },
    ),
    "llumnix": (
        Experiment(systems="llumnix", gpus=2, slo="ttft=1.5,tpot=0.1", **CODE),
        {
            "max_num_batched_tokens": "256,512,1024,2048,4096,8192",
            "max_num_seqs": "8,32,256",
        },
    ),
    "sglang": (
        Experiment(systems="sglang", slo="ttft=1.5,tpot=0.06", **CODE),
        {
            "chunked_prefill_tokens": "256,512,1024,2048,4096,8192",
            "max_running_requests": "8,16,64",
        },
    ),
    "vllm-conv": (
        Experiment(
            systems="vllm", gpus=4, gpu="h100-80g", workload="azure-conv", requests=400,
            slo="ttft=0.5,tpot=0.03",
        ),
        {"tp": "1,2,4", "max_num_batched_tokens": "256,1024,4096", "max_num_seqs": "16,64,128"},
    ),
    "ascendra": (
        Experiment(systems="ascendra", slo="ttft=1.5,tpot=0.1", **CODE),
        {
            "value": "edf,sjf,fcfs",
            "token_budget": "256,1024,2048,8192",
            "max_num_seqs": "16,64,128",
        },
    ),
    "vllm-v0": (
        Experiment(
            systems="vllm-v0", gpus=2, workload="azure-conv", requests=400, slo="ttft=2,tpot=0.15"
        ),
        {"tp": "1,2", "max_num_batched_tokens": "2048,4096,8192", "max_num_seqs": "16,32,64,128"},
    ),
}  # fmt: skip


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
        estimate = evaluation.capacity(runs).capacities[0]
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
    long_rps = np.tile(np.array(rates_rps)[:, np.newaxis], len(SEEDS))
    long = replace(evaluation, folder=folder.with_name("long"))
    by_results: dict[object, list[float]] = {}
    for k in np.flatnonzero(np.array(rates_rps) >= (1 - CONTENDING) * max(rates_rps)):
        results = evaluation.runs_of(points[k]).results  # the same where it makes no difference
        if results not in by_results:
            runs, target = long.runs_of(points[k]), prepared_search.aim.target
            by_results[results] = by_long_runs(runs, rates_rps[k], target)
        long_rps[k] = by_results[results]
    return SearchedGrid(points, rates_rps, requests, long_rps, axes, default_index)


def by_long_runs(runs: Runs, near_rps: float, target: float) -> list[float]:
    """The rate at which each of the SEEDS meets the target: by a run near it, and by the slope and
    the crossing that two runs of the first seed have.
    """

    def above(rate_rps: float, seed: int) -> float:
        attainment = runs.run(rate_rps, seed, LONG_REQUESTS).attainment
        return math.log(attainment / (1 - attainment)) - math.log(target / (1 - target))

    low_rps, high_rps = three_digits(near_rps / APART), three_digits(near_rps * APART)
    low, high = above(low_rps, SEEDS[0]), above(high_rps, SEEDS[0])
    slope = (low - high) / math.log(high_rps / low_rps)
    rate_rps = three_digits(low_rps * math.exp(low / slope))
    return [rate_rps * math.exp(above(rate_rps, seed) / slope) for seed in SEEDS]


def drawn(grid: SearchedGrid, budget: float, propose: Callable[[dict[int, float]], int]) -> float:
    """The capacity of the point that is the best by its estimate, among those proposed until the
    budget is spent.
    """
    tried: dict[int, float] = {}
    spent = 0
    point = grid.default
    while spent < budget and len(tried) < len(grid.points):
        if point is not None and point not in tried:
            tried[point] = grid.rates_rps[point]
            spent += grid.requests[point]
        point = propose(tried)
    return float(grid.capacities_rps[max(tried, key=lambda point: tried[point])])


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


def tuned(
    name: str, grid: SearchedGrid, budget: float, seed: int, folder: Path
) -> tuple[float, float, int]:
    """Capacity of what `slo-bench tune` chose, what it told of it, and the requests it took."""
    experiment, search = CASES[name]
    settings = TuneSettings(
        search=search, confirm=False, sampler_seed=seed, tolerance=TOLERANCE,
        trials=100_000, max_requests=round(budget),
    )  # fmt: skip
    table = experiment.model_dump(exclude_unset=True) | {"seed": STUDY_SEEDS * seed}
    study = tune(Experiment(**table), settings, folder, resume=folder.is_dir()).study
    (best,) = study.best
    assert best.values is not None
    chosen = grid.place(dict(best.configuration))
    return float(grid.capacities_rps[chosen]), best.values[0], study.requests


def resampled_means(shares: Sequence[float]) -> np.ndarray:
    """Means of bootstrap samples, shape (RESAMPLES,)."""
    rng = np.random.default_rng(0)
    return rng.choice(shares, size=(RESAMPLES, len(shares))).mean(axis=1)


def interval(means: np.ndarray) -> str:
    """Their 95 % interval."""
    low, high = np.quantile(means, (0.025, 0.975))
    return f"[{low:+.1%}, {high:+.1%}]"


def summary(label: str, shares: Sequence[float]) -> str:
    """One row of the table."""
    reached = np.mean(np.array(shares) >= 0.99)
    return (
        f"  {label:8} {np.mean(shares):7.1%} {interval(resampled_means(shares)):18} "
        f"{np.median(shares):7.1%} {np.quantile(shares, 0.1):7.1%} {reached:7.0%}  "
        f"({len(shares)} seeds)"
    )


def main() -> None:
    """Search the grid, tune, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=" or ".join(CASES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.05, help="of the grid's requests")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-tune"))
    options = parser.parse_args()
    for name in options.cases or CASES:
        grid = searched_grid(name, options.out / name / "grid")
        whole, best_rps = sum(grid.requests), max(grid.capacities_rps)
        near = np.mean(grid.capacities_rps >= 0.99 * best_rps)
        print(
            f"{name}{' (held back)' * (name in HELD_BACK)}: {len(grid.points)} points, "
            f"{min(grid.rates_rps):.4g} to {best_rps:.4g} req/s, "
            f"{near:.0%} of them within 1 % of the best; {whole:,} requests",
            *grid.close(),
            sep="\n",
            flush=True,
        )
        folder = options.out / name / f"tune-{options.share:g}"
        chosen = [
            tuned(name, grid, options.share * whole, seed, folder / str(seed))
            for seed in range(options.first_seed, options.first_seed + options.seeds)
        ]
        spent = [requests for *_, requests in chosen]
        budget = float(np.mean(spent))
        print(f"  tune took {', '.join(f'{n / whole:.1%}' for n in spent)} of the grid's requests")
        off = [told_rps / rate_rps - 1 for rate_rps, told_rps, _ in chosen]
        print(f"  it told {np.mean(off):+.1%} {interval(resampled_means(off))} of the capacity")
        shares = {"tune": [rate_rps / best_rps for rate_rps, *_ in chosen]}
        for label, method in (("random", random_search), ("TPE", tpe)):
            shares[label] = [method(grid, budget, seed) / best_rps for seed in range(DRAWS)]
        (folder / "shares.json").write_text(json.dumps(shares), encoding="utf-8")
        print(f"  {'':8} {'mean':>7} {'95 %':18} {'median':>7} {'10 %':>7} {'≥ 99 %':>7}")
        for label, of_label in shares.items():
            print(summary(label, of_label), flush=True)
        for label in ("random", "TPE"):
            ahead = resampled_means(shares["tune"]) - resampled_means(shares[label])[::-1]
            print(f"  tune is ahead of {label} by {interval(ahead)}", flush=True)


if __name__ == "__main__":
    main()
