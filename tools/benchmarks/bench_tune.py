"""Does `slo-bench tune` find what enumeration finds, at a tenth of its requests?

Run `python tools/benchmarks/bench_tune.py [slo-odbs] [ascendra] [--seeds 10] [--jobs N]`.

Every point of a small space is searched for its capacity; then the space is tuned by TPE with a
tenth of the requests that this took (`--share`), once for each seed of the sampler. Grid and
tuning use the same capacity search, the same seeds of requests and the same width of the interval.
The best of many estimates is too high, and on a plateau that is all that makes it the best; so the
grid's best point and what was tuned are then searched again, on three times fresh seeds, and the
means compared. Their shares of the grid's own estimates are printed beside that.

slo-odbs   slo_weight × output_weight × threshold, 8 × 8 × 4: an RTX 3090 with ChatGLM2-6B, as in
           the suite uellm, but with SLOs of up to a minute, which make runs short
ascendra   LP to HP instances on four GPUs (3:1, 2:2, 1:3) × threshold, 12 values

`--points K` takes every K-th point of the grid alone (the budget stays a share of the whole grid,
reckoned from the mean of those points): a quick look, whose best is that of those points and of
what was tuned, searched in the same way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from slo_bench import Experiment
from slo_bench.tuner.search.evaluate_configuration import (
    ConfigurationEvaluator,
    InfeasibleError,
    RaceResult,
)
from slo_bench.tuner.search.runs import Servers
from slo_bench.tuner.search.samplers import grid_of
from slo_bench.tuner.search.settings import TuneSettings
from slo_bench.tuner.search.space import key_of
from slo_bench.tuner.search.tuning_run import prepared, tune

WANTED = 0.99
FRESH = 3


@dataclass(frozen=True)
class Case:
    experiment: Experiment
    search: dict[str, str]


CASES = {
    "slo-odbs": Case(
        Experiment(
            systems="slo-odbs",
            workload="alpaca",
            max_output_tokens=1024,
            model="chatglm2-6b",
            gpu="rtx-3090@250w",
            host_s=0.03,
            slo="e2e=uniform(1,60)",
            requests=1000,
        ),
        {
            "slo_weight": "0:3.5:0.5",
            "output_weight": "0:3.5:0.5",
            "threshold": "1000,4000,15000,60000",
        },
    ),
    "ascendra": Case(
        Experiment(systems="ascendra", gpus=4, slo="ttft=1,tpot=0.15", requests=3000),
        {"n_lp": "1:3:1", "n_hp": "1:3:1", "threshold": "0:5.5:0.5"},
    ),
}


def settings_of(case: Case, **changes: object) -> TuneSettings:
    return TuneSettings(search=case.search, confirm=False, **changes)  # type: ignore[arg-type]


def evaluation_of(case: Case, folder: Path) -> ConfigurationEvaluator:
    search = prepared(case.experiment, settings_of(case))
    servers = Servers(folder / "servers")
    return ConfigurationEvaluator(
        search.experiment, search.space, search.aim, 0.03, folder, servers
    )


def points_of(evaluation: ConfigurationEvaluator) -> list[dict[str, object]]:
    """Feasible ones, and of a ratio one only."""
    import itertools

    grid = grid_of(evaluation.space.dimensions)
    feasible = []
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        if "n_lp" in point and point["n_lp"] + point["n_hp"] < evaluation.experiment.gpus[0]:
            continue  # several smaller groups of a ratio that is there
        try:
            evaluation.runs_of(point)
        except InfeasibleError:
            continue
        feasible.append(point)
    return feasible


def capacity_of(evaluation: ConfigurationEvaluator, point: dict[str, object]) -> tuple[float, int]:
    """Capacity and requests of a point; remembered in the folder."""
    runs = evaluation.runs_of(point)
    outcome = evaluation.capacity(runs, None)
    assert not isinstance(outcome, RaceResult)
    estimate = outcome.capacities[0]
    return (
        estimate.low_rps if estimate.capacity_rps is None else estimate.capacity_rps
    ), runs.requests


def fresh_rps(case: Case, folder: Path, point: dict[str, object]) -> float:
    """Capacity on seeds that nobody has seen: the mean of a few searches."""
    capacities_rps = []
    for number in range(1, FRESH + 1):
        table = case.experiment.model_dump(exclude_unset=True) | {"seed": 1_000_000 * number}
        again = Case(Experiment(**table), case.search)
        capacities_rps.append(capacity_of(evaluation_of(again, folder / str(number)), point)[0])
    return sum(capacities_rps) / len(capacities_rps)


def grid(name: str, folder: Path, points: int, part: int, parts: int) -> None:
    evaluation = evaluation_of(CASES[name], folder)
    chosen = points_of(evaluation)[::points][part::parts]
    for place, point in enumerate(chosen, 1):
        capacity_of(evaluation, point)
        if part == 0:
            print(f"  {name}: {place} of {len(chosen)} points", file=sys.stderr, flush=True)


def bench(name: str, seeds: int, jobs: int, out: Path, points: int, share: float) -> None:
    case = CASES[name]
    folder = out / name / "grid"
    began_s = time.monotonic()
    words = [sys.executable, __file__, name, "--out", str(out), "--points", str(points)]
    parts = [
        subprocess.Popen([*words, "--part", str(part), "--parts", str(jobs)])
        for part in range(jobs)
    ]
    if max(part.wait() for part in parts):
        raise SystemExit(f"{name}: the grid failed")
    evaluation = evaluation_of(case, folder)
    whole = points_of(evaluation)
    searched = {
        key_of(point): (point, *capacity_of(evaluation, point)) for point in whole[::points]
    }
    spent = round(sum(requests for *_, requests in searched.values()) / len(searched) * len(whole))
    print(
        f"{name}: grid of {len(whole)} points, {len(searched)} searched: {spent:,} requests "
        f"{'' if points == 1 else '(reckoned) '}in {time.monotonic() - began_s:.0f} s"
    )
    tuned = []
    for seed in range(seeds):
        study = tune(
            case.experiment,
            settings_of(case, sampler_seed=seed, trials=100_000, max_requests=round(share * spent)),
            out / name / f"tune-{share:g}-{seed}",
            resume=(out / name / f"tune-{share:g}-{seed}").is_dir(),
        ).found
        configuration = dict(study.best[0].configuration)
        searched[key_of(configuration)] = (configuration, *capacity_of(evaluation, configuration))
        tuned.append((key_of(configuration), study.requests, len(study.trials)))
    best_point, best_rps, _ = max(searched.values(), key=lambda value: value[1])
    worst_rps = min(rps for _, rps, _ in searched.values())
    print(f"  best {best_rps:.4g} req/s at {best_point}; worst {worst_rps:.4g} req/s")
    again = out / name / "fresh"
    best_fresh_rps = fresh_rps(case, again, best_point)
    print(f"  on fresh seeds the best has {best_fresh_rps:.4g} req/s")
    shares = []
    for seed, (key, requests, trials) in enumerate(tuned):
        point, rps, _ = searched[key]
        shares.append(fresh_rps(case, again, point) / best_fresh_rps)
        print(
            f"  seed {seed}: {shares[-1]:.1%} of the best on fresh seeds, {rps / best_rps:.1%} by "
            f"the grid's estimates ({rps:.4g} req/s), {requests:,} requests "
            f"({requests / spent:.1%}), {trials} configurations, {json.dumps(point)}",
            flush=True,
        )
    middle = median(shares)
    kept = median(requests for _, requests, _ in tuned) / spent
    verdict = "reached" if middle >= WANTED and kept <= share * 1.1 else "missed"
    print(f"  median of {seeds} seeds: {middle:.1%} with {kept:.1%} of the requests: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=" or ".join(CASES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--points", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.1, help="of the grid's requests")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-tune"))
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.cases or CASES:
        if options.part is not None:
            grid(name, options.out / name / "grid", options.points, options.part, options.parts)
        else:
            bench(name, options.seeds, options.jobs, options.out, options.points, options.share)


if __name__ == "__main__":
    main()
