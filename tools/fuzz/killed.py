"""Kill -9 at random moments of sweeps, capacity searches and tuning, resume, and hold against a run
that nobody disturbed.

    python tools/fuzz/killed.py --kind sweep --moments 100
    python tools/fuzz/killed.py --kind dying-workers --moments 100
    python tools/fuzz/killed.py --kind capacity --moments 100
    python tools/fuzz/killed.py --kind tune --moments 100

Each run is killed again and again, at moments drawn between its start and the time that a whole run
takes, and resumed until one attempt reaches the end; with `dying-workers` it is one of its two
worker processes that is killed, which the run must tell and end with. Then every file but
environment.json and the times of day must be, byte for byte, that of the undisturbed run (a study's
journal: every trial); what was finished when it was killed must not have been run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from slo_bench import Experiment, SloBenchError
from slo_bench.harness.results.run_folder import CAPACITY_FILE, read_rows
from slo_bench.tuner.capacity.capacity_options import CapacityOptions
from slo_bench.tuner.capacity.folder import search_capacity
from slo_bench.tuner.search import outcome as tuned
from slo_bench.tuner.search.outcome import ASKED_FILE
from slo_bench.tuner.search.settings import TuneSettings
from slo_bench.tuner.search.storage import JOURNAL, open_storage, quiet
from slo_bench.tuner.search.study_results import OWNER
from slo_bench.tuner.search.tuning_run import tune

Attempt = Callable[[Path, bool], None]  # folder, resume
Hit = Callable[[int], int | None]
REFUSED, HUNG = 3, 4


def sweep(folder: Path, resume: bool) -> None:
    """Twelve cells with records, one after the other."""
    Experiment(systems=["vllm", "orca"], rates=[2, 4, 8], seeds=2, requests=150, records="csv").run(
        folder, jobs=1, resume=resume
    )


def sweep_with_workers(folder: Path, resume: bool) -> None:
    """The same in two worker processes, which outlive whoever is killed for a moment."""
    Experiment(systems=["vllm", "orca"], rates=[2, 4, 8], seeds=2, requests=150, records="csv").run(
        folder, jobs=2, resume=resume
    )


def capacity(folder: Path, resume: bool) -> None:
    """A search of some twenty runs."""
    experiment = Experiment(systems="vllm", requests=200, seeds=2, output_tokens="20")
    options = CapacityOptions(tolerance=0.3, targets=(0.9,), max_requests=6000)
    search_capacity(experiment, folder, options=options, resume=resume)


def tuning(folder: Path, resume: bool) -> None:
    """Five configurations, races among them, and the proof on fresh seeds."""
    experiment = Experiment(systems="sarathi", requests=200, seeds=2, output_tokens="50")
    settings = TuneSettings(
        search={"chunk_tokens": "128..4096", "max_num_seqs": "2,8,256"}, trials=5, tolerance=0.3
    )
    tune(experiment, settings, folder, study_name="study", resume=resume)


KINDS: dict[str, Attempt] = {
    "sweep": sweep,
    "workers": sweep_with_workers,
    "dying-workers": sweep_with_workers,
    "capacity": capacity,
    "tune": tuning,
}
SAYS_WHAT_IT_IS = ("experiment.toml", ASKED_FILE)  # and can be gone on with


@dataclass
class Outcome:
    """What was done; `problems` is empty if all held."""

    kills: int = 0
    runs: int = 0
    while_running: int = 0  # kills that found cells finished and others missing
    problems: list[str] = field(default_factory=list)


def content(folder: Path) -> dict[str, bytes]:
    """All files, without what tells the time of day."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in ("environment.json", JOURNAL):
            files[name] = _timeless(path)
    if (folder / JOURNAL).is_file():
        files |= {f"trial {number}": trial.encode() for number, trial in trials(folder).items()}
    return files


def trials(folder: Path) -> dict[int, str]:
    """All that a study says of each trial, without who had it and when."""
    with quiet():
        study = optuna.load_study(study_name="study", storage=open_storage(None, folder))
    return {
        trial.number: repr(
            (
                *(trial.state.name, trial.params, trial.values, trial.intermediate_values),
                sorted((k, v) for k, v in trial.user_attrs.items() if k != "wall_s"),
                sorted((k, v) for k, v in trial.system_attrs.items() if not k.endswith(OWNER)),
            )
        )
        for trial in study.get_trials(deepcopy=False)
    }


def _timeless(path: Path) -> bytes:
    text = path.read_bytes()
    if path.suffix == ".jsonl":
        lines = [strip(json.loads(line)) for line in text.splitlines()]
        return "\n".join(map(json.dumps, lines)).encode()
    if path.name not in (CAPACITY_FILE, tuned.FILE):
        return text
    return json.dumps(strip(json.loads(text.replace(bytes(path.parent), b".")))).encode()


