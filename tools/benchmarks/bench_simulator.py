"""How many requests the simulator serves in a CPU second.

Run `python tools/benchmarks/bench_simulator.py`. Each line is one `slo-bench run` as a process of
its own (start-up, drawing the workload, request records on disk; no report), with the CPU time and
the peak memory that the operating system says it took: Azure conversation lengths, Llama-3-8B on
one A100-80G, Poisson arrivals.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """What a process took."""

    cpu_s: float
    peak_bytes: int


def run(system: str, requests: int, rate_rps: float, folder: Path) -> Cost:
    """Simulate in a process of its own."""
    command = [
        *(sys.executable, "-m", "slo_bench.cli.main", "run", "--system", system),
        *("--workload", "azure-conv", "--model", "llama-3-8b", "--gpu", "a100-80g"),
        *("--rates", str(rate_rps), "--requests", str(requests), "--seeds", "1", "--jobs", "1"),
        *(
            "--overlong-requests",
            "reject",
            "--no-report",
            "--out",
            str(folder / f"{system}-{rate_rps}"),
        ),
    ]
    quiet = os.open(os.devnull, os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, quiet, 1), (os.POSIX_SPAWN_DUP2, quiet, 2)]
    child = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
    _, status, usage = os.wait4(child, 0)
    os.close(quiet)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--systems", default="vllm,sarathi,vllm-v0,sglang")
    parser.add_argument("--rates", default="6.45", help="12 saturates the KV cache")
    options = parser.parse_args()
    print(
        f"{'system':12} {'req/s':>6} {'requests':>9} {'CPU s':>7} {'per CPU s':>10} {'peak MB':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for rate in options.rates.split(","):
            for system in options.systems.split(","):
                cost = run(system, options.requests, float(rate), Path(folder))
                speed = options.requests / cost.cpu_s
                print(
                    f"{system:12} {rate:>6} {options.requests:9,} {cost.cpu_s:7.2f} {speed:10,.0f} "
                    f"{cost.peak_bytes / 1e6:8.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
