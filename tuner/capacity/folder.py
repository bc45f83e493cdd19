"""Capacity searches over the configurations of an experiment, kept in a run folder.

Beside what every run folder holds, whose cells are here the runs of the searches, there is

    capacity.json    what was asked, every run as the search saw it, and what was found

A search that is resumed is repeated with the runs it remembers, and goes on where they end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...harness.backends.base import Backend
from ...harness.cells import CellSpec, source
from ...harness.experiment import Experiment, environment, new_folder
from ...harness.load import estimated_capacity_rps
from ...harness.plan import SIMULATED, Plan, plan
from ...harness.store import Row, RunFolder, Value, open_run_folder, read_rows, write_whole
from ...workloads.errors import FileFormatError, SloBenchError
from .cells import CellRunner, RealServer, Server, Simulator
from .samples import LevelRunner, LevelSample
from .search import (
    Budget,
    CapacitySearch,
    SearchOptions,
    SearchProgress,
    find_capacity,
)
from .traces import find_trace_capacity

FILE = "capacity.json"
_SIMULATED_BUDGET = Budget(requests=120_000)
_REAL_BUDGET = Budget(requests=None, time_s=3600.0)
_SIMULATED_REQUESTS, _REAL_REQUESTS = 2000, 300  # of a run, at least
_SEEDS = 3
_START_SHARE = 0.6  # of the estimated capacity, which knows no SLO
_BETWEEN_WRITES_S = 1.0  # of simulated runs, which are sooner repeated than written


@dataclass(frozen=True)
class Found:
    """One configuration's search. `columns` say which: system, workload, model and so on."""

    name: str
    columns: Mapping[str, Value]
    search: CapacitySearch

    def rows(self) -> list[dict[str, Any]]:
        """One row for each target, as `slo-bench capacity --json` prints them."""
        levels = [
            {
                "rate_rps": level.rate_rps,
                "runs": len(level.samples),
                "valid_runs": len(level.valid),
                "requests": level.requests,
                "attainment": level.attainment if level.counted else None,
                "attainment_low": level.attainment_interval[0] if level.counted else None,
                "attainment_high": level.attainment_interval[1] if level.counted else None,
                "backlog_grows": level.growing,
            }
            for level in self.search.levels
        ]
        return [
            {
                "search": self.name,
                **self.columns,
                "target": one.target,
                "capacity_rps": one.capacity_rps,
                "low_rps": one.low_rps,
                "high_rps": one.high_rps if math.isfinite(one.high_rps) else None,
                "precise": one.precise,
                "requests_spent": self.search.requests_spent,
                "wall_s": self.search.wall_s,
                "stopped": self.search.stopped,
                "levels": levels,
            }
            for one in self.search.capacities
        ]


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
    found: tuple[Found, ...]

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all searches."""
        return [row for found in self.found for row in found.rows()]


@dataclass(frozen=True)
class Asked:
    """What is searched for, where the experiment does not say. None: see `search_capacity`."""

    targets: tuple[float, ...] = (0.9, 0.99)
    tolerance: float = 0.03
    max_requests: int | None = None
    max_time_s: float | None = None
    warm_start: Path | None = None


def search_capacity(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    asked: Asked | None = None,
    resume: bool = False,
    progress: Callable[[CapacityProgress], None] | None = None,
    ended: Callable[[int, float], None] | None = None,
    command: Sequence[str] = (),
) -> CapacityResult:
    """Find the capacity of every configuration of an experiment.

    The experiment's `rates` are the lowest and the highest that are tried (a single one is where
    the search begins), `requests` the least in a run (2,000; on a real server 300), `seeds` the
    runs of a level that follow each other (3). Each configuration may spend 120,000 requests,
    on a real server an hour, unless `asked` says otherwise.

    Args:
        experiment: what is searched.
        out: the folder, empty or new; by default a new one under `runs`.
        asked: targets, tolerance, budget.
        resume: go on with what an interrupted search left in `out`; the budget may be another.
        progress: called after every run.
        ended: called within a run with (requests ended, clock in seconds).
        command: what was typed, for `environment.json`.

    Raises:
        SloBenchError: the experiment or the folder cannot be used.
    """
    asked = asked or Asked()
    planned = _planned(experiment)
    options = _options(experiment, asked)
    folder = Path(out) if out is not None else new_folder(f"capacity-{experiment.name}")
    cells = _cells_in(folder) if resume else []
    with open_run_folder(
        folder,
        cells=cells,
        experiment_toml=planned.resolved.to_toml(),
        environment=environment(planned, command),
        resume=resume,
    ) as held:
        memory = _Memory.read(held, cells, asked) if resume else _Memory(held, cells, asked)
        memory.lazy = experiment.backend == SIMULATED
        try:
            found = _search_all(experiment, planned, options, asked, memory, progress, ended)
        finally:
            memory.write()
    return CapacityResult(folder, tuple(found))


def read_capacity(folder: Path) -> list[dict[str, Any]] | None:
    """The rows of the searches in a run folder; None if it holds none.

    Raises:
        FileFormatError: the file is no capacity.json.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    searches = _read(path)["searches"]
    return [row for search in searches for row in search.get("found") or ()]


