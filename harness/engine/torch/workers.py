"""Worker processes on this machine, and asking them; rank 0 is whoever started them."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ....workloads.child_process import start_module
from . import wire
from .errors import WorkerError

HERE = 0


class Workers:
    """So many worker processes on this machine, for as long as the block lasts.

    Raises:
        WorkerError: they did not start in time.
    """

    def __init__(self, count: int, timeout_s: float = 120.0) -> None:
        self.count = count
        self._timeout_s = timeout_s
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Workers:
        self._folder = tempfile.TemporaryDirectory(prefix="slo-bench-workers-")
        store_file = Path(self._folder.name) / "store"
        size = self.count + 1
        try:
            for rank in range(1, size):
                argv = [str(store_file), str(rank), str(size), str(self._timeout_s)]
                self.processes.append(start_module(f"{__package__}.worker", *argv))
            wire.join(store_file, HERE, size, self._timeout_s)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        for rank, process in enumerate(self.processes, 1):
            if process.poll() is None and problem == (None, None, None):
                try:
                    wire.send(rank, None)
                except WorkerError:
                    break
        wire.leave()
        self._stop()

    def _stop(self) -> None:
        for process in self.processes:
            try:
                process.wait(5.0 if process.poll() is None else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    @property
    def ranks(self) -> range:
        """Of all of them."""
        return range(1, self.count + 1)

    def ask(self, rank: int, what: str, *arguments: Any) -> Any:
        """Call a method of `worker.Worker` there.

        Raises:
            WorkerError: it has ended, or does not answer.
        """
        self.tell(rank, (what, arguments))
        return self.answer(rank)

    def answer(self, rank: int) -> Any:
        """To what it was told.

        Raises:
            WorkerError: it has ended, or does not answer.
        """
        try:
            return wire.receive(rank)
        except WorkerError:
            self._check(rank)
            raise

    def tell(self, rank: int, message: Any) -> int:
        """Send without waiting for an answer; the bytes sent."""
        self._check(rank)
        return wire.send(rank, message)

    def _check(self, rank: int) -> None:
        code = self.processes[rank - 1].poll()
        if code is not None:
            raise WorkerError(f"worker {rank} has ended with exit code {code}; its KV is lost")
