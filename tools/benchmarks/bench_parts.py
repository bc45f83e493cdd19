"""Where the CPU time of a simulated run goes: `python tools/benchmarks/bench_parts.py`.
How it grows with the work: `python tools/benchmarks/bench_parts.py --growth`.

Each row is one `slo-bench run` (Azure conversation lengths, Llama-3-8B on A100-80G, Poisson
arrivals, records on disk, no report) in a process of its own, whose stack is looked at every 2 ms
of CPU time. A part is the code of the project that is innermost on the stack: numpy and the
standard library count for their caller, and what is outside all parts (imports, options) as
`start`. Shares are of the samples; looking costs 1 to 2 %.

With `--growth`, one thing grows at a time: requests, instances (the rate with them), models on as
many GPUs (the rate with them), and the queue (all requests arrive within a second). The time of a
request leaves out that of a run of `START` requests, which is start-up.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
EVERY_S = 0.002
# The first that begins the file's path, from the top of the project.
PARTS = (
    ("harness/core/kv_", "KV cache"),
    ("harness/core/view", "view"),
    ("harness/engine/loop/view", "view"),
    ("harness/engine/loop/measures", "recorder"),
    ("harness/engine/cluster/recorder", "recorder"),
    ("harness/core/records", "recorder"),
    ("harness/engine/cluster", "cluster events"),
    ("harness/core/network", "cluster events"),
    ("harness/engine", "loop"),
    ("harness/core", "loop"),
    ("harness/policies", "policy"),
    ("harness/results", "writing"),
    ("harness/experiments", "writing"),
    ("predictors", "step time"),
    ("workloads", "drawing"),
)
NAMES = (*dict.fromkeys(part for _, part in PARTS), "start")
SINGLE = ("vllm", "sarathi", "vllm-v0", "adaptivellm", "edf")
CLUSTERS = ("vllm", "ascendra", "llumnix", "distserve", "mooncake", "banaserve")
START = 100
GROWS = 10_000  # requests, where something else grows
EIGHT = 8
FLEETS = ("prism", "muxserve")
QUEUES = ("vllm", "edf", "adaptivellm")
SPLIT = ("distserve", "mooncake", "banaserve")
SETTINGS = {
    "ascendra": "ascendra.n_lp=6 ascendra.n_hp=2",
    **{name: f"{name}.prefill_instances=4 {name}.decode_instances=4" for name in SPLIT},
}


def part_of(path: str) -> str | None:
    """The part that a source file belongs to; None outside the project."""
    if not path.startswith(f"{ROOT}{os.sep}"):
        return None
    inside = path[len(str(ROOT)) + 1 :].removeprefix(".editable/slo_bench/")
    return next((part for begin, part in PARTS if inside.startswith(begin)), None)


def sampled(words: list[str]) -> Counter[str]:
    """Run a command of slo-bench in this process; samples by part."""
    samples: Counter[str] = Counter()
    part_by_path: dict[str, str | None] = {}

    def look(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            path = frame.f_code.co_filename
            if path not in part_by_path:
                part_by_path[path] = part_of(os.path.realpath(path))
            if (part := part_by_path[path]) is not None:
                samples[part] += 1
                return
            frame = frame.f_back
        samples["start"] += 1

    from slo_bench.cli.main import app

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    try:
        app(words, standalone_mode=False)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return samples


def measured(
    system: str, requests: int, rate_rps: float, *options: str
) -> tuple[float, float, Counter[str]]:
    """CPU seconds and peak memory (MB) of one run in a process of its own, and samples by part."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "--system", system, "--workload", "azure-conv", "--gpu", "a100-80g"]
        words += ["--rates", str(rate_rps), "--requests", str(requests), "--seeds", "1"]
        words += ["--jobs", "1", "--overlong-requests", "reject", "--no-report"]
        words += [*options, "--out", str(Path(folder) / "run")]
        done = subprocess.run(
            [sys.executable, __file__, "--sample", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
    *_, cpu_s, peak_mb, counts = done.stdout.splitlines()
    return (
        float(cpu_s),
        float(peak_mb),
        Counter({name: int(n) for name, n in (pair.split("=") for pair in counts.split(","))}),
    )


def of_cluster(system: str, instances: int) -> list[str]:
    """Options of a system with so many instances; half of them prefill where they are split."""
    options = ["--model", "llama-3-8b", "--instances", str(instances)]
    settings = SETTINGS.get(system, "") if instances == EIGHT else ""
    if system in SPLIT and not settings:
        settings = f"{system}.prefill_instances={instances // 2}"
    for setting in settings.split():
        options += ["--sweep", setting]
    return options


def row(system: str, instances: int, requests: int, rate_rps: float) -> str:
    """One run by part."""
    cpu_s, _, samples = measured(system, requests, rate_rps, *of_cluster(system, instances))
    shares = [f"{100 * samples[name] / samples.total():.0f} %" for name in NAMES]
    speed = f"{requests / cpu_s:,.0f}"
    return f"| {' | '.join([system, str(instances), f'{rate_rps:g}', speed, *shares])} |"


def growths(
    rate_rps: float, most_requests: int
) -> Iterator[tuple[str, str, int, int, float, list[str]]]:
    """What grows, the system, how far, requests, their rate and the options."""
    single = of_cluster("vllm", 1)
    for requests in (10_000, 100_000, 1_000_000, 10_000_000):
        if requests <= most_requests:
            yield "requests", "vllm", requests, requests, rate_rps, single
    for requests in (10_000, 100_000, 1_000_000):
        if requests <= most_requests:
            options = of_cluster("distserve", EIGHT)
            yield "requests", "distserve", requests, requests, rate_rps * EIGHT, options
    for system in ("llumnix", "distserve", "banaserve"):
        for instances in (2, EIGHT, 32, 64, 128 if system in SPLIT else 256):
            options = of_cluster(system, instances)
            yield "instances", system, instances, GROWS, rate_rps * instances, options
    for system in FLEETS:
        for models in (1, 4, 10, 30, 100):
            options = ["--models", f"fleet(llama-3.1-8b*{models})", "--gpus", str(models)]
            yield "models", system, models, GROWS, rate_rps * models, options
    for system in QUEUES:
        for queued in (10_000, 100_000):
            if queued <= most_requests:
                yield "queue", system, queued, queued, float(queued), single


def grow(rate_rps: float, most_requests: int) -> None:
    """Print what a request costs as the work grows."""
    heads = ["what grows", "system", "number", "requests", "CPU s", "CPU us a request", "peak MB"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for quantity, system, number, requests, rate, options in growths(rate_rps, most_requests):
        cpu_s, peak_mb, _ = measured(system, requests, rate, *options)
        start_s, _, _ = measured(system, START, rate, *options)
        each_us = 1e6 * (cpu_s - start_s) / (requests - START)
        cells = [quantity, system, f"{number:,}", f"{requests:,}"]
        cells += [f"{cpu_s:.2f}", f"{each_us:.0f}", f"{peak_mb:,.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print a table, or be the process that is looked at."""
    if sys.argv[1:2] == ["--sample"]:
        samples = sampled(sys.argv[2:])
        print(f"\n{time.process_time()}")
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 * 1.024)
        print(",".join(f"{name}={samples[name]}" for name in NAMES))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=5.0, help="req/s of an instance")
    parser.add_argument("--growth", action="store_true", help="cost as the work grows")
    options = parser.parse_args()
    if options.growth:
        grow(options.rate, options.requests)
        return
    heads = ["system", "instances", "req/s", "requests per CPU s", *NAMES]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for instances, systems in ((1, SINGLE), (EIGHT, CLUSTERS)):
        for system in systems:
            print(row(system, instances, options.requests, options.rate * instances), flush=True)


if __name__ == "__main__":
    main()
