"""Cells and other work in several processes: what runs them, and processes of this machine.

Each process receives one piece of work at a time and sends its result back. It ends with the parent
process, even if that is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    CancelledError,
    Future,
    InvalidStateError,
    ThreadPoolExecutor,
    as_completed,
)
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ....workloads.child_process import exit_reason, start_module
from ....workloads.errors import SloBenchError
from ....workloads.extras import import_failure
from ....workloads.whole_file import write_whole
from ...policies.policy_faults import fault_text
from ...results.run_folder import Row
from .cell_specs import CellSpec
from .cells import run_cell

if TYPE_CHECKING:
    from ...load_generator.load_progress import LoadProgress
    from ...load_generator.send_job import Senders

Answer = TypeVar("Answer")
Known = TypeVar("Known")

_BETWEEN_REPORTS_S = 0.1
_STOP_S = 1.0  # that a pool waits for its threads
_MOST_JOBS = 1024


@dataclass(frozen=True)
class CellProgress:
    """A running cell and its number of ended requests; `load`: what a real server's show so far."""

    cell: str
    requests: int
    load: LoadProgress | None = None


@dataclass(frozen=True)
class CellDone:
    """A cell's details are on disk, and this is its row."""

    cell: str
    row: Row


@dataclass(frozen=True)
class Said:
    """What goes on beside the cells: the name of a phase, a note."""

    text: str


Event = CellProgress | CellDone | Said


class Executor(Protocol):
    """Runs the cells of an experiment: in worker processes or on a cluster."""

    def run(
        self,
        specs: Sequence[CellSpec],
        folder: Path,
        *,
        records: str,
        tell: Callable[[Event], None],
    ) -> None:
        """Run cells, started in order; `tell` receives events of progress and of finished cells.

        The details of a cell are in `folder` before its `CellDone` event. An exception, also one of
        `tell`, and Ctrl-C stop the running cells.

        Raises:
            SloBenchError: a cell failed, or a worker died.
        """
        ...

    def senders(self) -> AbstractContextManager[Senders]:
        """Where the load of real servers is sent from."""
        ...


class NotDoneError(SloBenchError):
    """A piece of work was lost with its process or machine; the work itself may be valid."""


