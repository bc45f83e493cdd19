"""Ctrl-C, SIGTERM and kill -9 at random moments of commands: the exit code of the signal, no
traceback, and no process left behind.

    python tools/fuzz/interrupted.py --moments 20
    python tools/fuzz/interrupted.py --only selftest --moments 40
    python tools/fuzz/interrupted.py --only serve --signals KILL

Each command runs in a session of its own, like one that is typed into a terminal: all of its
processes get Ctrl-C at once, and the first one SIGTERM or kill -9, at a moment drawn between the
installation of its handlers and the time that it takes. A command that is struck while Python takes
itself down, with all said and done, ends with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "predictors"))
from tiny_models import answered, make_model, write_jsonl

SLO_BENCH = (sys.executable, "-m", "slo_bench.cli.entry")
_LOAD = "--rates 2:20:2 --seeds 3 --requests 2000"
PREPARED = {
    "run": f"run -s vllm,sarathi -w azure-conv {_LOAD} --records csv --no-report --out run",
    "again": f"run -s vllm,sarathi -w azure-conv {_LOAD} --records csv --no-report --out again",
    "made.csv": "workload make sharegpt --rate 8 --requests 100000 --out made.csv",
    "lengths": "predict-train answers.jsonl --base base --lora-r 2 --epochs 1 --out lengths",
}
COMMANDS = {
    "run": f"run -s vllm,sarathi -w azure-conv {_LOAD} --out OUT --jobs 1",
    "run with workers": f"run -s vllm,sarathi -w azure-conv {_LOAD} --out OUT --jobs 2",
    "report": "report run --out OUT.html",
    "compare": "compare run again --html OUT.html",
    "gate": "gate run again",
    "capacity": "capacity -s vllm -w azure-conv --requests 200 --seeds 1 --tolerance 0.5 --out OUT",
    "tune": "tune sarathi -w azure-conv --trials 6 --out OUT",
    "sensitivity": "sensitivity -w azure-conv --requests 200 --seeds 1",
    "explain": "explain run 7 --cell vllm_rate-20_seed-0",
    "plan": "plan -w azure-conv --rate 8 --gpu a100-80g --max-gpus 2 --plans 1 --out OUT",
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


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
ENDED = -1
_MARK = "SLO_BENCH_FUZZ_MARK"
_LOOKS = 20
_AT_ONCE_S = 1.0  # or it ended by itself within this time
_LATE_SHARE = 0.8  # of its time; from there on a command may have done all that it does


@dataclass
class Interrupted:
    """What came of it: how often each exit code, and what must not be."""

    codes: Counter[int]
    problems: list[str]


def interrupt(
    name: str,
    words: list[str],
    folder: Path,
    moments: int,
    rng: random.Random,
    signals: list[signal.Signals],
) -> Interrupted:
    """So many times, each with an output of its own."""
    outcome = Interrupted(Counter(), [])
    whole_s = ENDLESS.get(name) or _once(words, folder, None, signals[0])[2]
    for number in range(moments):
        after_s = rng.uniform(0.0, whole_s)
        struck = signals[number % len(signals)]
        code, stderr, took_s, left = _once(words, folder, after_s, struck)
        if took_s < after_s:
            outcome.codes[ENDED] += 1  # before it was struck
            continue
        outcome.codes[code] += 1
        where = f"{name}, {struck.name} after {after_s:.2f} of {whole_s:.2f} s ({number})"
        done = after_s > whole_s * _LATE_SHARE or took_s - after_s < _AT_ONCE_S
        late = code == 0 and done and not stderr.strip().startswith("error")
        if code != CODES[struck] and not late:
            late_s = took_s - after_s
            outcome.problems.append(
                f"{where}: exit code {code}, {late_s:.2f} s later: {stderr[-300:]}"
            )
        if "Traceback" in stderr or "Exception ignored" in stderr:
            outcome.problems.append(f"{where}: {stderr[-600:]}")
        if left:
            outcome.problems.append(f"{where}: still there: {left}")
    return outcome


def _once(
    words: list[str], folder: Path, after_s: float | None, struck: signal.Signals
) -> tuple[int, str, float, list[int]]:
    """Exit code, what was said on standard error, seconds, and processes that are left."""
    out = folder / "out"
    mark = uuid.uuid4().hex
    typed = [word.replace("OUT", str(out)) for word in words]
    process = subprocess.Popen(
        [*SLO_BENCH, *typed],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed,
        env={**os.environ, _MARK: mark},
    )
    errors = ""
    try:
        while not _handled(process.pid) and process.poll() is None:
            time.sleep(0.005)
        begin_s = time.monotonic()
        try:
            _, errors = process.communicate(timeout=after_s)
        except subprocess.TimeoutExpired:
            if struck is signal.SIGINT:
                os.killpg(process.pid, struck)
            else:
                process.send_signal(struck)
            _, errors = process.communicate(timeout=120)
        took_s = time.monotonic() - begin_s
        left = _still_there(mark)
        for _ in range(_LOOKS):  # children notice the end of their parent
            if not left:
                break
            time.sleep(0.3)
            left = _still_there(mark)
    finally:
        for pid in _still_there(mark):
            os.kill(pid, signal.SIGKILL)
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return process.returncode, errors, took_s, left


def _handled(pid: int) -> bool:
    """Whether the process has handlers of its own: Python alone has none of SIGTERM."""
    with contextlib.suppress(OSError):
        match = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return match is not None and bool(int(match[1], 16) >> signal.SIGTERM - 1 & 1)
    return False


def _heed() -> None:
    """What a shell starts in the background is told to ignore Ctrl-C, and hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _still_there(mark: str) -> list[int]:
    """Processes that have inherited the mark in their environment."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}\0".encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="names of commands, with commas between")
    parser.add_argument("--moments", type=int, default=20, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signals", default="INT,TERM", help="in turn: INT, TERM, KILL")
    options = parser.parse_args()
    signals = [signal.Signals[f"SIG{word}"] for word in options.signals.split(",")]
    problems = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "base")
        write_jsonl(folder / "answers.jsonl", answered(400))
        chosen = options.only.split(",") if options.only else list(COMMANDS)
        used = {word for name in chosen for word in COMMANDS[name].split()[1:]}
        for name, words in PREPARED.items():
            if name in used:
                subprocess.run(
                    [*SLO_BENCH, *words.split()], cwd=folder, check=True, capture_output=True
                )
        for name, words in COMMANDS.items():
            if name in chosen:
                rng = random.Random(f"{options.seed} {name}")
                outcome = interrupt(name, words.split(), folder, options.moments, rng, signals)
                codes = ", ".join(f"{code}: {n}" for code, n in sorted(outcome.codes.items()))
                print(f"{name}: exit codes {codes}; {len(outcome.problems)} problems", flush=True)
                for problem in outcome.problems:
                    print(f"    {problem}", flush=True)
                problems += len(outcome.problems)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