def _planned(experiment: Experiment) -> Plan:
    """One cell for each configuration, at a rate that stands for all; what was asked is kept."""
    if experiment.speeds is not None:
        raise SloBenchError(
            "capacity finds the rate itself: leave speeds out; rates give the range to search"
        )
    if any(experiment.duration_s):
        raise SloBenchError("capacity chooses how long each run is: give requests, no duration_s")
    if len(experiment.requests) > 1:
        raise SloBenchError("capacity takes one value of requests, the least in a run")
    single = {"rates": (1.0,), "seeds": 1, "requests": (None,)}
    if any("concurrency" in arrivals for arrivals in experiment.arrivals):
        raise SloBenchError(
            "concurrency(…) sets the load itself and has no rate; choose another arrival process"
        )
    planned = plan(experiment.model_copy(update=single))
    kept = {name: getattr(experiment, name) for name in single}
    kept["records"] = "none" if experiment.records == "auto" else planned.resolved.records
    return dataclasses.replace(planned, resolved=planned.resolved.model_copy(update=kept))


def _options(experiment: Experiment, asked: Asked) -> SearchOptions:
    simulated = experiment.backend == SIMULATED
    budget = _SIMULATED_BUDGET if simulated else _REAL_BUDGET
    if asked.max_requests is not None or asked.max_time_s is not None:
        budget = Budget(asked.max_requests, asked.max_time_s)
    rates = experiment.rates or ()
    between = len(rates) > 1
    return SearchOptions(
        targets=asked.targets,
        tolerance=asked.tolerance,
        requests=experiment.requests[0] or (_SIMULATED_REQUESTS if simulated else _REAL_REQUESTS),
        seeds=experiment.seeds or _SEEDS,
        first_seed=experiment.seed,
        budget=budget,
        low_rps=min(rates) if between else 0.0,
        high_rps=max(rates) if between else math.inf,
    )


def _start_rps(experiment: Experiment, spec: CellSpec) -> float:
    rates = experiment.rates or ()
    if rates:
        return math.sqrt(min(rates) * max(rates))
    if experiment.backend != SIMULATED:
        return 1.0
    alone = estimated_capacity_rps(spec.workload, spec.placement, spec.seed)
    return alone * spec.instances * _START_SHARE


def _search_all(
    experiment: Experiment,
    planned: Plan,
    options: SearchOptions,
    asked: Asked,
    memory: _Memory,
    progress: Callable[[CapacityProgress], None] | None,
    ended: Callable[[int, float], None] | None,
) -> list[Found]:
    found: dict[str, Found] = {}
    before = [] if asked.warm_start is None else _neighbours_in(asked.warm_start)
    for group in _groups(experiment, planned):
        with _server(experiment, planned, group[0], memory.folder) as server:
            for spec in group:
                name = _stem(spec)

                def watch(search: SearchProgress, name: str = name) -> None:
                    if progress is not None:
                        number = len(found) + 1
                        progress(CapacityProgress(name, number, len(planned.cells), search))

                runner = CellRunner(spec, name, server, memory.keep_row, ended)
                columns = _identity(spec.columns)
                known = [*before, *(row for one in found.values() for row in one.rows())]
                search = _search(
                    memory.remembering(name, columns, runner),
                    spec,
                    options,
                    _start_rps(experiment, spec),
                    () if experiment.rates else _neighbours(columns, known, options.targets),
                    watch,
                )
                found[spec.cell] = Found(name, columns, search)
                memory.keep_found(found[spec.cell])
    return [found[spec.cell] for spec in planned.cells]


def _search(
    runner: LevelRunner,
    spec: CellSpec,
    options: SearchOptions,
    start_rps: float,
    neighbours: Sequence[float],
    watch: Callable[[SearchProgress], None],
) -> CapacitySearch:
    where = source(spec.workload)
    if not where.has_arrivals:
        return find_capacity(
            runner, start_rps=start_rps, options=options, neighbours=neighbours, watch=watch
        )
    rows = len(where.make(rate_rps=1.0, seed=spec.seed))
    asked_for = min(rows, spec.requests or rows)
    return find_trace_capacity(
        runner, start_rps=start_rps, options=options, requests=asked_for, watch=watch
    )


def _groups(experiment: Experiment, planned: Plan) -> list[list[CellSpec]]:
    """Configurations that share one start of a real server."""
    if experiment.backend == SIMULATED:
        return [list(planned.cells)]
    backend = _backend(planned)
    groups: dict[Hashable, list[CellSpec]] = {}
    for spec in planned.cells:
        backend.check(spec)
        groups.setdefault(backend.configuration(spec), []).append(spec)
    return list(groups.values())


def _backend(planned: Plan) -> Backend:
    from ...harness.backends.choose import backend_of

    return backend_of(planned.resolved)


