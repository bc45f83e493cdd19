"""Where the CPU time of a simulated run goes: `python tests/benchmarks/bench_parts.py`.

Each row is one `slo-bench run` (Azure conversation lengths, Llama-3-8B on A100-80G, Poisson
arrivals, records on disk, no report) in a process of its own, whose stack is looked at every 2 ms
of CPU time. A part is the code of the project that is innermost on the stack: numpy and the
standard library count for their caller, and what is outside all parts (imports, options) as
`start`. Shares are of the samples; looking costs 1 to 2 %.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
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
SETTINGS = {
    "ascendra": "ascendra.n_lp=6 ascendra.n_hp=2",
    **{
        name: f"{name}.prefill_instances=4 {name}.decode_instances=4"
        for name in ("distserve", "mooncake", "banaserve")
    },
}


def part_of(path: str) -> str | None:
    """The part that a source file belongs to; None outside the project."""
    if not path.startswith(f"{ROOT}{os.sep}"):
        return None
    inside = path[len(str(ROOT)) + 1 :].removeprefix(".editable/slo_bench/")
    return next((part for begin, part in PARTS if inside.startswith(begin)), None)


def sampled(words: list[str]) -> Counter[str]:
    """Run a command of slo-bench in this process; samples by part."""
    found: Counter[str] = Counter()
    known: dict[str, str | None] = {}

    def look(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            path = frame.f_code.co_filename
            if path not in known:
                known[path] = part_of(os.path.realpath(path))
            if (part := known[path]) is not None:
                found[part] += 1
                return
            frame = frame.f_back
        found["start"] += 1

    from slo_bench.cli.main import app

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    try:
        app(words, standalone_mode=False)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return found


def row(system: str, instances: int, requests: int, rate_rps: float) -> str:
    """One run, measured in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "--system", system, "--workload", "azure-conv", "--model", "llama-3-8b"]
        words += ["--gpu", "a100-80g", "--rates", str(rate_rps), "--requests", str(requests)]
        words += ["--seeds", "1", "--jobs", "1", "--overlong-requests", "reject", "--no-report"]
        words += ["--instances", str(instances), "--out", str(Path(folder) / "run")]
        for setting in SETTINGS.get(system, "").split():
            words += ["--sweep", setting]
        done = subprocess.run(
            [sys.executable, __file__, "--sample", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
    *_, cpu, counts = done.stdout.splitlines()
    found = Counter({name: int(n) for name, n in (one.split("=") for one in counts.split(","))})
    shares = [f"{100 * found[name] / found.total():.0f} %" for name in NAMES]
    speed = f"{requests / float(cpu):,.0f}"
    return f"| {' | '.join([system, str(instances), f'{rate_rps:g}', speed, *shares])} |"


def main() -> None:
    """Print a table, or be the process that is looked at."""
    if sys.argv[1:2] == ["--sample"]:
        found = sampled(sys.argv[2:])
        print(f"\n{time.process_time()}")
        print(",".join(f"{name}={found[name]}" for name in NAMES))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=5.0, help="req/s of an instance")
    asked = parser.parse_args()
    heads = ["system", "instances", "req/s", "requests per CPU s", *NAMES]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for instances, systems in ((1, SINGLE), (8, CLUSTERS)):
        for system in systems:
            print(row(system, instances, asked.requests, asked.rate * instances), flush=True)


if __name__ == "__main__":
    main()
