"""Pieces of work in processes of this machine: what `Pool` promises, without a cluster.

Each process is a program of its own that is told its work and answers, one after another, and ends
with this one, however that ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ....workloads.child_process import exit_reason, start_module
from ....workloads.errors import SloBenchError
from .workers import Answer, NotDoneError

_Message = tuple[str, str, tuple[object, ...]]  # a module, its function, what that is given
_Work = tuple[Future[Any], _Message]


class PoolHere:
    """A `Pool` of `jobs` processes, for as long as the block lasts."""

    def __init__(self, jobs: int) -> None:
        """Raises SloBenchError unless there is at least one."""
        if jobs < 1:
            raise SloBenchError(f"jobs must be at least 1 but is {jobs}")
        self.at_once = jobs
        self._todo: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._stopped = False
        self._workers = [_Worker(self._todo) for _ in range(jobs)]

    def __enter__(self) -> PoolHere:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    def begin(self, work: Callable[..., Answer], *given: object) -> Future[Answer]:
        """See `Pool`."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._todo.put((future, (work.__module__, work.__name__, given)))
        return future

    def stop(self) -> None:
        """See `Pool`."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        for future in tuple(self._pending):
            future.cancel()
        for _ in self._workers:
            self._todo.put(None)
        for worker in self._workers:
            worker.stop()


class _Worker:
    """A process, begun when there is work for it, and the thread that talks to it."""

    def __init__(self, todo: queue.SimpleQueue[_Work | None]) -> None:
        self._todo = todo
        self._process: _Process | None = None
        self._stops = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stops = True
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _serve(self) -> None:
        while (work := self._todo.get()) is not None:
            future, message = work
            if future.cancelled():
                continue
            with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                try:
                    process = self._running()
                    answer = process.asked(message)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(answer)
        if self._process is not None:
            self._process.close()

    def _running(self) -> _Process:
        """The process; another one if it has died."""
        with self._lock:
            if self._stops:
                raise CancelledError
            if self._process is not None and not self._process.alive:
                self._process.close()
                self._process = None
            if self._process is None:
                self._process = _Process()
            return self._process


class _Process:
    """A program, and the line to it, over which nobody else can send."""

    def __init__(self) -> None:
        self._line, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = start_module(__name__, str(number), pass_fds=(number,))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def asked(self, message: _Message) -> Any:
        """What it answers.

        Raises:
            SloBenchError: what the work raised.
            NotDoneError: the process died.
        """
        try:
            self._line.send(message)
            kind, answer = self._line.recv()
        except (EOFError, OSError):
            raise NotDoneError(exit_reason(self._process, message[1])) from None
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
    """The worker's side, until nobody asks any more."""
    while True:
        module, name, given = line.recv()
        said: tuple[str | None, object]
        try:
            said = None, getattr(importlib.import_module(module), name)(*given)
        except SloBenchError as error:
            said = type(error).__name__, str(error)
        line.send(said)


if __name__ == "__main__":
    os.dup2(2, 1)  # what a policy of the user's prints is no answer of the command's
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        _work(Connection(int(sys.argv[1])))