class WorkerPool(Protocol):
    """Runs pieces of work in other processes, several at once; methods may be called from any
    thread.
    """

    @property
    def at_once(self) -> int:
        """Approximate number of pieces that run at once."""
        ...

    def begin(self, work: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Run `work(*arguments)` in another process, again if its machine is lost.

        A SloBenchError of the work is raised from the future; NotDoneError if the work could not be
        run.

        Args:
            work: a function of a module of this package.
            arguments: plain values, or frozen dataclasses of this package.
        """
        ...

    def stop(self) -> None:
        """Cancel all work: pending futures and later calls of `begin` raise `CancelledError`."""
        ...


def together(calls: Sequence[Callable[[], Answer]], pool: WorkerPool) -> list[Answer]:
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


def now_and_then(report: Callable[[Known, float], None]) -> Callable[[Known, float], None]:
    """A progress callback that passes on what is known and the clock, at most every 0.1 s."""
    reported_s = -math.inf

    def progress(figures: Known, clock_s: float) -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if now_s - reported_s >= _BETWEEN_REPORTS_S:
            reported_s = now_s
            report(figures, clock_s)

    return progress


_REPORT = "report"


@dataclass(frozen=True)
class LocalExecutor:
    """In `jobs` processes of this machine; a single one is this process."""

    jobs: int
    pool: LocalPool | None = None  # of several runs one after another; else a new one for each

    def run(
        self,
        specs: Sequence[CellSpec],
        folder: Path,
        *,
        records: str,
        tell: Callable[[Event], None],
    ) -> None:
        """Run cells one after another, or in `jobs` worker processes if that is more than one."""
        jobs = min(self.jobs, len(specs))
        if jobs > 1:
            with LocalPool(jobs) if self.pool is None else nullcontext(self.pool) as pool:
                _side_by_side(specs, folder, records, pool, tell)
            return
        for spec in specs:
            heard = partial(_tell_progress, tell, spec.cell)
            tell(CellDone(spec.cell, _row(spec, folder, records, heard)))

    @contextlib.contextmanager
    def senders(self) -> Iterator[Senders]:
        """The only sender: this machine."""
        from ...load_generator.send_job import ThisMachine

        yield ThisMachine()


def _side_by_side(
    specs: Sequence[CellSpec],
    folder: Path,
    records: str,
    pool: LocalPool,
    tell: Callable[[Event], None],
) -> None:
    events: queue.SimpleQueue[CellProgress | tuple[str, Future[Row]]] = queue.SimpleQueue()

    def begin(spec: CellSpec) -> None:
        on_report = partial(_tell_progress, events.put, spec.cell)

        def ended(row: Future[Row]) -> None:
            events.put((spec.cell, row))

        named = f"cell {spec.cell}"
        pool.begin(_row, spec, folder, records, on_report=on_report, ended=ended, called=named)

    for spec in specs:
        begin(spec)
    left = len(specs)
    while left:
        event = events.get()
        if isinstance(event, CellProgress):
            tell(event)
        else:
            left -= 1
            cell, done = event
            tell(CellDone(cell, done.result()))


def _tell_progress(tell: Callable[[CellProgress], None], cell: str, ended: int) -> None:
    tell(CellProgress(cell, ended))


def _row(spec: CellSpec, folder: Path, records: str, on_ended: Callable[[int], None]) -> Row:
    """Simulate a cell; `on_ended` gets the number of ended requests now and then."""

    def report(ended: int, clock_s: float) -> None:
        on_ended(ended)

    return run_cell(spec, folder, records=records, progress=now_and_then(report))


@dataclass(frozen=True)
class _Work:
    """A function of a module and its arguments; `on_report`: the function reports to it."""

    future: Future[Any]
    module: str
    name: str
    arguments: tuple[object, ...]
    on_report: Callable[[Any], None] | None
    called: str  # in messages


def check_jobs(jobs: int | None) -> None:
    """Raise SloBenchError unless so many processes can be asked for; None is no number."""
    if jobs is not None and not 1 <= jobs <= _MOST_JOBS:
        raise SloBenchError(f"jobs must be from 1 to {_MOST_JOBS:,} but is {jobs:,}")


class LocalPool:
    """A `Pool` of up to `jobs` processes, for as long as the block lasts.

    A process is started when no other is idle, and the one that was busy last is used first: work
    that comes one piece after another takes one process, on a machine of any size.
    """

    def __init__(self, jobs: int) -> None:
        """Raises SloBenchError as `check_jobs` does."""
        check_jobs(jobs)
        self.at_once = jobs
        self._todo: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._stopped = False
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(jobs)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    def begin(
        self,
        work: Callable[..., Answer],
        *arguments: object,
        on_report: Callable[[Any], None] | None = None,
        ended: Callable[[Future[Answer]], None] | None = None,
        called: str = "",
    ) -> Future[Answer]:
        """Queue `work(*arguments)` for the next free process.

        With `on_report`, work gets a function as last argument, and what it calls that with is
        passed on to `on_report` in a thread of the pool. `ended`: gets the future when it is done.
        `called`: what messages call the work.
        """
        future: Future[Answer] = Future()
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._pending.add(future)
        # All callbacks before it is queued: Ctrl-C within a method of a future may leave its lock
        # taken, for which a thread of the pool would wait for ever.
        future.add_done_callback(self._pending.discard)
        if ended is not None:
            future.add_done_callback(ended)
        name = work.__name__
        self._todo.put(_Work(future, work.__module__, name, arguments, on_report, called or name))
        return future

    def stop(self) -> None:
        """Kill the processes and cancel all work."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        for future in tuple(self._pending):  # first: a process that is killed is no error then
            future.cancel()
        with self._lock:
            for process in self._processes:
                process.kill()
        for _ in self._threads:
            self._todo.put(None)
        deadline_s = time.monotonic() + _STOP_S
        for thread in self._threads:  # one that gives an answer may wait for such a lock
            thread.join(max(0.0, deadline_s - time.monotonic()))
        for process in self._processes:
            process.close()

    def _serve(self) -> None:
        """Give work to processes, one piece at a time, until the pool is stopped."""
        while (work := self._todo.get()) is not None and not self._stopped:
            future = work.future
            if future.cancelled():
                continue
            answer, problem = None, None
            try:
                answer = self._answer(work)
            except BaseException as error:
                problem = error
            if self._stopped:  # which cancels it
                return
            with contextlib.suppress(InvalidStateError):  # the future was cancelled
                if problem is None:
                    future.set_result(answer)
                else:
                    future.set_exception(problem)

    def _answer(self, work: _Work) -> Any:
        process = self._free()
        try:
            return process.call(work)
        finally:  # before its answer is known: who gets it finds the process idle
            with self._lock:
                self._idle.append(process)

    def _free(self) -> _Process:
        """The process that was busy last, of those that are idle and live; a new one if none is."""
        with self._lock:
            if self._stopped:
                raise CancelledError
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                self._processes.remove(process)
                process.close()
            process = _Process()
            self._processes.add(process)
            return process


class _Process:
    """A child process and the pipe to it."""

    def __init__(self) -> None:
        self._line, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = start_module(__name__, str(number), pass_fds=(number,))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, work: _Work) -> Any:
        """Send one piece of work and wait for its result.

        Raises:
            SloBenchError: what the work raised.
            NotDoneError: the process died.
        """
        try:
            self._line.send((work.module, work.name, work.arguments, work.on_report is not None))
            kind, answer = self._line.recv()
            while kind == _REPORT and work.on_report is not None:
                work.on_report(answer)
                kind, answer = self._line.recv()
        except (EOFError, OSError):
            raise NotDoneError(exit_reason(self._process, work.called)) from None
        if kind is None:
            return answer
        raise (NotDoneError if kind == NotDoneError.__name__ else SloBenchError)(answer)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._line.close()


def _work(line: Connection[Any, Any]) -> None:
    """Run pieces of work in the child process until the pipe is closed."""
    while True:
        module, name, arguments, tells = line.recv()
        more = [lambda message: line.send((_REPORT, message))] if tells else []
        outcome: tuple[str | None, object]
        try:
            outcome = None, getattr(importlib.import_module(module), name)(*arguments, *more)
        except SloBenchError as error:
            outcome = type(error).__name__, str(error)
        except (Exception, SystemExit) as error:
            failure = import_failure(error) if isinstance(error, ImportError) else None
            if (text := fault_text(error) if failure is None else str(failure)) is None:
                raise
            outcome = SloBenchError.__name__, text
        line.send(outcome)


if __name__ == "__main__":
    os.dup2(2, 1)  # prints of a user's policy must not mix with results
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        _work(Connection(int(sys.argv[1])))
