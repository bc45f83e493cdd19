"""Cells side by side: worker processes that are told cells and answer with rows, line by line.

Workers are started as programs of their own, not by `multiprocessing`, so that a script or a
notebook that calls `Experiment.run` needs no `if __name__ == "__main__"` and is not run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, TypeVar

from ....workloads.errors import SloBenchError
from ...load_generator.send_job import Senders, ThisMachine
from ...results.run_folder import Row, write_whole
from .cells import CellSpec, run_cell

Answer = TypeVar("Answer")

_BETWEEN_REPORTS_S = 0.1


@dataclass(frozen=True)
class CellProgress:
    """So many requests of a running cell have ended."""

    cell: str
    requests: int


@dataclass(frozen=True)
class CellDone:
    """A cell's details are on disk, and this is its row."""

    cell: str
    row: Row


Event = CellProgress | CellDone


class Executor(Protocol):
    """Where cells run."""

    def run(
        self,
        specs: Sequence[CellSpec],
        folder: Path,
        *,
        records: str,
        tell: Callable[[Event], None],
    ) -> None:
        """Run cells in order but for who ends first; `tell` hears how it goes.

        Details are in `folder` before a cell is said to be done. An exception, from `tell` too,
        and Ctrl-C stop what is running.

        Raises:
            SloBenchError: of the first cell that fails, or of a worker that died.
        """
        ...

    def senders(self) -> AbstractContextManager[Senders]:
        """Where the load of real servers is sent from."""
        ...


class NotDoneError(SloBenchError):
    """A piece of work could not be done elsewhere; that says nothing about the work itself."""


class Pool(Protocol):
    """Does pieces of work elsewhere, several at once; may be asked from any thread."""

    @property
    def at_once(self) -> int:
        """About so many."""
        ...

    def begin(self, work: Callable[..., Answer], *given: object) -> Future[Answer]:
        """Have `work(*given)` done, again if the machine that does it is lost.

        What it raises as a SloBenchError is raised here as one; NotDoneError if nobody could do it.

        Args:
            work: a function of a module of this package.
            given: plain values, or frozen dataclasses of this package.
        """
        ...

    def stop(self) -> None:
        """Whoever waits is told `CancelledError`, and so is whoever still asks."""
        ...


def together(calls: Sequence[Callable[[], Answer]], pool: Pool) -> list[Answer]:
    """What all calls answer, each of which has a thread of its own and `pool` work for it.

    The first exception, and Ctrl-C, stop the pool and with it all the others.
    """
    with ThreadPoolExecutor(max(1, len(calls))) as threads:
        try:
            begun = [threads.submit(call) for call in calls]
            for ended in as_completed(begun):
                ended.result()
        except BaseException:
            pool.stop()
            raise
        return [ended.result() for ended in begun]


