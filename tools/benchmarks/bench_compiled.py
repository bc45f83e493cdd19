"""CPU time of the simulator compiled and as source: `python tools/benchmarks/bench_compiled.py`.

Compiles the core into a temporary folder (`scripts/compile_core.py`), then runs `slo-bench run` in
turns on both (Azure conversation lengths, Llama-3-8B on A100-80G, 5 req/s an instance, records on
disk, no report), each run in a process of its own. Printed is the least CPU time of the whole
process and of the simulation in it, which is what is compiled for the most part.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_parts import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
RATE_RPS = 5.0


def measured(words: list[str]) -> tuple[float, float]:
    """Run a command of slo-bench in this process; CPU seconds of all, and of the simulation."""
    from slo_bench.cli import entry

    gc.set_threshold(entry.COLLECT_AFTER)  # before the imports, as `slo-bench` does
    from slo_bench.cli.main import app
    from slo_bench.harness.experiments.execution import cells

    simulate, spent_s = cells.simulate, []

    def timed(*args, **kwargs):
        begin_s = time.process_time()
        try:
            return simulate(*args, **kwargs)
        finally:
            spent_s.append(time.process_time() - begin_s)

    cells.simulate = timed
    app(words, standalone_mode=False)
    return time.process_time(), sum(spent_s)


def run(python_path: Path, system: str, instances: int, requests: int) -> tuple[float, float]:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "--system", system, "--workload", "azure-conv", "--model", "llama-3-8b"]
        words += ["--gpu", "a100-80g", "--rates", str(RATE_RPS * instances), "--seeds", "1"]
        words += ["--requests", str(requests), "--jobs", "1", "--overlong-requests", "reject"]
        words += ["--instances", str(instances), "--no-report", "--out", str(Path(folder) / "run")]
        for setting in SETTINGS.get(system, "").split() if instances > 1 else ():
            words += ["--sweep", setting]
        done = subprocess.run(
            [sys.executable, __file__, "--child", *words],
            # With bytecode of both sides on disk, as an installed package has it.
            env={**os.environ, "PYTHONPATH": str(python_path), "PYTHONDONTWRITEBYTECODE": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
    whole_s, simulation_s = map(float, done.stdout.splitlines()[-1].split())
    return whole_s, simulation_s


def main() -> None:
    """Print a table, or be the process that is measured."""
    if sys.argv[1:2] == ["--child"]:
        print("\n", *measured(sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("systems", nargs="*", default=["vllm:1", "sarathi:1", "vllm-v0:1"])
    options = parser.parse_args()
    print("| system | instances | source: all, simulation (CPU s) | compiled | times as fast |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        compiler = ROOT / "scripts" / "compile_core.py"
        subprocess.run([sys.executable, compiler, folder], check=True, stdout=sys.stderr)
        sides = (ROOT / ".editable", Path(folder))
        for system, _, instances in (text.partition(":") for text in options.systems):
            least = [(float("inf"), float("inf"))] * 2
            for _ in range(options.repeat):
                for index, side in enumerate(sides):
                    seconds = run(side, system, int(instances or 1), options.requests)
                    least[index] = (
                        min(least[index][0], seconds[0]),
                        min(least[index][1], seconds[1]),
                    )
            (a, b), (c, d) = least
            print(
                f"| {system} | {instances or 1} | {a:.2f}, {b:.2f} | {c:.2f}, {d:.2f} "
                f"| {a / c:.2f}, {b / d:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
