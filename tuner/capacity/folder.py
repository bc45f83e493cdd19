"""Capacity searches over the configurations of an experiment, stored in a run folder.

The folder's cells are the runs of the searches; `capacity.json` holds their samples and results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...harness.experiments.backends.measuring import Backend, grouped_by_start
from ...harness.experiments.execution.cell_specs import CellSpec, source
from ...harness.experiments.execution.experiment_plan import ExperimentPlan, plan
from ...harness.experiments.execution.offered_load import estimated_capacity_rps
from ...harness.experiments.execution.workers import WorkerPool
from ...harness.experiments.experiment import (
    Experiment,
    backend_of,
    environment,
    new_folder,
    salted,
)
from ...harness.results.run_folder import CAPACITY_FILE, Value, open_run_folder
from ...harness.servers.launch.backend_names import SIMULATED
from ...workloads.errors import SloBenchError
from ...workloads.request import SLO_COLUMNS
from ...workloads.slo import parse_slo
from .capacity_cells import (
    CellRunner,
    CellServer,
    PoolRunner,
    RealServer,
    Simulator,
    search_of,
    without_length,
)
from .capacity_checkpoint import CapacityCheckpoint, CapacityRecord, cells_in, read_capacity
from .capacity_options import REAL_LEAST, CapacityOptions
from .capacity_search import Foresee, SearchProgress, find_capacity, throughput_of_bursts
from .level_samples import LevelRunner
from .search_options import CapacitySearch, SearchOptions
from .traces import find_trace_capacity

if TYPE_CHECKING:
    from ...harness.load_generator.send_job import Senders

_START_SHARE = 0.6  # of the estimated capacity, which knows no SLO
BURST_SHARE = 0.75  # of the throughput of bursts, which know none either
_SLO_SAMPLE = 500  # requests of which one at least must have an SLO
_BURST_SEEDS = 900_000  # of bursts, away from those of levels


@dataclass(frozen=True)
class CapacityProgress:
    """How far the searches are: `number` of `searches`, called `name`, has just done a run."""

    name: str
    number: int
    searches: int
    search: SearchProgress


@dataclass(frozen=True)
class CapacityResult:
    """Finished searches, on disk at `folder`."""

    folder: Path
    records: tuple[CapacityRecord, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Result rows of all searches, one for each target."""
        return [row for record in self.records for row in record.rows()]


def search_capacity(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    options: CapacityOptions | None = None,
    resume: bool = False,
    progress: Callable[[CapacityProgress], None] | None = None,
    ended: Callable[[int, float], None] | None = None,
    pool: WorkerPool | None = None,
    senders: Senders | None = None,
    say: Callable[[str], None] = lambda text: None,
    command: Sequence[str] = (),
) -> CapacityResult:
    """Find the capacity of every configuration of an experiment.

    `experiment.rates` are the lowest and the highest to try (a single one is where the search
    begins), `experiment.requests` the least in a run (2,000; on a real server 100),
    `experiment.seeds` the number of consecutive runs of a level (3). The default budget of a target
    is 120,000 requests, more for SLOs of minutes; on a real server 210 s, up to an hour for long
    answers.

    Args:
        experiment: the configurations to search.
        out: the folder, empty or new; by default a new one under `runs/`.
        options: targets, tolerance, budget.
        resume: continue the interrupted search in `out`, with its targets, tolerance and budget
            unless `options` sets them; only the budget may differ.
        progress: called after every run.
        ended: called within a run in this process with (requests ended, clock in seconds).
        pool: processes that simulate, a `LocalPool` or `OnRay().pool()`: runs of a level and of
            several configurations at once, with the same results.
        senders: machines that send the load to running servers; by default this machine.
        say: called with what goes on with a real server, and what may make a level invalid.
        command: the command line, for `environment.json`.

    Raises:
        SloBenchError: the experiment or the folder cannot be used.
    """
    options = options or CapacityOptions()
    if pool is not None and experiment.backend != SIMULATED:
        raise SloBenchError("a pool is for simulated levels; real servers are measured here")
    planned = _planned(experiment)
    search_options = _options(experiment, options)
    folder = Path(out) if out is not None else new_folder(f"capacity-{experiment.name}")
    cells = cells_in(folder) if resume else []
    with open_run_folder(
        folder,
        cells=cells,
        experiment_toml=planned.resolved.to_toml(),
        environment=environment(planned, command, CAPACITY_FILE),
        resume=resume,
    ) as held:
        memory = CapacityCheckpoint(
            held,
            cells,
            search_options,
            lazy=experiment.backend == SIMULATED,
            samples={_stem(spec): [] for spec in planned.cells},
        )
        if resume:
            memory.recall(options)
        try:
            backend = None
            if experiment.backend != SIMULATED:
                salted_plan = salted(planned.resolved, held.environment)
                backend = backend_of(salted_plan, senders, say)
            before = [] if options.warm_start is None else _neighbours_in(options.warm_start)
            searches = _Searches(
                experiment, planned, memory.options, memory, before, progress, backend
            )
            if pool is None:
                searches.here(ended)
            elif len(planned.cells) == 1:
                searches.alone(pool, ended)
            else:
                searches.side_by_side(pool)
        finally:
            memory.write()
    return CapacityResult(folder, tuple(searches.records[spec.cell] for spec in planned.cells))


