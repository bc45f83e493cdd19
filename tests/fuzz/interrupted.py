"""Ctrl-C at random moments of commands: exit code 130, no traceback, and no process left behind.

    python tests/fuzz/interrupted.py --moments 20
    python tests/fuzz/interrupted.py --only selftest --moments 40

Each command runs in a session of its own, like one that is typed into a terminal: all of its
processes get the signal at once, at a moment drawn between its start and the time that it takes.
A command that is struck while Python takes itself down, with all said and done, ends with 0.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "predictors"))
from tiny_models import answered, make_model, write_jsonl

SLO_BENCH = (sys.executable, "-m", "slo_bench.cli.main")
_LOAD = "--rates 2:20:2 --seeds 3 --requests 2000"
PREPARED = (
    f"run -s vllm,sarathi -w azure-conv {_LOAD} --records csv --no-report --out run",
    f"run -s vllm,sarathi -w azure-conv {_LOAD} --records csv --no-report --out again",
    "workload make sharegpt --rate 8 --requests 100000 --out made.csv",
    "predict-train answers.jsonl --base base --lora-r 2 --epochs 1 --out lengths",
)
COMMANDS = {
    "run": f"run -s vllm,sarathi -w azure-conv {_LOAD} --out OUT --jobs 1",
    "run with workers": f"run -s vllm,sarathi -w azure-conv {_LOAD} --out OUT --jobs 2",
    "report": "report run --out OUT.html",
    "compare": "compare run again --html OUT.html",
    "gate": "gate run again",
    "capacity": "capacity -s vllm -w azure-conv --out OUT",
    "tune": "tune sarathi -w azure-conv --trials 6 --out OUT",
    "sensitivity": "sensitivity -w azure-conv",
    "explain": "explain run 7 --cell vllm_rate-20_seed-0",
    "plan": "plan -w azure-conv --rate 8 --out OUT",
    "selftest": "selftest --seconds 1 --rates 20 --no-search",
    "workload make": "workload make sharegpt --rate 8 --requests 100000 --out OUT.csv",
    "workload show": "workload show made.csv",
    "predict-train": "predict-train answers.jsonl --base base --lora-r 2 --epochs 3 --out OUT",
    "predict-eval": "predict-eval lengths answers.jsonl --base base",
    "derive-slo": "derive-slo --models fleet(llama-3.1-8b*2,qwen3-8b*2) --rate 4",
    "tune placement": "tune placement --model llama-3.1-70b --gpu l40s --devices 8",
    "serve": "serve vllm --backend torch --log OUT.log",
}
ENDLESS = {"serve": 8.0}  # until it is stopped; seconds in which it is, from its start into serving


ENDED = -1
_STARTED_S = 0.3  # before that Python itself is still being imported


@dataclass
class Interrupted:
    """What came of it: how often each exit code, and what must not be."""

    codes: Counter[int]
    problems: list[str]


def interrupt(
    name: str, words: list[str], folder: Path, moments: int, rng: random.Random
) -> Interrupted:
    """So many times, each with an output of its own."""
    found = Interrupted(Counter(), [])
    whole_s = ENDLESS.get(name) or _once(words, folder, None)[2]
    for number in range(moments):
        after_s = rng.uniform(_STARTED_S, whole_s)
        code, said, took_s, left = _once(words, folder, after_s)
        if took_s < after_s:
            found.codes[ENDED] += 1  # before it was struck
            continue
        found.codes[code] += 1
        where = f"{name}, after {after_s:.2f} of {whole_s:.2f} s ({number})"
        if code != 130:
            late_s = took_s - after_s
            found.problems.append(f"{where}: exit code {code}, {late_s:.2f} s later: {said[-300:]}")
        if "Traceback" in said or "Exception ignored" in said:
            found.problems.append(f"{where}: {said[-600:]}")
        if left:
            found.problems.append(f"{where}: still there: {left}")
    return found


def _once(
    words: list[str], folder: Path, after_s: float | None
) -> tuple[int, str, float, list[str]]:
    """Exit code, what was said on standard error, seconds, and what is left of its session."""
    out = folder / "out"
    typed = [word.replace("OUT", str(out)) for word in words]
    begin_s = time.monotonic()
    process = subprocess.Popen(
        [*SLO_BENCH, *typed],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed,
    )
    said = ""
    try:
        try:
            _, said = process.communicate(timeout=after_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=120)
        took_s = time.monotonic() - begin_s
        time.sleep(0.3)
        left = _of_session(process.pid)
    finally:
        for pid in _of_session(process.pid):
            os.kill(int(pid.split()[0]), signal.SIGKILL)
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return process.returncode, said, took_s, left


def _heed() -> None:
    """What a shell starts in the background is told to ignore Ctrl-C, and hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _of_session(session: int) -> list[str]:
    """What still runs there: number and name."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" (", 1)
            name, fields = rest.rsplit(") ", 1)
        except (OSError, ValueError):
            continue
        state, *_, told = fields.split()[:4]
        if int(told) == session and state != "Z":
            found.append(f"{pid} {name}")
    return found


def main() -> int:
    """See the module."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("--only", help="commands whose name contains this")
    asked.add_argument("--moments", type=int, default=20, help="of each command")
    asked.add_argument("--seed", type=int, default=0)
    options = asked.parse_args()
    problems = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "base")
        write_jsonl(folder / "answers.jsonl", answered(400))
        for words in PREPARED:
            subprocess.run(
                [*SLO_BENCH, *words.split()], cwd=folder, check=True, capture_output=True
            )
        for name, words in COMMANDS.items():
            if options.only is None or options.only in name:
                rng = random.Random(f"{options.seed} {name}")
                found = interrupt(name, words.split(), folder, options.moments, rng)
                codes = ", ".join(f"{code}: {n}" for code, n in sorted(found.codes.items()))
                print(f"{name}: exit codes {codes}; {len(found.problems)} problems", flush=True)
                for problem in found.problems:
                    print(f"    {problem}", flush=True)
                problems += len(found.problems)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
