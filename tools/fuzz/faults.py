"""A fault at any allocation, and at any opening, renaming or writing of a file, of a run.

    python tools/fuzz/faults.py --kind memory --moments 200
    python tools/fuzz/faults.py --kind files
    python tools/fuzz/faults.py --kind size --moments 100

`memory`: one allocation of the interpreter fails, drawn between the first and the last that a whole
run makes (_testcapi.set_nomemory). `files`: each opening for writing, renaming, removal and making
of a folder fails once, one after the other, with "no space left" (an audit hook). `size`: no file
grows beyond a drawn number of bytes (RLIMIT_FSIZE), so that a write stops anywhere in it.

Each attempt is a process forked from one that has imported everything. It must end with a code of
the command line and without a traceback; then the run is resumed without a fault, and its rows must
be those of an undisturbed run.
"""

from __future__ import annotations

import _testcapi
import argparse
import contextlib
import errno
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

import slo_bench.cli.commands.run  # noqa: F401 - imported before the fork
from slo_bench.cli.main import main as slo_bench_main
from slo_bench.harness.results.run_folder import read_rows

RUN = "run -s vllm --rates 4,8 --seeds 1 --requests 60 --records csv --no-report --jobs 1"
CODES = {0, 1, 2, 70}
NO_ATTEMPT = 200
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.link", "os.truncate"}
_TIMES = {"wall_s", "cpu_s", "started", "finished"}


def attempt(out: Path, output_path: Path, arm: Callable[[], None], *more: str) -> int:
    """Run in a fork, with the fault set by `arm` just before; its exit code, below 0 a signal."""
    child = os.fork()
    if child == 0:
        code = NO_ATTEMPT
        try:
            report = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(report, 1)
            os.dup2(report, 2)
            sys.argv = ["slo-bench", *RUN.split(), "--out", str(out), *more]
            arm()
            slo_bench_main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        except BaseException:
            disarm()
            traceback.print_exc()
            code = 1
        finally:
            disarm()
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


_fault_at = 0
_seen = RawValue("q", 0)  # of the last attempt


def disarm() -> None:
    """Let everything succeed again."""
    global _fault_at
    _testcapi.remove_mem_hooks()
    _fault_at = 0
    hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if not _fault_at:
        return
    if event == "open":
        flags = arguments[2]
        if not isinstance(flags, int) or not flags & _WRITING or not isinstance(arguments[0], str):
            return
    elif event not in _CHANGES:
        return
    _seen.value += 1
    if _seen.value == _fault_at:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))


def memory_fault(number: int) -> Callable[[], None]:
    """The allocation of this number fails, and no other."""
    return lambda: _testcapi.set_nomemory(number, number + 1)


def file_fault(number: int) -> Callable[[], None]:
    """The change to the file system of this number fails, and no other."""

    def arm() -> None:
        global _fault_at
        _fault_at = number
        _seen.value = 0

    return arm


def size_fault(limit: int) -> Callable[[], None]:
    """No file may be longer than `limit` bytes."""

    def arm() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))

    return arm


def rows_of(folder: Path) -> list[dict[str, object]]:
    """The rows of a run, without their times."""
    rows = read_rows(folder / "cells.csv")
    return [{name: cell for name, cell in row.items() if name not in _TIMES} for row in rows]


def judged(
    number: int, arm: Callable[[], None], whole: list[dict[str, object]], place: Path
) -> tuple[int, str | None]:
    """Exit code of an attempt with a fault, and what must not be, if it is."""
    out, output_path = place / "out", place / "said"
    shutil.rmtree(out, ignore_errors=True)
    code = attempt(out, output_path, arm)
    text = output_path.read_text("utf-8", "replace")
    if code not in CODES:
        return code, f"fault {number}: exit code {code}: {text[-400:]}"
    if "Traceback" in text and code != 70:
        return code, f"fault {number}: a traceback: {text[-600:]}"
    resume = () if not (out / "environment.json").is_file() else ("--resume",)
    if not resume:
        shutil.rmtree(out, ignore_errors=True)
    again = attempt(out, output_path, lambda: None, *resume)
    if again != 0:
        return code, f"fault {number}: resumed: {again}: {output_path.read_text('utf-8')[-400:]}"
    if rows_of(out) != whole:
        return code, f"fault {number}: the resumed run has other rows"
    return code, None


def last_of(kind: str, place: Path) -> int:
    """How many changes, bytes of the longest file or, about, allocations a whole run has."""
    if kind == "size":
        return max(path.stat().st_size for path in place.rglob("*") if path.is_file())
    if kind == "files":
        return _changes(place)
    low, high = 1, 2
    while _reached(place, memory_fault(high)):
        low, high = high, high * 2
    while high - low > low // 20:
        middle = (low + high) // 2
        low, high = (middle, high) if _reached(place, memory_fault(middle)) else (low, middle)
    return high


def _changes(place: Path) -> int:
    """Changes to the file system of a run without a fault."""
    out = place.parent / "probe"
    shutil.rmtree(out, ignore_errors=True)
    code = attempt(out, place.parent / "said", file_fault(sys.maxsize))
    if code:
        raise RuntimeError(f"a run without a fault ended with {code}")
    return _seen.value


def _reached(place: Path, arm: Callable[[], None]) -> bool:
    """Whether a fault so late still changes how the run ends or what it says."""
    out = place.parent / "probe"
    shutil.rmtree(out, ignore_errors=True)
    return attempt(out, place.parent / "said", arm) != 0


def campaign(kind: str, moments: int, seed: int) -> list[str]:
    """Try the faults of a kind; print the counts; what must not be."""
    fault = {"memory": memory_fault, "files": file_fault, "size": size_fault}[kind]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        assert attempt(place / "whole", place / "said", lambda: None) == 0
        whole = rows_of(place / "whole")
        last = last_of(kind, place / "whole")
        rng = random.Random(seed)
        numbers = list(range(1, last + 1))
        if moments < len(numbers):
            numbers = sorted(rng.sample(numbers, moments))
        codes: Counter[int] = Counter()
        problems = []
        for number in numbers:
            code, problem = judged(number, fault(number), whole, place)
            codes[code] += 1
            if problem is not None:
                problems.append(problem)
                print(problem, flush=True)
    counts = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
    print(
        f"{kind}: {len(numbers)} faults of about {last:,}; exit codes {counts}; problems: "
        f"{len(problems)}"
    )
    return problems


def main() -> int:
    """Run the campaign that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=("memory", "files", "size"), default="files")
    parser.add_argument("--moments", type=int, default=100, help="faults to try, drawn evenly")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.addaudithook(_audit)
    with contextlib.redirect_stderr(io.StringIO()):
        warm = tempfile.mkdtemp()
        attempt(Path(warm) / "out", Path(warm) / "said", lambda: None)
        shutil.rmtree(warm)
    return 1 if campaign(options.kind, options.moments, options.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
