"""Servers for configurations: the simulator, or a real server that is restarted when needed."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ...harness.experiments.backends.base import Backend
from ...harness.experiments.execution.cells import CellSpec
from ...harness.experiments.experiment import Experiment
from ...harness.servers.launch.backend_names import SIMULATED
from ..capacity.cells import CellServer, RealServer, Simulator


@dataclass
class Servers:
    """At most one running server, kept while configurations can share it.

    Leaving the block stops it. Server logs are kept in `folder`, under the cell's name.
    """

    folder: Path
    starts: int = 0
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _running: tuple[Hashable, CellServer] | None = None

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the running server."""
        self._running = None
        self._stack.close()
        self._stack = contextlib.ExitStack()

    def of(self, experiment: Experiment, spec: CellSpec) -> CellServer:
        """The server for a configuration, restarted if the running one has other settings.

        Raises:
            ServerError: it did not start.
        """
        if experiment.backend == SIMULATED:
            return Simulator()
        from ...harness.experiments.backends.measuring import backend_of

        return self._started(backend_of(experiment), spec)

    def _started(self, backend: Backend, spec: CellSpec) -> CellServer:
        wanted = (backend.name, repr(backend), backend.configuration(spec))
        if self._running is not None and self._running[0] == wanted:
            return self._running[1]
        self.stop()
        folder = self.folder / spec.cell
        self.starts += 1
        deployment = self._stack.enter_context(backend.started(spec, folder))
        server = RealServer(deployment, folder, "none")
        self._running = (wanted, server)
        return server