@contextlib.contextmanager
def _server(
    experiment: Experiment, planned: Plan, spec: CellSpec, folder: Path
) -> Iterator[Server]:
    records = planned.resolved.records
    if experiment.backend == SIMULATED:
        yield Simulator(folder, records)
        return
    with _backend(planned).started(spec, folder) as deployment:
        yield RealServer(deployment, folder, records)


def _stem(spec: CellSpec) -> str:
    """What begins the name of all cells of a search."""
    return spec.cell.replace(f"_rate-1_seed-{spec.seed}", "")


def _identity(columns: Mapping[str, Value]) -> dict[str, Value]:
    load = ("cell", "rate_rps", "speed", "seed")
    return {name: value for name, value in columns.items() if name not in load}


def _neighbours_in(folder: Path) -> list[dict[str, Any]]:
    rows = read_capacity(folder)
    if not rows:
        raise SloBenchError(f"{folder} holds no capacity to start from: no finished {FILE}")
    return rows


def _neighbours(
    columns: Mapping[str, Value], known: Sequence[Mapping[str, Any]], targets: Sequence[float]
) -> tuple[float, ...]:
    """Capacities of the configuration that has most in common with this one, its targets' last."""

    def alike(row: Mapping[str, Any]) -> int:
        return sum(row.get(name) == value for name, value in columns.items())

    usable = [row for row in known if row["capacity_rps"] and row["target"] in targets]
    best = max(map(alike, usable), default=0)
    nearest = {row["target"]: row["capacity_rps"] for row in usable if alike(row) == best}
    return tuple(sorted(nearest.values()))


@dataclass
class _Memory:
    """The folder's runs: those of before are remembered, new ones are written."""

    held: RunFolder
    cells: list[str]  # which the folder shares
    asked: Asked
    samples: dict[str, list[LevelSample]] = field(default_factory=dict)
    columns: dict[str, dict[str, Value]] = field(default_factory=dict)
    found: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    lazy: bool = False
    written_s: float = -math.inf

    @classmethod
    def read(cls, held: RunFolder, cells: list[str], asked: Asked) -> _Memory:
        """What an interrupted search of the same experiment and targets left."""
        memory = cls(held, cells, asked)
        path = held.path / FILE
        if not path.is_file():
            return memory
        kept = _read(path)
        for name, now in (("targets", list(asked.targets)), ("tolerance", asked.tolerance)):
            if kept[name] != now:
                raise SloBenchError(
                    f"{held.path} was searched with {name} {kept[name]}, not {now}; "
                    "choose another folder with --out"
                )
        for search in kept["searches"]:
            memory.samples[search["search"]] = [_sample(run) for run in search["runs"]]
        return memory

    @property
    def folder(self) -> Path:
        return self.held.path

    def remembering(
        self, name: str, columns: Mapping[str, Value], runner: LevelRunner
    ) -> LevelRunner:
        """The runner, but for runs that are known."""
        self.columns[name] = dict(columns)
        return _Remembering(runner, self.samples.setdefault(name, []), self.note)

    def keep_row(self, cell: str, row: Row) -> None:
        if cell not in self.cells:
            self.cells.append(cell)
        self.held.finished[cell] = row

    def keep_found(self, found: Found) -> None:
        self.found[found.name] = found.rows()
        self.write()

    def note(self) -> None:
        """A run has been added."""
        if not self.lazy or time.monotonic() - self.written_s > _BETWEEN_WRITES_S:
            self.write()

    def write(self) -> None:
        """Put everything on disk; rows first, since samples without a row would be lost to it."""
        if not self.held.finished:
            return
        last = next(reversed(self.held.finished))
        self.held.add(last, self.held.finished[last])
        kept = {
            "targets": list(self.asked.targets),
            "tolerance": self.asked.tolerance,
            "searches": [
                {
                    "search": name,
                    "columns": self.columns.get(name),
                    "runs": [vars(sample) for sample in samples],
                    "found": self.found.get(name),
                }
                for name, samples in self.samples.items()
            ],
        }
        write_whole(self.folder / FILE, [json.dumps(kept, allow_nan=False).encode()])
        self.written_s = time.monotonic()


@dataclass(frozen=True)
class _Remembering:
    runner: LevelRunner
    samples: list[LevelSample]
    note: Callable[[], None]

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        for sample in self.samples:
            if (sample.rate_rps, sample.seed) == (rate_rps, seed) and sample.requests == requests:
                return sample
        sample = self.runner.run(rate_rps, seed, requests)
        self.samples.append(sample)
        self.note()
        return sample


def _cells_in(folder: Path) -> list[str]:
    table = folder / "cells.csv"
    return [str(row["cell"]) for row in read_rows(table)] if table.is_file() else []


def _sample(plain: dict[str, Any]) -> LevelSample:
    for name in ("batch_met", "batch_requests", "backlog"):
        plain[name] = tuple(plain[name])
    return LevelSample(**plain)


def _read(path: Path) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
    if not isinstance(kept, dict) or "searches" not in kept:
        raise FileFormatError(path, None, "is not what a capacity search writes")
    return kept
