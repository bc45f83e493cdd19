"""Cells side by side: worker processes receive cells and answer with rows."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ....workloads.child_process import ChildProcess, Parent, exit_reason
from ....workloads.errors import SloBenchError
from ....workloads.whole_file import write_whole
from ...load_generator.load_progress import LoadProgress
from ...results.run_folder import Row
from .cells import run_cell
from .specs import CellSpec

if TYPE_CHECKING:
    from ...load_generator.send_job import Senders

Answer = TypeVar("Answer")
Known = TypeVar("Known")

_BETWEEN_REPORTS_S = 0.1


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


Event = CellProgress | CellDone


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

    def begin(self, work: Callable[..., Answer], *given: object) -> Future[Answer]:
        """Run `work(*given)` in another process, again if its machine is lost.

        A SloBenchError of the work is raised from the future; NotDoneError if the work could not be
        run.

        Args:
            work: a function of a module of this package.
            given: plain values, or frozen dataclasses of this package.
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


@dataclass(frozen=True)
class LocalExecutor:
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
        """Run cells one after another, or in `jobs` worker processes if that is more than one."""
        jobs = min(self.jobs, len(specs))
        if jobs > 1:
            _side_by_side(specs, folder, records, jobs, tell)
            return
        for spec in specs:
            progress = now_and_then(partial(_tell_progress, tell, spec.cell))
            tell(CellDone(spec.cell, run_cell(spec, folder, records=records, progress=progress)))

    @contextmanager
    def senders(self) -> Iterator[Senders]:
        """The only sender: this machine."""
        from ...load_generator.send_job import ThisMachine

        yield ThisMachine()


def _tell_progress(tell: Callable[[Event], None], cell: str, ended: int, clock_s: float) -> None:
    tell(CellProgress(cell, ended))


def now_and_then(report: Callable[[Known, float], None]) -> Callable[[Known, float], None]:
    """A progress callback that passes on what is known and the clock, at most every 0.1 s."""
    reported_s = -math.inf

    def progress(known: Known, clock_s: float) -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if now_s - reported_s >= _BETWEEN_REPORTS_S:
            reported_s = now_s
            report(known, clock_s)

    return progress


def _side_by_side(
    specs: Sequence[CellSpec],
    folder: Path,
    records: str,
    jobs: int,
    tell: Callable[[Event], None],
) -> None:
    todo = iter(specs)
    events: queue.SimpleQueue[tuple[ChildProcess, str, Any]] = queue.SimpleQueue()

    def begin(child: ChildProcess) -> None:
        cell = ""  # of the child; its listener alone reads and writes it from here on

        def give() -> None:
            nonlocal cell
            spec = next(todo, None)
            cell = "" if spec is None else spec.cell
            if spec is not None:
                child.send(dataclasses.asdict(spec))

        def heard(message: Any) -> None:
            events.put((child, cell, message))
            if message is not None and "row" in message:
                give()

        child.send({"folder": str(folder), "records": records})
        give()
        child.listen(heard)

    with contextlib.ExitStack() as stack:
        for child in [stack.enter_context(ChildProcess(__name__)) for _ in range(jobs)]:
            begin(child)
        left = len(specs)
        while left:
            child, cell, message = events.get()
            if message is None:
                if cell:
                    raise SloBenchError(exit_reason(child.process, f"cell {cell}"))
            elif "error" in message:
                raise SloBenchError(message["error"])
            elif "row" in message:
                left -= 1
                tell(CellDone(cell, message["row"]))
            else:
                tell(CellProgress(cell, message["requests"]))


def _work(parent: Parent) -> None:
    """Run the cells that the parent process sends."""
    messages = parent.messages()
    order = next(messages, None)
    if order is None:
        return  # the parent was killed before it sent any work
    folder, records = Path(order["folder"]), order["records"]
    progress = now_and_then(lambda ended, clock_s: parent.send({"requests": ended}))
    for message in messages:
        try:
            spec = CellSpec.from_plain(message)
            parent.send({"row": run_cell(spec, folder, records=records, progress=progress)})
        except SloBenchError as error:
            parent.send({"error": str(error)})


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        _work(Parent())
