"""Runs of one rate as cells of an experiment: simulated here, in a pool, or on a real server."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...harness.core.records.judging import judge
from ...harness.experiments.backends.measuring import CellMeasurement, Deployment, measured_row
from ...harness.experiments.execution.cell_bands import sampled
from ...harness.experiments.execution.cell_specs import CellSpec, OperatingPoint, source
from ...harness.experiments.execution.cells import (
    predicted_output_tokens,
    simulated,
    simulated_figures,
    simulated_row,
    workload_of,
)
from ...harness.experiments.execution.workers import WorkerPool, packed, unpack
from ...harness.load_generator.http.faults import OVERLOAD, RequestFault
from ...harness.results.cell_files import Choice, Column
from ...harness.results.request_fold import RequestSample
from ...harness.results.run_folder import Row
from ...harness.results.stationarity import WARMUP_SHARE, batches_of, horizon_s, left_s
from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from .control import control_of
from .level_samples import LevelSample

if TYPE_CHECKING:
    from ...harness.experiments.config.schema import ExperimentSchema

_HERE_S = 2.0  # of simulation in this process, before others are started
Ended = Callable[[int, float], None]  # requests ended, clock in seconds
Level = tuple[LevelSample, str, Row, Mapping[str, bytes]]


@dataclass(frozen=True)
class Simulator:
    """Simulates cells in this process. Without a folder, no details of them are kept.

    `samples` receives the rate of each run in req/s and a sample of its requests.
    """

    folder: Path | None = None
    records: str = "none"
    samples: list[tuple[float, RequestSample]] | None = None

    def measure(
        self, spec: CellSpec, workload: Workload, progress: Ended | None
    ) -> CellMeasurement:
        """Simulate the cell's workload with its predicted lengths."""
        predicted = predicted_output_tokens(spec, workload)
        kept = self.folder is not None
        result = simulated(spec, workload, predicted, progress=progress, timeline=kept)
        if self.samples is not None:
            self.samples.append((spec.rate_rps or 0.0, sampled(workload, result, spec.warmup_s)))
        return CellMeasurement(result)

    def row(self, spec: CellSpec, workload: Workload, measured: CellMeasurement) -> Row:
        """The row of `cells.csv`; without a folder, the figures alone."""
        result = measured.result
        if self.folder is None:
            return dict(simulated_figures(spec, workload, result))
        return simulated_row(spec, workload, result, self.folder, records=self.records)


@dataclass(frozen=True)
class RealServer:
    """Measures cells on servers that are up."""

    deployment: Deployment
    folder: Path
    records: str

    def measure(
        self, spec: CellSpec, workload: Workload, progress: Ended | None
    ) -> CellMeasurement:
        """Send the workload to the servers and record every request."""
        on_ended = None if progress is None else lambda load, clock_s: progress(load.ended, clock_s)
        return self.deployment.measure_cell(spec, workload, self.folder, on_ended)

    def row(self, spec: CellSpec, workload: Workload, measured: CellMeasurement) -> Row:
        """Write the cell's details and return its row of `cells.csv`."""
        return measured_row(
            self.deployment, spec, workload, measured, self.folder, records=self.records
        )


CellServer = Simulator | RealServer


def cell_of(search: str, rate_rps: float | None, seed: int) -> str:
    """The name of a run of a search."""
    return f"{search}_{OperatingPoint(rate_rps).label}_seed-{seed}"


def search_of(cell: str) -> str:
    """The search's name in a cell's name: the inverse of `cell_of`."""
    return cell.rpartition("_rate-")[0]


@dataclass(frozen=True)
class CellRunner:
    """A `LevelRunner` whose levels are cells that differ from `template` in rate, seed and size.

    `stem` begins the cells' names; `keep` receives the row of each, which is not made without it.
    `controlled`: samples of simulated runs have a control variate.
    """

    template: CellSpec
    stem: str
    server: CellServer
    keep: Callable[[str, Row], None] | None
    progress: Ended | None = None
    controlled: bool = True

    def run(self, rate_rps: float | None, seed: int, requests: int) -> LevelSample:
        """Run a cell with `requests` requests at `rate_rps` and return its sample.

        Without a rate they come as the arrivals say (closed loop, all at once), and all count.

        Raises:
            SloBenchError: a real server served not one request of it.
        """
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
        whole = rate_rps is None or source(spec.workload).has_arrivals
        workload = workload_of(spec)
        if not whole:
            began_s = float(workload.arrival_s[int(len(workload) * WARMUP_SHARE)])
            spec = replace(spec, warmup_s=max(spec.warmup_s, began_s))
        started_s = time.monotonic()
        measured = self.server.measure(spec, workload, self.progress)
        wall_s = time.monotonic() - started_s
        if not measured.served:
            load = "" if rate_rps is None else f" at {rate_rps:g} req/s"
            raise SloBenchError(
                f"no result{load}: {measured.invalid_because}; finished runs are kept, and "
                "--resume goes on once the server serves these requests"
            )
        row: Row = {}
        if self.keep is not None:
            row = self.server.row(spec, workload, measured)
            self.keep(cell, row)
        records = measured.result.records
        batches = batches_of(
            arrival_s=records.arrival_s,
            end_s=left_s(records),
            first_token_s=records.first_token_s,
            met=judge(workload, records).met,
            horizon_s=horizon_s(workload),
            warmup_s=self.template.warmup_s,
            whole=whole,
        )
        control: tuple[float, ...] = ()
        if self.controlled and isinstance(self.server, Simulator):
            control = control_of(spec, workload, records, warmup_s=self.template.warmup_s)
        return LevelSample(
            **vars(batches),
            rate_rps=rate_rps or 0.0,
            seed=seed,
            requests=len(records.arrival_s),
            wall_s=wall_s,
            invalid_because=measured.invalid_because,
            surplus_outputs=int(row.get("surplus_outputs") or 0),
            control=control,
            **_failed(measured.columns),
        )


