"""Cells measured on real servers: the interface of backends, which start a configuration once and
measure its cells in sequence.

with backend.started(spec, folder) as deployment:
    measured = deployment.measure_cell(spec, workload, folder, progress)

Cells on real servers never run at the same time. Cells with equal `backend.configuration(spec)`
share one start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ....workloads.workload import Workload
from ...core.records.request_records import Result
from ...load_generator.load_progress import LoadProgress, Progress
from ...results.cell_files import Column
from ...results.energy import unit_costs
from ...results.engine_logs import PROFILING, REPEATED, profiling_cell, repeated_cell
from ...results.metrics import Hardware
from ...results.run_folder import Row, Value
from ..execution.cell_specs import CellSpec
from ..execution.cells import kept_cell, workload_of
from ..execution.workers import CellDone, CellProgress, Event, now_and_then

Say = Callable[[str], None]  # takes what is going on: the name of a phase, a note

PROFILING_SEEDS = 1_000_003  # away from the seeds of the experiment


def silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class CellMeasurement:
    """Result of a measured cell.

    `invalid_because` is the reason why the level must not be used (the client was late, ...), or
    None. `served` is False if not one request of the cell was. `columns` are added to the
    simulator's in the per-request table; `figures` are added to the row of `cells.csv`, after the
    columns that every cell has.
    """

    result: Result
    invalid_because: str | None = None
    served: bool = True
    columns: Mapping[str, Column] = field(default_factory=dict)
    figures: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Deployment(ABC):
    """Running servers. `model` and `gpu` are the values of these columns in `cells.csv`: the
    server's name for the model; a GPU of the catalogue, `cpu` or `unknown`. `hardware` is for
    utilisation and cost, NaN where unknown.
    """

    model: str
    gpu: str
    hardware: Hardware

    @abstractmethod
    def measure_cell(
        self, spec: CellSpec, workload: Workload, folder: Path, progress: Progress | None
    ) -> CellMeasurement:
        """Send `workload` to the servers and record every request to its end.

        Files of the cell are written to sub-folders of `folder`, under the name `spec.cell`.

        Raises:
            SloBenchError: the cell cannot be measured. Failures of single requests are outcomes,
                not errors.
        """


class Backend(Protocol):
    """Starts the servers that a cell needs."""

    @property
    def name(self) -> str:
        """The name for `--backend`, and in that column of cells.csv."""
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


def measure_cells(
    backend: Backend,
    specs: Sequence[CellSpec],
    folder: Path,
    *,
    records: str,
    repetitions: int,
    tell: Callable[[Event], None],
) -> None:
    """Measure all cells; `tell` receives events of progress and of finished cells.

    Cells that share a start are measured `repetitions` times, in rounds: all cells once before any
    is repeated, so that slow changes of the machine show as differences between repetitions.

    Raises:
        SloBenchError: the backend cannot run a cell, or servers do not start.
    """
    for group in grouped_by_start(backend, specs):
        with backend.started(group[0], folder) as deployment:
            first = backend.profiling(group)
            if first is not None:
                watch = _watch(tell, f"{first.cell} (profiling)")
                _measured(deployment, first, folder / PROFILING, "csv", watch)
            for spec in group:
                watch = _watch(tell, spec.cell)
                tell(CellDone(spec.cell, _measured(deployment, spec, folder, records, watch)))
            for number in range(2, repetitions + 1):
                for spec in group:
                    again = replace(spec, cell=repeated_cell(spec.cell, number))
                    watch = _watch(tell, f"{spec.cell} (time {number})")
                    _measured(deployment, again, folder / REPEATED, "csv", watch)


def _watch(tell: Callable[[Event], None], cell: str) -> Progress:
    """Tells what is known of a running cell."""

    def report(load_progress: LoadProgress, clock_s: float) -> None:
        tell(CellProgress(cell, load_progress.ended, load_progress))

    return now_and_then(report)


def profiling_level(spec: CellSpec, **changes: Any) -> CellSpec:
    """A level like `spec` with another seed and `changes`, to fit step times to.

    Its name salts the prompts: none of them is in the prefix cache afterwards.
    """
    cell = profiling_cell(spec.cell)
    return replace(spec, cell=cell, seed=spec.seed + PROFILING_SEEDS, **changes)


def grouped_by_start(backend: Backend, specs: Sequence[CellSpec]) -> list[list[CellSpec]]:
    """Cells grouped by the server start that they share, in order.

    Raises:
        SloBenchError: the backend cannot run a cell.
    """
    groups: dict[Hashable, list[CellSpec]] = {}
    for spec in specs:
        backend.check(spec)
    for spec in specs:
        groups.setdefault(backend.configuration(spec), []).append(spec)
    return list(groups.values())


def _measured(
    deployment: Deployment, spec: CellSpec, folder: Path, records: str, progress: Progress
) -> Row:
    workload = workload_of(spec)
    measured = deployment.measure_cell(spec, workload, folder, progress)
    return measured_row(deployment, spec, workload, measured, folder, records=records)


def measured_row(
    deployment: Deployment,
    spec: CellSpec,
    workload: Workload,
    measured: CellMeasurement,
    folder: Path,
    *,
    records: str,
) -> Row:
    """Write the details of a measured cell into `folder` and return its row of `cells.csv`."""
    row = kept_cell(
        spec,
        workload,
        measured.result,
        deployment.hardware,
        folder,
        records=records,
        step_time="measured",
        columns=measured.columns,
    )
    row |= {"model": deployment.model or row["model"], "gpu": deployment.gpu}
    row["valid"] = measured.invalid_because is None
    row |= dict(measured.figures)
    return row | {name: round(value, 9) for name, value in unit_costs(row).items()}