def strip(value: object) -> object:
    """Without what it took, and the checksum that hangs on it."""
    if isinstance(value, dict):
        return {k: strip(v) for k, v in value.items() if k not in ("wall_s", "crc32")}
    return [strip(entry) for entry in value] if isinstance(value, list) else value


def finished(folder: Path) -> dict[str, int]:
    """The cells or trials that count as finished, with the time their records were written."""
    if (folder / JOURNAL).is_file():
        return finished_trials(folder)
    table = folder / "cells.csv"
    cells = [str(row["cell"]) for row in read_rows(table)] if table.is_file() else []
    files = {cell: folder / "requests" / f"{cell}.csv.gz" for cell in cells}
    return {cell: path.stat().st_mtime_ns if path.is_file() else 0 for cell, path in files.items()}


def finished_trials(folder: Path) -> dict[str, int]:
    """Read as anybody would who does not know that half a line may stand there."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL))
    with quiet():
        storage = optuna.storages.JournalStorage(backend)
        if not storage.get_all_studies():
            return {}
        study = optuna.load_study(study_name="study", storage=storage)
    return {
        f"trial {trial.number}": int(trial.datetime_complete.timestamp() * 1e6)
        for trial in study.get_trials(deepcopy=False)
        if trial.datetime_complete is not None
    }


def _attempt(attempt: Attempt, folder: Path, resume: bool) -> int:
    """A process of its own, by fork, so that nothing is imported again."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            attempt(folder, resume)
            code = 0
        except SloBenchError as error:
            print(error, file=sys.stderr)
            code = REFUSED
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(code)
    return child


def _ended(child: int, after_s: float, hit: Hit) -> int | None:
    """The exit code, if it ends within that time; else it is hit, and None if that ended it."""
    until_s = time.monotonic() + after_s
    while time.monotonic() < until_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return hit(child)


def itself(child: int) -> None:
    """Kill -9 of the process."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def one_of_its_workers(child: int) -> int | None:
    """Kill -9 of a process that it started: it must say so and end, and not wait for ever."""
    lists = Path(f"/proc/{child}/task").glob("*/children")
    workers = [pid for each in lists for pid in each.read_text().split()]
    if not workers:
        return itself(child)
    os.kill(int(workers[-1]), signal.SIGKILL)
    until_s = time.monotonic() + 300
    while time.monotonic() < until_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return None if code == REFUSED else code
        time.sleep(0.01)
    itself(child)
    return HUNG


HITS: dict[str, Hit] = {"dying-workers": one_of_its_workers}


def disturb(
    kind: str, moments: int, folder: Path, seed: int = 0, within_s: float = math.inf
) -> Outcome:
    """Kill at so many moments in all, over as many runs as that takes."""
    rng, outcome = random.Random(seed), Outcome()
    begin_s = time.monotonic()
    code = _ended(_attempt(KINDS[kind], folder / "whole", False), 600, itself)
    whole_s = min(time.monotonic() - begin_s, within_s)
    if code != 0:
        outcome.problems.append("the undisturbed run failed")
        return outcome
    expected = content(folder / "whole")
    while outcome.kills < moments and not outcome.problems:
        outcome.runs += 1
        _one_run(folder / f"run-{outcome.runs}", kind, moments, whole_s, rng, outcome)
        if not outcome.problems:
            outcome.problems += differing(expected, content(folder / f"run-{outcome.runs}"))
    return outcome


def _one_run(
    run: Path, kind: str, moments: int, whole_s: float, rng: random.Random, outcome: Outcome
) -> None:
    kept: dict[str, int] = {}
    for number in range(1000):
        resume = any((run / name).is_file() for name in SAYS_WHAT_IT_IS)
        patience_s = rng.uniform(0, whole_s) if outcome.kills < moments and number < 20 else 600
        code = _ended(_attempt(KINDS[kind], run, resume), patience_s, HITS.get(kind, itself))
        now = finished(run)
        again = [name for name, written in kept.items() if now.get(name) != written]
        if again:
            outcome.problems.append(f"{run.name}: {again[0]} was finished and was run again")
        kept = now
        if code == 0:
            return
        if code is not None:
            outcome.problems.append(f"{run.name}: attempt {number} failed with code {code}")
            return
        outcome.kills += 1
        outcome.while_running += bool(now)


def differing(expected: dict[str, bytes], actual: dict[str, bytes]) -> list[str]:
    """Files that are not as they should be."""
    names = [
        name for name in sorted({*expected, *actual}) if expected.get(name) != actual.get(name)
    ]
    return [f"{name} differs from the undisturbed run's" for name in names]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=sorted(KINDS), default="sweep")
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--within", type=float, default=math.inf, help="s; on a busy machine: sooner"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = disturb(options.kind, options.moments, Path(folder), options.seed, options.within)
    print(
        f"{options.kind}: {outcome.kills} kills in {outcome.runs} runs, {outcome.while_running} of "
        f"them with cells or trials finished and others missing; {len(outcome.problems)} problems"
    )
    for problem in outcome.problems:
        print(f"    {problem}")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
