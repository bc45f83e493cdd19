"""Levels that are cells of an experiment, simulated or on a real server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from ...harness.core.records import Outcome, Records
from ...harness.experiments.backends.base import CellMeasurement, Deployment
from ...harness.experiments.execution.cells import (
    CellSpec,
    kept_cell,
    predicted_output_tokens,
    simulated,
    simulated_row,
    source,
    workload_of,
)
from ...harness.results.metrics import judge
from ...harness.results.run_folder import Row
from ...workloads.workload import Workload
from .samples import WARMUP_SHARE, Floats, LevelSample, sample_of

Ended = Callable[[int, float], None]  # requests ended, clock in seconds


class CellServer(Protocol):
    """Whatever serves the workload of a cell."""

    def measure(
        self, spec: CellSpec, workload: Workload, progress: Ended | None
    ) -> CellMeasurement:
        """What became of every request."""
        ...

    def row(self, spec: CellSpec, workload: Workload, measured: CellMeasurement) -> Row:
        """The cell's row of `cells.csv`; its details are on disk."""
        ...


@dataclass(frozen=True)
class Simulator:
    """Serves cells in this process."""

    folder: Path
    records: str

    def measure(
        self, spec: CellSpec, workload: Workload, progress: Ended | None
    ) -> CellMeasurement:
        """See `CellServer`."""
        predicted = predicted_output_tokens(spec, workload)
        return CellMeasurement(simulated(spec, workload, predicted, progress=progress))

    def row(self, spec: CellSpec, workload: Workload, measured: CellMeasurement) -> Row:
        """See `CellServer`."""
        return simulated_row(spec, workload, measured.result, self.folder, records=self.records)


@dataclass(frozen=True)
class RealServer:
    """Serves cells by a deployment that is up."""

    deployment: Deployment
    folder: Path
    records: str

    def measure(
        self, spec: CellSpec, workload: Workload, progress: Ended | None
    ) -> CellMeasurement:
        """See `CellServer`."""
        return self.deployment.measure_cell(spec, workload, self.folder, progress)

    def row(self, spec: CellSpec, workload: Workload, measured: CellMeasurement) -> Row:
        """See `CellServer`."""
        row = kept_cell(
            spec,
            workload,
            measured.result,
            self.deployment.hardware,
            self.folder,
            records=self.records,
            step_time="measured",
            columns=measured.columns,
        )
        row |= {"model": self.deployment.model or row["model"], "gpu": self.deployment.gpu}
        row["valid"] = measured.invalid_because is None
        return row | dict(measured.figures)


def cell_of(search: str, rate_rps: float, seed: int) -> str:
    """The name of a run of a search."""
    return f"{search}_rate-{rate_rps:g}_seed-{seed}"


def search_of(cell: str) -> str:
    """The inverse of `cell_of`."""
    return cell.rpartition("_rate-")[0]


@dataclass(frozen=True)
class CellRunner:
    """A `LevelRunner` whose levels are cells that differ from `template` in rate, seed and size.

    `stem` begins the cells' names; `keep` is told the row of each.
    """

    template: CellSpec
    stem: str
    server: CellServer
    keep: Callable[[str, Row], None]
    progress: Ended | None = None

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        """See `LevelRunner`."""
        cell = cell_of(self.stem, rate_rps, seed)
        offered: Row = {"cell": cell, "rate_rps": rate_rps, "replay_speed": None, "seed": seed}
        spec = replace(
            self.template,
            cell=cell,
            columns={**self.template.columns, **offered},
            rate_rps=rate_rps,
            replay_speed=None,
            requests=requests,
            duration_s=None,
            seed=seed,
        )
        whole = source(spec.workload).has_arrivals
        workload = workload_of(spec)
        if not whole:
            began_s = float(workload.arrival_s[int(len(workload) * WARMUP_SHARE)])
            spec = replace(spec, warmup_s=max(spec.warmup_s, began_s))
        started_s = time.monotonic()
        measured = self.server.measure(spec, workload, self.progress)
        wall_s = time.monotonic() - started_s
        self.keep(cell, self.server.row(spec, workload, measured))
        records = measured.result.records
        return sample_of(
            rate_rps=rate_rps,
            seed=seed,
            arrival_s=records.arrival_s,
            end_s=_end_s(records),
            met=judge(workload, records).met,
            bound_s=_bound_s(workload),
            warmup_s=self.template.warmup_s,
            whole=whole,
            wall_s=wall_s,
            invalid_because=measured.invalid_because,
        )


def _end_s(records: Records) -> Floats:
    """When each request left: what was turned away or given up is no backlog."""
    gone = (records.outcome != Outcome.FINISHED) & (records.outcome != Outcome.UNFINISHED)
    return np.where(gone & np.isnan(records.finish_s), records.arrival_s, records.finish_s)


def _bound_s(workload: Workload) -> float:
    """For how long a typical request may wait without missing anything; 0 if for ever."""
    tightest = np.minimum(workload.ttft_slo_s, workload.e2e_slo_s)
    tightest = np.minimum(tightest, workload.deadline_s - workload.arrival_s)
    known = tightest[np.isfinite(tightest)]
    return max(0.0, float(np.median(known))) if len(known) else 0.0