def _planned(experiment: Experiment) -> ExperimentPlan:
    """One cell for each configuration, at rate 1; the experiment's own rates and seeds are kept."""
    experiment.check_effects()
    if experiment.replay_speeds is not None:
        raise SloBenchError(
            "capacity finds the rate itself: leave replay_speeds out; rates give the range to "
            "search"
        )
    if len(experiment.requests) > 1:
        raise SloBenchError("capacity takes one value of requests, the least in a run")
    single = {"rates": (1.0,), "seeds": 1, **without_length(experiment)}
    if any("concurrency" in arrivals for arrivals in experiment.arrivals):
        raise SloBenchError(
            "concurrency(…) sets the load itself and has no rate; choose another arrival process"
        )
    planned = plan(experiment.model_copy(update=single))
    for spec in planned.cells:
        _check_slo(spec)
    kept = {name: getattr(experiment, name) for name in single}
    kept["records"] = "none" if experiment.records == "auto" else planned.resolved.records
    return dataclasses.replace(planned, resolved=planned.resolved.model_copy(update=kept))


def _check_slo(spec: CellSpec) -> None:
    """Raise SloBenchError if no request of the workload has an SLO: every rate would meet it."""
    if parse_slo(spec.slo).entries:
        return
    sample = source(spec.workload).make(rate_rps=1.0, requests=_SLO_SAMPLE)
    if all(np.isinf(getattr(sample, column)).all() for column in SLO_COLUMNS.values()):
        raise SloBenchError(
            f"requests of {spec.workload.workload} have no SLO, which every rate would meet; give "
            "one (--slo ttft=1,tpot=0.15)"
        )


def _options(experiment: Experiment, capacity_options: CapacityOptions) -> SearchOptions:
    options, rates = SearchOptions.of(experiment, capacity_options), experiment.rates or ()
    if experiment.backend != SIMULATED and experiment.requests[0] is None:
        options = dataclasses.replace(options, requests=REAL_LEAST)
    if len(rates) < 2:
        return options
    return dataclasses.replace(options, low_rps=min(rates), high_rps=max(rates))


def start_rps(experiment: Experiment, spec: CellSpec, runner: LevelRunner) -> float:
    """Where a search begins that knows nothing of its like; a real server gets a few bursts."""
    rates = experiment.rates or ()
    if rates:
        return math.sqrt(min(rates) * max(rates))
    if experiment.backend != SIMULATED:
        if source(spec.workload).has_arrivals:
            return 1.0
        seed = experiment.seed + _BURST_SEEDS
        return BURST_SHARE * throughput_of_bursts(runner, first_seed=seed)
    if spec.workload.models is not None:
        return float(spec.instances)
    alone = estimated_capacity_rps(spec.workload, spec.placement, spec.seed)
    return alone * spec.instances * _START_SHARE


