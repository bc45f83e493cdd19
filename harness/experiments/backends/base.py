"""What a backend is: it starts a configuration once, then measures its cells one after another.

with backend.started(spec, folder) as deployment:
    measured = deployment.measure_cell(spec, workload, folder, progress)

Real cells never run side by side. Cells of equal `backend.configuration(spec)` share one start.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ....workloads.workload import Workload
from ...core.records import Result
from ...results.csv_columns import Column
from ...results.metrics import Hardware
from ...results.run_folder import Value
from ..execution.cells import CellSpec

Progress = Callable[[int, float], None]  # requests ended, clock in seconds


@dataclass(frozen=True)
class CellMeasurement:
    """What a real cell gave.

    `invalid_because` is None, or why the level must not be used (the client was late, ...).
    `columns` go beside the simulator's in the per-request table; `figures` are added to the row
    of `cells.csv`, after the columns that every cell has.
    """

    result: Result
    invalid_because: str | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    figures: Mapping[str, Value] = field(default_factory=dict)


class Deployment(Protocol):
    """Servers that are up. `model` and `gpu` are what the columns of `cells.csv` say of them."""

    @property
    def model(self) -> str:
        """What is served, by the name that the server gives it."""
        ...

    @property
    def gpu(self) -> str:
        """What it is served on: a name of the catalogue, `cpu`, or `unknown`."""
        ...

    @property
    def hardware(self) -> Hardware:
        """For utilisation and cost; NaN where unknown."""
        ...

    def measure_cell(
        self, spec: CellSpec, workload: Workload, folder: Path, progress: Progress | None
    ) -> CellMeasurement:
        """Offer `workload` to the servers and follow every request to its end.

        Files of the cell go into sub-folders of `folder`, under the name `spec.cell`.

        Raises:
            SloBenchError: the cell cannot be measured at all. What single requests suffer is no
                error but their outcome.
        """
        ...


class Backend(Protocol):
    """Something that can start what a cell asks for."""

    @property
    def name(self) -> str:
        """As in `--backend` and in the column `backend`."""
        ...

    def check(self, spec: CellSpec) -> None:
        """Refuse what this backend cannot run, before anything is started.

        Raises:
            SloBenchError: with the reason.
        """
        ...

    def configuration(self, spec: CellSpec) -> Hashable:
        """Cells with equal values are measured on the same start."""
        ...

    def profiling(self, group: Sequence[CellSpec]) -> CellSpec | None:
        """A level to measure first, on the start that these cells share, for a profile of it.

        None: no profile is wanted, or the cells serve as each other's.
        """
        ...

    def started(self, spec: CellSpec, folder: Path) -> AbstractContextManager[Deployment]:
        """Start, and wait until ready; leaving the block stops everything, whatever happened.

        Raises:
            SloBenchError: it did not start; says why, and where its log is (in `folder`).
        """
        ...
