"""Does the interval of `slo-bench capacity` cover the capacity that long runs find?

Run `python tools/benchmarks/bench_capacity_truth.py [--cases 0:30] [--out FILE]`; with two
processes, each half of the cases, about an hour.

Thirty simulated systems and SLOs: static batches, continuous batches, long deadlines, drops,
clusters, embedders. The truth of a case is found without the search: long runs (seeds of their own,
at least 40,000 requests and 40 horizons of the SLO each, the first and last horizon not counted)
bracket the highest rate with the target's attainment at which the backlog grows by less than 1 % of
the arrivals, and bisect it to 1 %; the truth is where the line through the
last rates, by long runs of three seeds, crosses the target. A line a case, and a JSON line to
`--out`, whose cases are not run again; `--truths FILE` takes the truths of an earlier file, and
searches again.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from slo_bench import Experiment
from slo_bench.harness.experiments.execution.experiment_plan import plan
from slo_bench.harness.results.stationarity import keeps_up, requests_in
from slo_bench.tuner.capacity.capacity_cells import CellRunner, Simulator
from slo_bench.tuner.capacity.capacity_options import CapacityOptions
from slo_bench.tuner.capacity.folder import search_capacity
from slo_bench.tuner.capacity.level_samples import LevelSample

LONG_REQUESTS, LONG_HORIZONS = 40_000, 40.0
SEEDS = 3
FIRST_SEED = 1_000_000  # the searches' seeds begin at 0
UELLM = {"model": "chatglm2-6b", "gpu": "rtx-3090@250w", "workload": "alpaca"}
EMBEDDER = {
    "model": "llama-2-7b",
    "gpu": "a100-80g",
    "embedder": "bge-m3",
    "workload": "collocated(5:5)",
    "slo": "chat:ttft=1,tpot=0.15;batch:ttft=10,tpot=0.3;embed:e2e=3",
}
CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("slo-odbs", 0.9, {**UELLM, "slo": "e2e=uniform(1,350)"}),
    ("slo-dbs", 0.9, {**UELLM, "slo": "e2e=uniform(1,350)"}),
    ("odbs", 0.9, {**UELLM, "slo": "e2e=120"}),
    ("s3", 0.9, {**UELLM, "slo": "e2e=60"}),
    ("fifo", 0.9, {**UELLM, "slo": "e2e=60"}),
    ("sjf", 0.9, {**UELLM, "slo": "e2e=uniform(10,120)"}),
    ("orca", 0.9, {**UELLM, "slo": "e2e=30"}),
    ("fastertransformer", 0.9, {"slo": "e2e=120"}),
    ("slo-odbs-continuous", 0.9, {"slo": "e2e=uniform(5,100)"}),
    ("vllm", 0.9, {}),
    ("vllm", 0.99, {"slo": "ttft=5"}),
    ("vllm", 0.9, {"slo": "e2e=300"}),
    ("sarathi", 0.99, {}),
    ("sarathi", 0.9, {"slo": "e2e=120"}),
    ("vllm-v0", 0.9, {"slo": "ttft=60"}),
    ("edf", 0.9, {"slo": "ttft=uniform(1,60)"}),
    ("edf-drop", 0.9, {"slo": "ttft=uniform(1,60)"}),
    ("vllm-drop", 0.9, {"slo": "ttft=10"}),
    ("sarathi-drop", 0.95, {"slo": "ttft=30"}),
    ("prism-queue", 0.9, {"slo": "ttft=uniform(1,20)"}),
    ("sglang", 0.9, {"slo": "ttft=20"}),
    ("adaptivellm", 0.9, {"slo": "ttft=30"}),
    ("adaptivellm-deadlines", 0.9, {"slo": "e2e=90"}),
    ("vllm", 0.9, {"instances": 4, "slo": "ttft=10"}),
    ("ascendra", 0.9, {"instances": 3, "slo": "ttft=5,tpot=0.15"}),
    ("distserve", 0.9, {"instances": 4, "slo": "ttft=2,tpot=0.1"}),
    ("llumnix", 0.9, {"instances": 4, "slo": "ttft=30"}),
    ("collocation", 0.9, EMBEDDER),
    ("collocated-fcfs", 0.9, EMBEDDER),
    ("static-split", 0.9, EMBEDDER),
]


@dataclass(frozen=True)
class Truth:
    """Brute force: the capacity in req/s, and the requests that it took."""

    rate_rps: float
    requests: int


def experiment(system: str, settings: dict[str, Any]) -> Experiment:
    """The configuration of a case."""
    return Experiment(systems=system, **settings)


def truth_of(case_experiment: Experiment, target: float, start_rps: float) -> Truth:
    """The capacity by long runs alone."""
    [spec] = plan(case_experiment.model_copy(update={"rates": (1.0,), "seeds": 1})).cells
    runner = CellRunner(spec, "truth", Simulator(), lambda cell, row: None)
    spent = 0

    @cache
    def run(rate_rps: float, seed: int) -> LevelSample:
        nonlocal spent
        sample = runner.run(rate_rps, FIRST_SEED + seed, LONG_REQUESTS)
        longer = requests_in(LONG_HORIZONS * sample.horizon_s, rate_rps, sample.horizon_s)
        spent += LONG_REQUESTS
        if longer > LONG_REQUESTS and sample.attainment >= target - 0.1:
            sample = runner.run(rate_rps, FIRST_SEED + seed, longer)
            spent += longer
        return sample

    def share(rate_rps: float, seeds: int = 1) -> float:
        runs = [run(rate_rps, seed) for seed in range(seeds)]
        return float(np.mean([sample.attainment for sample in runs])) if keeps_up(runs) else 0.0

    rate_rps = float(f"{start_rps:.4g}")
    low, high = 0.0, math.inf
    while low == 0.0 or high == math.inf or high / low > 1.02:
        if share(rate_rps) >= target:
            low = rate_rps
        else:
            high = rate_rps
        rate_rps = (
            low * 1.1 if high == math.inf else high / 1.1 if low == 0 else (low * high) ** 0.5
        )
    # One run a rate may have fallen on the wrong side: three of each now, further out if need be.
    while share(low, SEEDS) < target:
        low, high = low / 1.01, low
    while share(high, SEEDS) >= target:
        low, high = high, high * 1.01
    at_low, at_high = share(low, SEEDS), share(high, SEEDS)
    if at_high == 0.0:
        return Truth(math.sqrt(low * high), spent)
    part = (at_low - target) / (at_low - at_high)
    return Truth(low * (high / low) ** part, spent)


def tried(number: int, truth: Truth | None) -> dict[str, Any]:
    """Search and, unless the truth is known, brute force of a case."""
    system, target, settings = CASES[number]
    case_experiment = experiment(system, settings)
    began_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        options = CapacityOptions(targets=(target,))
        [row] = search_capacity(case_experiment, Path(folder) / "out", options=options).rows()
    searched_s = time.process_time() - began_s
    start_rps = row["capacity_rps"] or row["low_rps"] or row["high_rps"]
    truth = truth or truth_of(case_experiment, target, start_rps)
    high_rps = math.inf if row["high_rps"] is None else row["high_rps"]
    return {
        "case": number,
        "system": system,
        "target": target,
        **{name: settings.get(name) for name in ("slo", "instances", "workload")},
        **{name: row[name] for name in ("outcome", "capacity_rps", "low_rps", "high_rps")},
        "precise": row["precise"],
        "requests_spent": row["requests_spent"],
        "cpu_s": round(searched_s, 1),
        "truth_rps": truth.rate_rps,
        "truth_requests": truth.requests,
        "covered": row["low_rps"] <= truth.rate_rps <= high_rps,
    }


def read(path: Path | None) -> dict[int, dict[str, Any]]:
    """Results in a file by case; none without the file."""
    if path is None or not path.is_file():
        return {}
    return {row["case"]: row for row in map(json.loads, path.read_text().splitlines())}


def main() -> None:
    """Print a line a case, and how many of them cover."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=f"0:{len(CASES)}", help="FIRST:END")
    parser.add_argument("--out", type=Path, help="file of results, continued if there is one")
    parser.add_argument("--truths", type=Path, help="file of results whose truths are taken")
    options = parser.parse_args()
    first, end = map(int, options.cases.split(":"))
    done = read(options.out)
    truths = {
        number: Truth(row["truth_rps"], row["truth_requests"])
        for number, row in read(options.truths).items()
    }
    for number in range(first, end):
        if number not in done:
            done[number] = tried(number, truths.get(number))
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(done[number]) + "\n")
        row = done[number]
        capacity = "–" if row["capacity_rps"] is None else f"{row['capacity_rps']:.3g}"
        print(
            f"{row['system']:22} {row['slo'] or 'default':40.40} ≥ {row['target']:g}: {capacity} "
            f"[{row['low_rps']:.3g}, {row['high_rps'] or math.inf:.3g}] {row['outcome']}, "
            f"brute force {row['truth_rps']:.3g}: {'covered' if row['covered'] else 'NOT COVERED'}",
            flush=True,
        )
    covered = sum(done[number]["covered"] for number in range(first, end))
    print(f"covered: {covered} of {end - first}")


if __name__ == "__main__":
    main()
