"""How well, and at what cost, `slo-bench capacity` finds capacities that are known.

Run `python tools/benchmarks/bench_capacity.py [coverage] [bisection] [speed] [servers] [live]`;
without a word all but the last two; `live` takes an hour (or five processes with
`--first 0 --live-searches 1` to `--first 4` a quarter of one).

coverage    seeded searches on simulated M/D/c queues: how often the interval covers the truth, how
            far the estimate is from it, requests spent
bisection   the same queues by plain bisection on single runs: requests it needs for equal error
speed       CPU seconds of `slo-bench capacity` for Llama-3-8B on one A100-80G, sarathi, five seeds
servers     the default search of a real server, in virtual time, at three SLOs: by independent
            levels, as it is, and with the same search on one stream that never stops
live        five searches over HTTP on a mock server with c slots and a fixed service time
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slo_bench import Experiment
from slo_bench.harness.servers.mock.mock_config import MockConfig
from slo_bench.harness.servers.mock.running_mock import serving_apart
from slo_bench.tuner.capacity.capacity_options import CapacityOptions
from slo_bench.tuner.capacity.capacity_search import find_capacity
from slo_bench.tuner.capacity.folder import search_capacity
from slo_bench.tuner.capacity.level_samples import wilson_interval
from slo_bench.tuner.capacity.search_options import Budget, SearchOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from reference.mdc_queue import MdcQueue, measured_capacity

QUEUES = [
    MdcQueue(servers, 1.0, wait_slo_s)
    for servers, wait_slo_s in ((1, 2.0), (4, 0.3), (4, 5.0), (8, 1.0), (16, 0.5))
]
TARGETS = (0.9, 0.99)
BUDGET = Budget(requests=2_000_000)


@dataclass(frozen=True)
class Tried:
    """What searches for one target found: errors relative to the truth."""

    errors: np.ndarray
    covered: np.ndarray
    requests: np.ndarray

    @property
    def rms(self) -> float:
        return float(np.sqrt((self.errors**2).mean()))


def start_rps(queue: MdcQueue, seed: int) -> float:
    """A first guess that may be far off."""
    return queue.limit_rps * math.exp(np.random.default_rng(seed).uniform(-1.5, 1.0))


def search(queue: MdcQueue, target: float, searches: int) -> Tried:
    """So many seeded searches."""
    truth_rps = queue.capacity_rps(target)
    errors, covered, requests = [], [], []
    for number in range(searches):
        options = SearchOptions(targets=(target,), first_seed=10_000 * number, budget=BUDGET)
        outcome = find_capacity(queue, start_rps=start_rps(queue, number), options=options)
        (capacity,) = outcome.capacities
        errors.append((capacity.capacity_rps or 0.0) / truth_rps - 1)
        covered.append(capacity.low_rps <= truth_rps <= capacity.high_rps)
        requests.append(outcome.requests_spent)
    return Tried(np.array(errors), np.array(covered), np.array(requests))


def bisect(queue: MdcQueue, target: float, seed: int, requests: int) -> tuple[float, int]:
    """Plain bisection: one run at a rate decides; the estimate, and the requests spent."""
    low, high, spent, rate = 0.0, math.inf, 0, start_rps(queue, seed)
    while high / max(low, 1e-9) > 1.01:
        met = queue.run(rate, 10_000 * seed + spent, requests).attainment
        spent += requests
        low, high = (rate, high) if met >= target else (low, rate)
        rate = low * 2 if high == math.inf else high / 2 if low == 0.0 else math.sqrt(low * high)
    return math.sqrt(low * high), spent


def bisection_at_equal_error(queue: MdcQueue, target: float, reference: Tried) -> float:
    """Requests that bisection spends where its error is as large, between powers of two."""
    truth_rps = queue.capacity_rps(target)
    before: tuple[float, float] | None = None
    for power in range(9, 21):
        bisections = [bisect(queue, target, seed, 2**power) for seed in range(40)]
        rms = float(np.sqrt(np.mean([(rate / truth_rps - 1) ** 2 for rate, _ in bisections])))
        spent = float(np.mean([requests for _, requests in bisections]))
        if rms <= reference.rms:
            if before is None:
                return spent
            share = math.log(before[0] / reference.rms) / math.log(before[0] / rms)
            return before[1] * (spent / before[1]) ** share
        before = rms, spent
    return math.inf


def coverage_and_bisection(searches: int, *, bisection: bool) -> None:
    """A line for each queue and target."""
    head = f"{'queue':24} {'target':>6} {'req/s':>7} {'covered':>8} {'RMS':>6} {'worst':>6} "
    head += f"{'> 5 %':>5} {'requests':>9}"
    print(head + (f" {'bisection':>10} {'ratio':>6}" if bisection else ""))
    for queue in QUEUES:
        for target in TARGETS:
            trial = search(queue, target, searches)
            name = f"M/D/{queue.servers}, wait ≤ {queue.wait_slo_s:g} D"
            line = (
                f"{name:24} {target:6g} {queue.capacity_rps(target):7.3f} "
                f"{trial.covered.mean():8.0%} {trial.rms:6.1%} {abs(trial.errors).max():6.1%} "
                f"{(abs(trial.errors) > 0.05).sum():5d} {trial.requests.mean():9,.0f}"
            )
            if bisection:
                needed = bisection_at_equal_error(queue, target, trial)
                line += f" {needed:10,.0f} {needed / trial.requests.mean():6.1f}"
            print(line, flush=True)


def speed() -> None:
    """One search as a process of its own, report included."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "slo_bench.cli.main", "capacity", "--system", "sarathi"),
            *("--model", "llama-3-8b", "--gpu", "a100-80g", "--seeds", "5"),
            *("--out", str(Path(folder) / "out")),
        ]
        child = os.posix_spawn(sys.executable, command, os.environ)
        _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    print(f"CPU seconds: {usage.ru_utime + usage.ru_stime:.2f}")


