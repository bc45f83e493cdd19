"""Cells as tasks of a Ray cluster, on this machine or on many.

Each machine needs slo-bench in the same version, and the files that cells name (traces, profiles,
policies of one's own) at the same paths. Details of cells come back with their rows, so the run
folder is this machine's alone. A cell whose machine is lost is run again on another.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import __version__
from ..workloads.errors import SloBenchError
from .cells import CellSpec, run_cell
from .store import Row, write_whole
from .workers import CellDone, Event

_PATIENCE_S = 10
_TRIES = 5  # a cell that takes its machine down each time is given up

Task = tuple[Row, Mapping[str, bytes]]


@dataclass(frozen=True)
class OnRay:
    """An `Executor` on a Ray cluster, every cell on a core.

    `address` is that of the cluster's head, as in `10.0.0.1:6379`, or `auto` for the one that this
    machine is part of; without it one is started here and stopped at the end.
    """

    address: str | None = None

    def run(
        self,
        specs: Sequence[CellSpec],
        folder: Path,
        *,
        records: str,
        tell: Callable[[Event], None],
    ) -> None:
        """See `Executor`.

        Raises:
            SloBenchError: there is no Ray or no cluster, a machine has another version, a cell
                failed, or was lost again and again.
        """
        if find_spec("ray") is None:
            raise SloBenchError("--executor ray needs Ray: pip install 'slo-bench[ray]'")
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own: dict[str, Any] = {"include_dashboard": False} if self.address is None else {}
        where = self.address or "local"
        _reach(where)
        try:
            ray.init(address=where, log_to_driver=False, logging_level="ERROR", **own)
        except (ConnectionError, ValueError) as error:
            raise SloBenchError(f"no Ray cluster at {where}: {error}") from None
        try:
            _run(ray, specs, folder, records, tell)
        finally:
            ray.shutdown()


def _reach(where: str) -> None:
    """Raise SloBenchError unless somebody listens there; Ray itself would go on trying."""
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdecimal():
        return  # Ray looks for it on this machine
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
    except (OSError, OverflowError) as error:
        raise SloBenchError(f"no Ray cluster at {where}: {error}") from None


def _run(
    ray: Any,
    specs: Sequence[CellSpec],
    folder: Path,
    records: str,
    tell: Callable[[Event], None],
) -> None:
    task = ray.remote(num_cpus=1, max_retries=_TRIES)(_cell)
    running = {task.remote(asdict(spec), records, __version__): spec for spec in specs}
    while running:
        [done], _ = ray.wait(list(running), num_returns=1)
        spec = running.pop(done)
        try:
            row, files = ray.get(done)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, SloBenchError):
                raise SloBenchError(str(cause)) from None
            raise
        except ray.exceptions.RayError as error:
            raise SloBenchError(
                f"cell {spec.cell} was lost {_TRIES + 1} times with the machine that ran it: "
                f"{str(error).partition(chr(10))[0]}"
            ) from None
        for name, content in files.items():
            write_whole(folder / name, [content])
        tell(CellDone(spec.cell, row))


def _cell(plain: Mapping[str, Any], records: str, version: str) -> Task:
    """One cell, on whichever machine; its row, and its details by their names."""
    if version != __version__:
        raise SloBenchError(
            f"a machine of the cluster has slo-bench {__version__}, the one that asks {version}; "
            "install the same everywhere"
        )
    with tempfile.TemporaryDirectory(prefix="slo-bench-") as made:
        folder = Path(made)
        row = run_cell(CellSpec.from_plain(plain), folder, records=records)
        files = [path for path in folder.rglob("*") if path.is_file()]
        return row, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
