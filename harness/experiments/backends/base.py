"""The interface of backends: start a configuration once, then measure its cells in sequence.

with backend.started(spec, folder) as deployment:
    measured = deployment.measure_cell(spec, workload, folder, progress)

Cells on real servers never run at the same time. Cells with equal `backend.configuration(spec)`
share one start.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ....workloads.workload import Workload
from ...core.records import Result
from ...load_generator.load_progress import Progress
from ...results.cell_files import Column
from ...results.metrics import Hardware
from ...results.run_folder import Value
from ..execution.specs import CellSpec


@dataclass(frozen=True)
class CellMeasurement:
    """Result of a measured cell.

    `invalid_because` is the reason why the level must not be used (the client was late, ...), or
    None. `columns` are added to the simulator's in the per-request table; `figures` are added to
    the row of `cells.csv`, after the columns that every cell has.
    """

    result: Result
    invalid_because: str | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    figures: Mapping[str, Value] = field(default_factory=dict)


class Deployment(Protocol):
    """Running servers. `model` and `gpu` are the values of these columns in `cells.csv`."""

    @property
    def model(self) -> str:
        """The served model, by the server's name for it."""
        ...

    @property
    def gpu(self) -> str:
        """The GPU: a name of the catalogue, `cpu`, or `unknown`."""
        ...

    @property
    def hardware(self) -> Hardware:
        """GPUs, model size and price, for utilisation and cost; NaN where unknown."""
        ...

    def measure_cell(
        self, spec: CellSpec, workload: Workload, folder: Path, progress: Progress | None
    ) -> CellMeasurement:
        """Send `workload` to the servers and record every request to its end.

        Files of the cell are written to sub-folders of `folder`, under the name `spec.cell`.

        Raises:
            SloBenchError: the cell cannot be measured. Failures of single requests are outcomes,
                not errors.
        """
        ...


class Backend(Protocol):
    """Starts the servers that a cell needs."""

    @property
    def name(self) -> str:
        """The name in `--backend` and in the column `backend`."""
        ...

    def check(self, spec: CellSpec) -> None:
        """Refuse a cell that this backend cannot run, before anything is started.

        Raises:
            SloBenchError: the cell cannot be run; gives the reason.
        """
        ...

    def configuration(self, spec: CellSpec) -> Hashable:
        """A key of the server start: cells with equal keys are measured on the same start."""
        ...

    def profiling(self, group: Sequence[CellSpec]) -> CellSpec | None:
        """The level to measure first, to fit a step-time profile to.

        None: no profile is needed, or the other cells of the group serve for it.
        """
        ...

    def started(self, spec: CellSpec, folder: Path) -> AbstractContextManager[Deployment]:
        """Start the servers and wait until they are ready; leaving the block always stops them.

        Raises:
            SloBenchError: a server did not start; gives the reason and the path of its log in
                `folder`.
        """
        ...
