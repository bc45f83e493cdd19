"""Cells and other work on the machines of a Ray cluster.

Ray repeats a task if its machine is lost. Results are written to the run folder of this machine, so
run folders do not depend on which machine ran which cell. Ray is an extra: `pip install
slo-bench[ray]`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .... import __version__
from ....workloads.errors import SloBenchError
from ....workloads.extras import need
from ...load_generator.load_workers import RaySenders
from ...results.run_folder import Row
from .cell_specs import CellSpec
from .cells import run_cell
from .workers import Answer, CellDone, Event, NotDoneError, packed, unpack

_PATIENCE_S = 10
_TRIES = 5  # work that takes its machine down each time is given up


@dataclass(frozen=True)
class OnRay:
    """An `Executor` on a Ray cluster, every cell on a core.

    `address` is that of the cluster's head, as in `10.0.0.1:6379`, or `auto` for the one that this
    machine is part of; without it one is started here and stopped at the end.
    """

    address: str | None = None

    def __post_init__(self) -> None:
        need("ray", "--executor ray")

    def run(
        self,
        specs: Sequence[CellSpec],
        folder: Path,
        *,
        records: str,
        tell: Callable[[Event], None],
    ) -> None:
        """Run cells, each on a core of the cluster, and report each that is done to `tell`.

        Raises:
            SloBenchError: there is no Ray or no cluster, a machine has another version, a cell
                failed, or its machine was lost repeatedly.
        """
        with self.pool() as pool:
            begun = {pool.begin(_cell, spec.plain(), records): spec.cell for spec in specs}
            for done in as_completed(begun):
                cell = begun.pop(done)
                row, files = done.result()
                unpack(files, folder)
                tell(CellDone(cell, row))

    @contextlib.contextmanager
    def pool(self) -> Iterator[RayPool]:
        """The cluster's machines as a `Pool`, every piece of work on a core.

        Raises:
            SloBenchError: there is no Ray or no cluster.
        """
        with self.connected() as ray:
            pool = RayPool(ray)
            try:
                yield pool
            finally:
                pool.stop()

    @contextlib.contextmanager
    def senders(self) -> Iterator[RaySenders]:
        """The cluster's machines, to send a load from all of them.

        Raises:
            SloBenchError: there is no Ray or no cluster.
        """
        with self.connected() as ray:
            yield RaySenders(ray)

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """The module `ray`, connected to the cluster for as long as the block lasts.

        Raises:
            SloBenchError: there is no Ray or no cluster.
        """
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        local_options: dict[str, Any] = {}
        if self.address is None:  # ours listens on loopback alone: whoever reaches it can run code
            local_options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        where = self.address or "local"
        _reach(where)
        try:
            ray.init(address=where, log_to_driver=False, logging_level="ERROR", **local_options)
        except (ConnectionError, ValueError) as error:
            raise SloBenchError(f"no Ray cluster at {where}: {error}") from None
        try:
            yield ray
        finally:
            ray.shutdown()


def _reach(where: str) -> None:
    """Raise SloBenchError unless a TCP connection to `where` opens; Ray itself would retry for
    long.
    """
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdecimal():
        return  # Ray looks for it on this machine
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
    except (OSError, OverflowError) as error:
        raise SloBenchError(f"no Ray cluster at {where}: {error}") from None


class RayPool:
    """A worker pool of all cores of a Ray cluster."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._task = ray.remote(num_cpus=1, max_retries=_TRIES)(_done)
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def at_once(self) -> int:
        """As many as the cluster has cores now."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def begin(self, work: Callable[..., Answer], *arguments: object) -> Future[Answer]:
        """Submit `work(*arguments)` as a Ray task."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._pending.add(future)
        task = self._task.remote(__version__, work.__module__, work.__name__, arguments)
        task.future().add_done_callback(lambda done: self._tell(done, future))
        return future

    def _tell(self, done: Future[Any], future: Future[Any]) -> None:
        with self._lock:
            if future not in self._pending:
                return
            self._pending.remove(future)
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(self._explained(error))

    def _explained(self, error: BaseException) -> BaseException:
        ray_errors = self._ray.exceptions
        cause = error.cause if isinstance(error, ray_errors.RayTaskError) else None
        if isinstance(cause, SloBenchError):
            return (NotDoneError if isinstance(cause, NotDoneError) else SloBenchError)(str(cause))
        if isinstance(error, ray_errors.RayTaskError) or not isinstance(error, ray_errors.RayError):
            return error
        why = str(error).partition("\n")[0]
        return NotDoneError(f"work was lost {_TRIES + 1} times with the machine that did it: {why}")

    def stop(self) -> None:
        """Cancel all pending work."""
        with self._lock:
            self._stopped = True
            pending, self._pending = self._pending, set()
        for future in pending:
            future.cancel()


def _done(version: str, module: str, name: str, arguments: Sequence[Any]) -> Any:
    """A piece of work, on whichever machine."""
    if version != __version__:
        raise NotDoneError(
            f"a machine of the cluster has slo-bench {__version__}, this machine {version}; "
            "install the same everywhere"
        )
    return getattr(importlib.import_module(module), name)(*arguments)


def _cell(plain: Mapping[str, Any], records: str) -> tuple[Row, dict[str, bytes]]:
    """One cell: its row, and its details by their names."""
    with tempfile.TemporaryDirectory(prefix="slo-bench-") as folder:
        row = run_cell(CellSpec.from_plain(plain), Path(folder), records=records)
        return row, packed(Path(folder))
