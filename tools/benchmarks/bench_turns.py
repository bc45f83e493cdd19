"""A simulated request in turns of an empty loop: `python tools/benchmarks/bench_turns.py`.

A turn is `total += i * i % 7`. CPU time of one machine differs by several times from day to day and
with what else runs; the number of turns differs less. Each case is one `slo-bench run` (records on
disk, no report) with many requests, less one with few, both several times in turns with the loop,
the least of each. `--beside TREE` measures another source tree in turns with this one. `--count`
counts the bytecode instructions of the simulation instead, which are the same on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
TURNS = 200_000
FEW = 100  # requests
_DENSE = "--workload synthetic --prompt-tokens 1024 --output-tokens 128 --model qwen3-32b"
_DENSE += " --gpu b200 --tp 4 --arrivals concurrency(64)"
_CHAT = "--workload azure-conv --model llama-3-8b --gpu a100-80g --overlong-requests reject"
_ONE = "--sweep {0}.prefill_instances=1 --instances 3"
_THREE = f"{_CHAT} --rates 15 --instances 3"
_HALF = "--sweep {0}.prefill_instances=64 --instances 128 --rates 640"
# Requests and options.
CASES = {
    "dense": (2000, f"--system vllm {_DENSE}"),
    "split": (2000, f"--system distserve {_DENSE} {_ONE.format('distserve')}"),
    "mooncake": (1500, f"--system mooncake {_DENSE} {_ONE.format('mooncake')}"),
    "banaserve": (1000, f"--system banaserve {_DENSE} {_ONE.format('banaserve')}"),
    "llumnix": (1500, f"--system llumnix {_DENSE} --instances 3"),
    "ascendra": (1500, f"--system ascendra {_DENSE} --instances 3"),
    "sarathi": (5000, f"--system sarathi {_CHAT} --rates 5"),
    **{
        f"{name}-3": (4000, f"--system {name} {_THREE}")
        for name in ("vllm", "distserve", "mooncake", "llumnix", "ascendra", "banaserve")
    },
    "distserve-3-full": (
        4000,
        f"--system distserve {_THREE} --sweep distserve.prefill_instances=1",
    ),
    "llumnix-8": (2000, f"--system llumnix {_CHAT} --rates 40 --instances 8"),
    "llumnix-256": (750, f"--system llumnix {_CHAT} --rates 1280 --instances 256"),
    "vllm-8": (2000, f"--system vllm {_CHAT} --rates 40 --instances 8"),
    "distserve-8": (2000, f"--system distserve {_CHAT} --rates 40 --instances 8"),
    "distserve-128": (750, f"--system distserve {_CHAT} {_HALF.format('distserve')}"),
    "mooncake-128": (750, f"--system mooncake {_CHAT} {_HALF.format('mooncake')}"),
}


def turn_s() -> float:
    """CPU seconds of a turn of the empty loop."""
    begin_s, total = time.process_time(), 0
    for i in range(TURNS):
        total += i * i % 7
    return (time.process_time() - begin_s) / TURNS


def run_s(options: str, requests: int) -> float:
    """CPU seconds of a run in this process."""
    from slo_bench.cli.main import app

    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        words = ["run", "--no-report", "--jobs", "1", "--seeds", "1", "--requests", str(requests)]
        words += ["--out", f"{folder}/run", *shlex.split(options)]
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            begin_s = time.process_time()
            app(words, standalone_mode=False)
            return time.process_time() - begin_s


def measured(case: str, repeats: int) -> str:
    """Turns and microseconds of a request."""
    requests, options = CASES[case]
    run_s(options, FEW)  # imports and tables
    turns_s, few_s, many_s = [], [], []
    for _ in range(repeats):
        turns_s.append(turn_s())
        many_s.append(run_s(options, requests))
        few_s.append(run_s(options, FEW))
    each_s = (min(many_s) - min(few_s)) / (requests - FEW)
    return f"{each_s / min(turns_s):.0f} turns, {1e6 * each_s:.1f} us"


def counted(case: str) -> str:
    """Bytecode instructions of a request while its instances run."""
    from slo_bench.harness.engine.cluster.cluster import Cluster

    requests, options = CASES[case]
    run_s(options, FEW)  # imports and tables
    run, instructions = Cluster.run, 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal instructions
        instructions += event == "opcode"
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    def run_traced(self: Cluster, *, closed: bool) -> None:
        sys.settrace(trace)
        run(self, closed=closed)
        sys.settrace(None)

    with patch.object(Cluster, "run", run_traced):
        run_s(options, requests)
    return f"{instructions / requests:.0f} instructions"


def main() -> None:
    """Print a table, or be the process that is measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--beside", type=Path, help="another source tree")
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--count", action="store_true", help="bytecode instructions")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        (case,) = options.cases
        print(counted(case) if options.count else measured(case, options.repeat))
        return
    trees = [ROOT, *([options.beside] if options.beside else [])]
    flags = ["--repeat", str(options.repeat), *(["--count"] if options.count else [])]
    for case in options.cases:
        results = [
            subprocess.run(
                [sys.executable, __file__, case, "--child", *flags],
                env={**os.environ, "PYTHONPATH": str(tree.resolve() / ".editable")},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout.strip()
            for tree in trees
        ]
        print(f"| {case} | {' | '.join(results)} |", flush=True)


if __name__ == "__main__":
    main()
