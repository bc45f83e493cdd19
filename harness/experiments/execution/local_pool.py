"""A worker pool of processes on this machine.

Each process receives one piece of work at a time and sends its result back. It ends with the parent
process, even if that is killed.
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


class LocalPool:
    """A `Pool` of up to `jobs` processes, for as long as the block lasts.

    A process is started when no other is idle, and the one that was busy last is used first: work
    that comes one piece after another takes one process, on a machine of any size.
    """

    def __init__(self, jobs: int) -> None:
        """Raises SloBenchError unless there is at least one."""
        if jobs < 1:
            raise SloBenchError(f"jobs must be at least 1 but is {jobs}")
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

    def begin(self, work: Callable[..., Answer], *given: object) -> Future[Answer]:
        """Queue `work(*given)` for the next free process."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._todo.put((future, (work.__module__, work.__name__, given)))
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
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.close()

    def _serve(self) -> None:
        """Give work to processes, one piece at a time."""
        while (work := self._todo.get()) is not None:
            future, message = work
            if future.cancelled():
                continue
            with contextlib.suppress(InvalidStateError):  # the future was cancelled
                try:
                    answer = self._answer(message)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(answer)

    def _answer(self, message: _Message) -> Any:
        process = self._free()
        try:
            return process.call(message)
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

    def call(self, message: _Message) -> Any:
        """Send one piece of work and wait for its result.

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
    """Run pieces of work in the child process until the pipe is closed."""
    while True:
        module, name, given = line.recv()
        said: tuple[str | None, object]
        try:
            said = None, getattr(importlib.import_module(module), name)(*given)
        except SloBenchError as error:
            said = type(error).__name__, str(error)
        line.send(said)


if __name__ == "__main__":
    os.dup2(2, 1)  # prints of a user's policy must not mix with results
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        _work(Connection(int(sys.argv[1])))