_BY_LOAD = (RequestFault.ABORTED, RequestFault.TIME_LIMIT, RequestFault.STALLED)


def _failed(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Requests that a real server refuses at any rate: client errors but those of overload. Those
    that failed in any way but by load.
    """
    if "status" not in columns:
        return {}
    status, fault, detail = np.asarray(columns["status"]), columns["fault"], columns["detail"]
    assert isinstance(fault, Choice)
    assert isinstance(detail, Choice)
    none_or_load = [fault.names.index(name) for name in ("", *_BY_LOAD)]
    overload = np.isin(status, OVERLOAD)
    masks = {
        "refused": (status // 100 == 4) & ~overload,
        "failed": ~np.isin(fault.index, none_or_load) & ~overload,
    }
    values: dict[str, Any] = {}
    for name, mask in masks.items():
        if mask.any():
            commonest = int(np.bincount(detail.index[mask]).argmax())
            values |= {name: int(mask.sum()), f"{name}_because": detail.names[commonest]}
    return values


def without_length(experiment: ExperimentSchema) -> dict[str, tuple[Any, ...]]:
    """Settings of an experiment whose runs are as long as a search wants them.

    The duration of a suite's runs is left out, with the warm-up that goes with it: a search does
    not count the start of a run.
    """
    settings: dict[str, tuple[Any, ...]] = {"requests": (None,)}
    if any(experiment.duration_s):
        settings |= {"duration_s": (None,), "warmup_s": (0.0,), "warmup_share": (0.0,)}
    return settings


@dataclass
class PoolRunner:
    """A `LevelRunner` like `CellRunner`, whose levels the processes of a pool simulate.

    `folder`: where cells' details are written; None keeps none. `here`: a runner in this process,
    which makes the first runs, for two seconds: a short search starts no other process. Levels that
    were expected and are never needed are dropped.
    """

    template: CellSpec
    stem: str
    pool: WorkerPool
    folder: Path | None
    records: str
    keep: Callable[[str, Row], None]
    here: CellRunner | None = None
    _begun: dict[tuple[float | None, int, int], Future[Level]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._left_here_s = _HERE_S

    def expect(self, rate_rps: float | None, seeds: Iterable[int], requests: int) -> None:
        """Start these runs in the pool."""
        for seed in seeds if self.here is None else ():
            run = (rate_rps, seed, requests)
            if run not in self._begun:
                self._begun[run] = self._begin(*run)

    def _begin(self, rate_rps: float | None, seed: int, requests: int) -> Future[Level]:
        records = None if self.folder is None else self.records
        settings = (self.template.plain(), self.stem, records)
        return self.pool.begin(simulated_level, *settings, rate_rps, seed, requests)

    def run(self, rate_rps: float | None, seed: int, requests: int) -> LevelSample:
        """Wait for the level, and begin it if it was not expected."""
        if self.here is not None:
            sample = self.here.run(rate_rps, seed, requests)
            self._left_here_s -= sample.wall_s
            if self._left_here_s <= 0:
                self.here = None
            return sample
        run = (rate_rps, seed, requests)
        begun = self._begun.pop(run, None) or self._begin(*run)
        sample, cell, row, files = begun.result()
        if self.folder is not None:
            unpack(files, self.folder)
        self.keep(cell, row)
        return sample


def simulated_level(
    template: Mapping[str, Any],
    stem: str,
    records: str | None,
    rate_rps: float | None,
    seed: int,
    requests: int,
) -> Level:
    """Simulate one level in a process of a pool.

    Returns its sample, its cell, the cell's row and, unless `records` is None, its files.
    """
    with tempfile.TemporaryDirectory(prefix="slo-bench-") as scratch:
        folder = Path(scratch)
        rows: list[tuple[str, Row]] = []
        server = Simulator() if records is None else Simulator(folder, records)
        spec = CellSpec.from_plain(template)
        runner = CellRunner(spec, stem, server, lambda cell, row: rows.append((cell, row)))
        sample = runner.run(rate_rps, seed, requests)
        return sample, *rows[0], packed(folder)
