"""Measuring cells on real servers, in sequence, with one start for each configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path

from ....workloads.workload import Workload
from ...results.engine_logs import PROFILING, REPEATED, repeated_cell
from ...results.run_folder import Row
from ..execution.cells import CellSpec, kept_cell, workload_of
from .base import Backend, CellMeasurement, Deployment, Progress

_BETWEEN_REPORTS_S = 0.1


def measure_cells(
    backend: Backend,
    specs: Sequence[CellSpec],
    folder: Path,
    *,
    records: str,
    repetitions: int,
    progress: Callable[[str, int], None],
    done: Callable[[str, Row], None],
) -> None:
    """Measure all cells; `progress` receives the numbers of ended requests, `done` each cell's row.

    Cells that share a start are measured `repetitions` times, in rounds: all cells once before any
    is repeated, so that slow changes of the machine show as differences between repetitions.

    Raises:
        SloBenchError: the backend cannot run a cell, or servers do not start.
    """
    for group in grouped_by_start(backend, specs):
        with backend.started(group[0], folder) as deployment:
            first = backend.profiling(group)
            if first is not None:
                watch = _now_and_then(f"{first.cell} (profiling)", progress)
                _measured(deployment, first, folder / PROFILING, "csv", watch)
            for spec in group:
                watch = _now_and_then(spec.cell, progress)
                done(spec.cell, _measured(deployment, spec, folder, records, watch))
            for number in range(2, repetitions + 1):
                for spec in group:
                    again = replace(spec, cell=repeated_cell(spec.cell, number))
                    watch = _now_and_then(f"{spec.cell} (time {number})", progress)
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
    return row | dict(measured.figures)


def _now_and_then(cell: str, report: Callable[[str, int], None]) -> Progress:
    reported_s = -float("inf")

    def progress(ended: int, clock_s: float) -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if now_s - reported_s >= _BETWEEN_REPORTS_S:
            reported_s = now_s
            report(cell, ended)

    return progress