@dataclass
class _Searches:
    """The searches of one folder: those that begin where another ended come after it."""

    experiment: Experiment
    planned: ExperimentPlan
    options: SearchOptions
    memory: CapacityCheckpoint
    before: Sequence[Mapping[str, Any]]  # rows of searches in another folder
    progress: Callable[[CapacityProgress], None] | None
    backend: Backend | None  # None: simulated
    records: dict[str, CapacityRecord] = field(default_factory=dict)
    _telling: threading.Lock = field(default_factory=threading.Lock)

    def here(self, ended: Callable[[int, float], None] | None) -> None:
        """One after another, on as few starts of a server as there are configurations."""
        backend, cells = self.backend, self.planned.cells
        folder, records = self.memory.held.path, self.planned.resolved.records
        earlier: list[CellSpec] = []
        for group in [cells] if backend is None else grouped_by_start(backend, cells):
            with contextlib.ExitStack() as stack:
                server: CellServer = Simulator(folder, records)
                if backend is not None:
                    deployment = stack.enter_context(backend.started(group[0], folder))
                    server = RealServer(deployment, folder, records)
                for spec in group:
                    runner = CellRunner(spec, _stem(spec), server, self.memory.keep_row, ended)
                    self._search(spec, runner, self._model(spec, earlier), None)
                    earlier.append(spec)

    def alone(self, pool: WorkerPool, ended: Callable[[int, float], None] | None) -> None:
        """The only configuration: first in this process, then by the pool."""
        (spec,) = self.planned.cells
        server = Simulator(self.memory.held.path, self.planned.resolved.records)
        here = CellRunner(spec, _stem(spec), server, self.memory.keep_row, ended)
        self._search_by(pool, spec, None, here)

    def side_by_side(self, pool: WorkerPool) -> None:
        """As many at once as the pool has room for."""
        cells = self.planned.cells
        models = {s.cell: self._model(s, cells[:place]) for place, s in enumerate(cells)}
        waiting = list(cells)
        running: dict[Future[None], str] = {}
        with ThreadPoolExecutor(min(len(cells), pool.at_once)) as threads:
            try:
                while waiting or running:
                    for spec in waiting[:]:
                        model = models[spec.cell]
                        if model is None or model.cell in self.records:
                            waiting.remove(spec)
                            begun = threads.submit(self._search_by, pool, spec, model)
                            running[begun] = spec.cell
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        del running[future]
                        future.result()
            except BaseException:
                pool.stop()
                threads.shutdown(cancel_futures=True)
                raise

    def _search_by(
        self,
        pool: WorkerPool,
        spec: CellSpec,
        model: CellSpec | None,
        here: CellRunner | None = None,
    ) -> None:
        folder, records = self.memory.held.path, self.planned.resolved.records
        runner = PoolRunner(spec, _stem(spec), pool, folder, records, self.memory.keep_row, here)
        self._search(spec, runner, model, runner.expect)

    def _model(self, spec: CellSpec, earlier: Sequence[CellSpec]) -> CellSpec | None:
        """Where the search may begin: the first of the earlier ones with most in common."""
        if self.experiment.rates or not earlier:
            return None
        columns = _identity(spec.columns)
        return max(earlier, key=lambda other: _alike(columns, other.columns))

    def _search(
        self, spec: CellSpec, runner: LevelRunner, model: CellSpec | None, begin: Foresee | None
    ) -> None:
        name = _stem(spec)

        def watch(search: SearchProgress) -> None:
            if self.progress is not None:
                with self._telling:
                    number = len(self.records) + 1
                    total = len(self.planned.cells)
                    self.progress(CapacityProgress(name, number, total, search))

        columns = _identity(spec.columns)
        earlier_rows = [*self.before, *(() if model is None else self.records[model.cell].rows())]
        near: tuple[float, ...] = ()
        if not self.experiment.rates:
            near = _neighbours(columns, earlier_rows, self.options.targets)
        near = self.memory.neighbours.setdefault(name, near)
        known_runs = self.memory.remembering(name, runner, begin)
        first_rps = near[0] if near else start_rps(self.experiment, spec, known_runs)
        bursts = self.backend is not None and not self.experiment.rates
        search = search_cell(
            known_runs,
            spec,
            self.options,
            first_rps,
            near or ((first_rps,) if bursts else ()),
            self.experiment.requests[0],
            watch,
            known_runs.expect,
        )
        rows = [row for cell, row in self.memory.held.finished.items() if search_of(cell) == name]
        bands = {target: prediction_band(rows, target) for target in self.options.targets}
        record = CapacityRecord(name, columns, search, bands)
        self.memory.keep_result(record)
        self.records[spec.cell] = record


