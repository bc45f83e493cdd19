"""Who serves a configuration: the simulator, or a real server that is restarted when it must be."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ...harness.experiments.backends.base import Backend, Measured
from ...harness.experiments.execution.cells import CellSpec, placed
from ...harness.experiments.experiment import Experiment
from ...harness.results.metrics import Hardware, cell_metrics, judge
from ...harness.results.run_folder import Row
from ...harness.servers.launch.backend_names import SIMULATED
from ...workloads.workload import Workload
from ..capacity.cells import Ended, RealServer, Server, Simulator


@dataclass(frozen=True)
class QuickSimulator:
    """Serves cells in this process and keeps no details of them."""

    simulator: Simulator = field(default_factory=lambda: Simulator(Path(), "none"))

    def measure(self, spec: CellSpec, workload: Workload, progress: Ended | None) -> Measured:
        """See `Server`."""
        return self.simulator.measure(spec, workload, progress)

    def row(self, spec: CellSpec, workload: Workload, measured: Measured) -> Row:
        """See `Server`: the figures alone."""
        place = placed(spec.placement).placement
        hardware = Hardware(place.gpus * spec.instances, place.model.parameters, 0.0)
        judged = judge(workload, measured.result.records)
        return dict(
            cell_metrics(workload, measured.result, hardware, judged=judged, warmup_s=spec.warmup_s)
        )


@dataclass
class Servers:
    """One server at a time, kept for as long as configurations can do with it.

    Leaving the block stops it. What a server said is kept in `folder`, under the cell's name.
    """

    folder: Path
    starts: int = 0
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _running: tuple[Hashable, Server] | None = None

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
        """Nothing runs any more."""
        self._running = None
        self._stack.close()
        self._stack = contextlib.ExitStack()

    def of(self, experiment: Experiment, spec: CellSpec) -> Server:
        """Who serves this, started if what runs is of another configuration.

        Raises:
            ServerError: it did not start.
        """
        if experiment.backend == SIMULATED:
            return QuickSimulator()
        from ...harness.experiments.backends.choose import backend_of

        return self._started(backend_of(experiment), spec)

    def _started(self, backend: Backend, spec: CellSpec) -> Server:
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