def packed(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by their paths within it, to be sent to another machine."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """The inverse of `packed`; every file is written whole or not at all.

    Raises:
        SloBenchError: a path leads out of the folder.
    """
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise SloBenchError(f"another machine sent a file {name!r}, which is in no run folder")
    for name, content in files.items():
        write_whole(folder / name, [content])


@dataclass(frozen=True)
class SideBySide:
    """In `jobs` processes of this machine; a single one is this process."""

    jobs: int

    def run(
        self,
        specs: Sequence[CellSpec],
        folder: Path,
        *,
        records: str,
        tell: Callable[[Event], None],
    ) -> None:
        """See `Executor`."""
        jobs = min(self.jobs, len(specs))
        if jobs > 1:
            _side_by_side(specs, folder, records, jobs, tell)
            return
        for spec in specs:
            progress = _now_and_then(partial(_tell_progress, tell, spec.cell))
            tell(CellDone(spec.cell, run_cell(spec, folder, records=records, progress=progress)))

    @contextmanager
    def senders(self) -> Iterator[Senders]:
        """See `Executor`."""
        yield ThisMachine()


def _tell_progress(tell: Callable[[Event], None], cell: str, ended: int) -> None:
    tell(CellProgress(cell, ended))


def _now_and_then(report: Callable[[int], None]) -> Callable[[int, float], None]:
    reported_s = -math.inf

    def progress(ended: int, clock_s: float) -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if now_s - reported_s >= _BETWEEN_REPORTS_S:
            reported_s = now_s
            report(ended)

    return progress


def started(module: str, *words: str, **options: Any) -> subprocess.Popen[Any]:
    """A worker process: `module` as a program, with `words` after its name."""
    # A group of its own: Ctrl-C reaches only the parent, which then stops the workers.
    own_group: dict[str, Any] = {} if sys.platform == "win32" else {"process_group": 0}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words],
        env={
            **os.environ,
            # What a policy of the user's imports is found as it is here.
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        **own_group,
        **options,
    )


def why_it_ended(process: subprocess.Popen[Any], what: str) -> str:
    """Of a worker process that ended by itself while it worked at something."""
    code = process.wait()
    if code < 0:
        why = f"was killed (signal {-code}); if memory ran out, try fewer jobs"
    else:
        why = f"failed with code {code}; its error stands above"
    return f"the process that ran {what} {why}"


class _Worker:
    """A worker process and the thread that talks to it."""

    def __init__(
        self, todo: queue.SimpleQueue[CellSpec | None], events: queue.SimpleQueue[Event | Exception]
    ) -> None:
        self._todo = todo
        self._events = events
        self._process = started(
            __name__,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._thread = threading.Thread(target=self._converse, daemon=True)

    def start(self, folder: Path, records: str) -> None:
        self._tell({"folder": str(folder), "records": records})
        self._thread.start()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of what nobody read any more
                    pipe.close()

    def _tell(self, message: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed, which `_listen` finds
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _converse(self) -> None:
        try:
            while (spec := self._todo.get()) is not None:
                self._tell(dataclasses.asdict(spec))
                self._listen(spec.cell)
        except (SloBenchError, OSError, ValueError) as error:
            self._events.put(error)

    def _listen(self, cell: str) -> None:
        """Pass on what the worker says until the cell is done."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                break  # it was killed while it wrote
            answer = json.loads(line)
            if "error" in answer:
                raise SloBenchError(answer["error"])
            if "row" in answer:
                self._events.put(CellDone(cell, answer["row"]))
                return
            self._events.put(CellProgress(cell, answer["requests"]))
        raise SloBenchError(why_it_ended(self._process, f"cell {cell}"))


def _side_by_side(
    specs: Sequence[CellSpec],
    folder: Path,
    records: str,
    jobs: int,
    tell: Callable[[Event], None],
) -> None:
    todo: queue.SimpleQueue[CellSpec | None] = queue.SimpleQueue()
    for spec in specs:
        todo.put(spec)
    for _ in range(jobs):
        todo.put(None)
    events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
    workers: list[_Worker] = []
    try:
        for _ in range(jobs):
            workers.append(_Worker(todo, events))
            workers[-1].start(folder, records)
        left = len(specs)
        while left:
            event = events.get()
            if isinstance(event, Exception):
                raise event
            left -= isinstance(event, CellDone)
            tell(event)
    finally:
        for _ in workers:
            todo.put(None)
        for worker in workers:
            worker.stop()


def _work(requests: IO[str], answers: IO[str]) -> None:
    """The worker's side."""

    def answer(message: object) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    first = requests.readline()
    if not first:
        return  # the parent was killed before it had said anything
    order = json.loads(first)
    folder, records = Path(order["folder"]), order["records"]
    progress = _now_and_then(lambda ended: answer({"requests": ended}))
    for line in requests:
        spec = CellSpec.from_plain(json.loads(line))
        try:
            answer({"row": run_cell(spec, folder, records=records, progress=progress)})
        except SloBenchError as error:
            answer({"error": str(error)})


if __name__ == "__main__":
    # What a policy of the user's prints must not end up among the answers.
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    own_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone, and nobody listens
        _work(sys.stdin, own_answers)