def prediction_band(
    rows: Sequence[Mapping[str, Any]], target: float
) -> tuple[float | None, float | None]:
    """Between which rates the capacity of the real server lies, by the bands of the runs (90 %).

    Where attainment at the ends of its band crosses the target, between rates that were tried; None
    where it crosses at none of them, or runs have no bands.
    """
    return (
        _crossing_rps(rows, "band_low_attainment", target),
        _crossing_rps(rows, "band_high_attainment", target),
    )


def _crossing_rps(rows: Sequence[Mapping[str, Any]], column: str, target: float) -> float | None:
    by_rate: dict[float, list[float]] = {}
    for row in rows:
        if row.get(column) is not None:
            by_rate.setdefault(row["rate_rps"], []).append(row[column])
    rates = sorted(by_rate)
    # Of runs of different lengths and seeds the means may rise and fall: attainment does not rise.
    shares = np.minimum.accumulate([np.mean(by_rate[rate]) for rate in rates])
    for index in range(1, len(rates)):
        if shares[index - 1] >= target > shares[index]:
            place = np.interp(-target, -shares[index - 1 : index + 1], rates[index - 1 : index + 1])
            return round(float(place), 9)
    return None


def search_cell(
    runner: LevelRunner,
    spec: CellSpec,
    options: SearchOptions,
    start_rps: float,
    neighbours: Sequence[float],
    most_rows: int | None,
    watch: Callable[[SearchProgress], None],
    foresee: Foresee | None = None,
) -> CapacitySearch:
    """The capacity of one cell, by rates that are drawn or, for a trace, by its own arrivals."""
    where = source(spec.workload)
    if not where.has_arrivals:
        return find_capacity(
            runner,
            start_rps=start_rps,
            options=options,
            neighbours=neighbours,
            watch=watch,
            foresee=foresee,
        )
    rows = len(where.make(rate_rps=1.0, seed=spec.seed))
    return find_trace_capacity(
        runner,
        start_rps=start_rps,
        options=options,
        requests=min(rows, most_rows or rows),
        watch=watch,
    )


def _stem(spec: CellSpec) -> str:
    """What begins the name of all cells of a search."""
    return spec.cell.replace(f"_rate-1_seed-{spec.seed}", "")


def _identity(columns: Mapping[str, Value]) -> dict[str, Value]:
    load = ("cell", "rate_rps", "replay_speed", "seed")
    return {name: value for name, value in columns.items() if name not in load}


def _neighbours_in(folder: Path) -> list[dict[str, Any]]:
    rows = read_capacity(folder)
    if not rows:
        raise SloBenchError(
            f"{folder} holds no capacity to start from: no finished {CAPACITY_FILE}"
        )
    return rows


def _neighbours(
    columns: Mapping[str, Value], rows: Sequence[Mapping[str, Any]], targets: Sequence[float]
) -> tuple[float, ...]:
    """Capacities of the configuration that has most in common with this one, its targets' last."""
    usable = [row for row in rows if row["capacity_rps"] and row["target"] in targets]
    best = max((_alike(columns, row) for row in usable), default=0)
    nearest = {r["target"]: r["capacity_rps"] for r in usable if _alike(columns, r) == best}
    return tuple(sorted(nearest.values()))


def _alike(columns: Mapping[str, Value], other: Mapping[str, Any]) -> int:
    """In how many of these columns the other has the same."""
    return sum(other.get(name) == value for name, value in columns.items())