def servers(searches: int) -> None:
    """A line for each SLO and way to send."""
    print("TTFT SLO  truth  sent as  covered (95 %)     bias    RMS  ± half  seconds, 90 %")
    for wait_slo_s in (0.05, 0.34, 2.0):
        queue = MdcQueue(32, 0.68, wait_slo_s)
        truth_rps = queue.capacity_rps(0.9)
        for stream in (False, True):
            results = [measured_capacity(queue, seed, stream=stream) for seed in range(searches)]
            rates = [(c.capacity_rps or math.nan, c.low_rps, c.high_rps) for c, _ in results]
            estimate, low, high = np.array(rates).T
            errors = estimate / truth_rps - 1
            covered = float(((low <= truth_rps) & (truth_rps <= high)).mean())
            covered_low, covered_high = wilson_interval(covered, searches)
            seconds = [took_s for _, took_s in results]
            print(
                f"{wait_slo_s + 0.05:6.2f} s {truth_rps:6.2f}  {'stream' if stream else 'levels'}  "
                f"{covered:5.1%} ({covered_low:.0%}-{covered_high:.0%}) {np.nanmean(errors):+7.1%} "
                f"{np.sqrt(np.nanmean(errors**2)):6.1%} "
                f"{np.median(high - low) / 2 / truth_rps:7.1%} "
                f"{np.mean(seconds):8.0f} {np.quantile(seconds, 0.9):5.0f}"
                f"  undecided {np.isnan(errors).sum()}",
                flush=True,
            )


def live(numbers: range, slots: int, service_s: float, wait_slo_s: float, tolerance: float) -> None:
    """Searches over HTTP. The mock keeps its times only where a core is free for it."""
    ttft_s = 0.002
    queue = MdcQueue(slots, service_s, wait_slo_s)
    truth_rps = queue.capacity_rps(0.9)
    print(f"{slots} slots, {service_s} s each, wait ≤ {wait_slo_s} s: {truth_rps:.2f} req/s at 0.9")
    config = MockConfig(ttft_s=ttft_s, slots=slots, service_s=service_s)
    with serving_apart(config) as mock, tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            experiment = Experiment(
                systems="mock",
                backend="openai",
                client={"base_urls": [mock.url], "send_delay_limit_s": wait_slo_s / 5},
                model="mock",
                workload="synthetic",
                prompt_tokens="8",
                output_tokens="4",
                slo=f"ttft={ttft_s + wait_slo_s}",
                seed=1000 * number,
                rates=[0.4 * queue.limit_rps],
            )
            options = CapacityOptions(targets=(0.9,), tolerance=tolerance)
            capacities = search_capacity(experiment, Path(folder) / str(number), options=options)
            (row,) = capacities.rows()
            if not row["capacity_rps"]:
                print(f"nothing found: {row['stopped']}; {row['levels']}", flush=True)
                continue
            print(
                f"{row['capacity_rps']:7.2f} [{row['low_rps']:.2f}, {row['high_rps']:.2f}] "
                f"error {row['capacity_rps'] / truth_rps - 1:+.1%} "
                f"covered {row['low_rps'] <= truth_rps <= row['high_rps']} "
                f"{row['requests_spent']:,} requests, {row['wall_s']:.0f} s: {row['stopped']}",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["coverage", "bisection", "speed"])
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--live-searches", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the first live search")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--service", type=float, default=0.5, help="seconds")
    parser.add_argument("--wait", type=float, default=0.15, help="seconds")
    parser.add_argument("--tolerance", type=float, default=0.04, help="of the live searches")
    options = parser.parse_args(arguments)
    if {"coverage", "bisection"} & set(options.what):
        coverage_and_bisection(options.searches, bisection="bisection" in options.what)
    if "speed" in options.what:
        speed()
    if "servers" in options.what:
        servers(options.searches)
    if "live" in options.what:
        numbers = range(options.first, options.first + options.live_searches)
        live(numbers, options.slots, options.service, options.wait, options.tolerance)


if __name__ == "__main__":
    main()
