"""CPU time of whole commands, start-up included: `python tools/benchmarks/bench_commands.py`.

Each command runs in processes of its own, with bytecode in a folder that a first round fills. With
`--beside DIR`, another checkout of the project, both run in turns. Printed is the least CPU time,
user and system, worker processes included, and at last the time of a turn of `bench_turns.py`.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_turns import turn_s

ROOT = Path(__file__).resolve().parents[2]
SHORT = "run --system vllm --workload azure-conv --requests 100 --rates 5 --seeds 1"
COMMANDS = {
    "version": "--version",
    "help": "--help",
    "run-help": "run --help",
    "list-systems": "list systems",
    "list-suites": "list suites",
    "run": f"{SHORT} --no-report",
    "run-report": SHORT,
    "capacity-vllm": "capacity --system vllm",
    "capacity-sarathi": "capacity --system sarathi",
    "plan-8b": "plan --model llama-3.1-8b --rate 20 --slo ttft=1,tpot=0.1",
    "plan-r1": "plan --model deepseek-r1 --rate 20 --slo ttft=2,tpot=0.05",
}
START = "import sys; sys.argv[0] = 'slo-bench'; from slo_bench.cli.entry import main; main()"


def cpu_s(command: str, checkout: Path, bytecode: Path) -> float:
    """CPU seconds of one run of a command with the package in `checkout`."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment["PYTHONPATH"] = str(checkout / ".editable")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        words = command.split()
        if words[0] in ("run", "capacity", "plan") and "--help" not in words:
            words += ["--out", str(Path(folder) / "out")]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", START, *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a row for each command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("commands", nargs="*", default=["version", "run", "run-report"])
    options = parser.parse_args()
    checkouts = [ROOT] if options.beside is None else [options.beside.resolve(), ROOT]
    print(f"| command | {' | '.join(str(checkout) for checkout in checkouts)} |")
    print("|---|" + "---|" * len(checkouts))
    turns_s = []
    with tempfile.TemporaryDirectory() as bytecode:
        for name in options.commands:
            spent_s: list[list[float]] = [[] for _ in checkouts]
            for _ in range(options.repeat + 1):
                turns_s.append(turn_s())
                for each_s, checkout in zip(spent_s, checkouts, strict=True):
                    each_s.append(cpu_s(COMMANDS[name], checkout, Path(bytecode)))
            least = " | ".join(f"{min(each_s[1:]):.2f}" for each_s in spent_s)
            print(f"| `{COMMANDS[name]}` | {least} |", flush=True)
    print(f"a turn: {1e9 * min(turns_s):.1f} ns")


if __name__ == "__main__":
    main()
