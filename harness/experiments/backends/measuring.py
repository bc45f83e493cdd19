"""The backend of an experiment, and the measurement of its cells, one start per configuration."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ....workloads.errors import SloBenchError
from ....workloads.workload import Workload
from ...load_generator.load_progress import LoadProgress, Progress
from ...results.energy import unit_costs
from ...results.engine_logs import PROFILING, REPEATED, repeated_cell
from ...results.run_folder import Row
from ...servers.launch.backend_names import TORCH
from ..config.schema import ExperimentSchema
from ..execution.cells import kept_cell, workload_of
from ..execution.specs import CellSpec
from ..execution.workers import now_and_then
from .base import Backend, CellMeasurement, Deployment

if TYPE_CHECKING:
    from ...load_generator.send_job import Senders


def backend_of(asked: ExperimentSchema, senders: Senders | None = None) -> Backend:
    """The backend that measures the experiment's cells; not for simulated ones.

    `senders` are the machines that send the load to servers that already run; None: this machine.

    Raises:
        SloBenchError: settings contradict each other.
    """
    if senders is not None and asked.backend != "openai":
        raise SloBenchError(
            "several machines can send the load only to running servers (--base-url); "
            f"leave --executor out with {asked.backend}"
        )
    if asked.backend != TORCH and asked.server.clock != "real":
        raise SloBenchError(f"server.clock goes with backend torch, not with {asked.backend}")
    if asked.backend != TORCH and asked.server.workers:
        raise SloBenchError(f"server.workers go with backend torch, not with {asked.backend}")
    if asked.backend != TORCH and asked.server.kv_store:
        raise SloBenchError(f"server.kv_store goes with backend torch, not with {asked.backend}")
    if asked.backend == "openai":
        from .attached import HttpBackend

        return HttpBackend(asked.client, senders=senders)
    if asked.backend == TORCH:
        from .torch_engine import TorchBackend

        return TorchBackend(server=asked.server)
    from .launched import LaunchedBackend

    return LaunchedBackend(asked.backend, asked.client, asked.server)


def measure_cells(
    backend: Backend,
    specs: Sequence[CellSpec],
    folder: Path,
    *,
    records: str,
    repetitions: int,
    progress: Callable[[str, LoadProgress, float], None],
    done: Callable[[str, Row], None],
) -> None:
    """Measure all cells; `progress` receives what is known of a running cell with its clock,
    `done` each cell's row.

    Cells that share a start are measured `repetitions` times, in rounds: all cells once before any
    is repeated, so that slow changes of the machine show as differences between repetitions.

    Raises:
        SloBenchError: the backend cannot run a cell, or servers do not start.
    """
    for group in grouped_by_start(backend, specs):
        with backend.started(group[0], folder) as deployment:
            first = backend.profiling(group)
            if first is not None:
                watch = now_and_then(partial(progress, f"{first.cell} (profiling)"))
                _measured(deployment, first, folder / PROFILING, "csv", watch)
            for spec in group:
                watch = now_and_then(partial(progress, spec.cell))
                done(spec.cell, _measured(deployment, spec, folder, records, watch))
            for number in range(2, repetitions + 1):
                for spec in group:
                    again = replace(spec, cell=repeated_cell(spec.cell, number))
                    watch = now_and_then(partial(progress, f"{spec.cell} (time {number})"))
                    _measured(deployment, again, folder / REPEATED, "csv", watch)


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
