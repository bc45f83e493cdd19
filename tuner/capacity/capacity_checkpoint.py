"""`capacity.json`: the settings of capacity searches, all their runs and their results.

A resumed search repeats its steps with the runs in the file, and continues after the last of them.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...harness.results.run_checkpoint import check_settings
from ...harness.results.run_folder import (
    CAPACITY_FILE,
    EXPERIMENT,
    Row,
    RunFolder,
    Value,
    check_rows,
    read_rows,
    read_searches,
)
from ...workloads.checksums import sealed
from ...workloads.parsing import finite
from ...workloads.whole_file import write_whole
from .capacity_cells import search_of
from .capacity_options import CapacityOptions
from .capacity_search import Foresee
from .level_samples import LevelRunner, LevelSample, faults_of, sample_from_plain
from .search_options import Budget, Capacity, CapacitySearch, SearchOptions

_NEAR = 1.25  # times the interval's ends: rates that decide it
_MUCH = 0.25  # of the misses that a target allows
_BETWEEN_WRITES_S = 5.0  # of simulated runs, which are sooner repeated than written


@dataclass(frozen=True)
class CapacityRecord:
    """One configuration's search. `columns` identify it: system, workload, model and so on."""

    name: str
    columns: Mapping[str, Value]
    search: CapacitySearch
    bands: Mapping[float, tuple[float | None, float | None]] = field(default_factory=dict)

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
                "sustained": level.sustained,
                "invalid_because": level.invalid_because,
                "failed": sum(sample.failed for sample in level.samples),
            }
            for level in self.search.levels
        ]
        runs = [sample for level in self.search.levels for sample in level.samples]
        faults = faults_of(runs)
        return [
            {
                "search": self.name,
                **self.columns,
                "target": capacity.target,
                "capacity_rps": capacity.capacity_rps,
                "low_rps": capacity.low_rps,
                "high_rps": finite(capacity.high_rps),
                "band_low_rps": self.bands.get(capacity.target, (None, None))[0],
                "band_high_rps": self.bands.get(capacity.target, (None, None))[1],
                "precise": capacity.precise,
                "outcome": capacity.outcome.value,
                "limited_by": capacity.limited_by,
                "requests_spent": self.search.requests_spent,
                "wall_s": self.search.wall_s,
                "stopped": self.search.stopped,
                **faults,
                "faults_decide": _faults_decide(capacity, levels),
                "levels": levels,
            }
            for capacity in self.search.capacities
        ]


def _faults_decide(capacity: Capacity, levels: Sequence[Mapping[str, Any]]) -> bool:
    """Whether failed requests are much of what may miss the target near the capacity."""
    low_rps, high_rps = capacity.low_rps / _NEAR, capacity.high_rps * _NEAR
    near = [level for level in levels if low_rps <= level["rate_rps"] <= high_rps]
    requests = sum(level["requests"] for level in near)
    failed = sum(level["failed"] for level in near)
    return bool(failed > _MUCH * (1 - capacity.target) * requests)


def read_capacity(folder: Path) -> list[dict[str, Any]] | None:
    """The rows of the searches in a run folder; None if it holds none.

    Raises:
        FileFormatError: the file is no capacity.json.
    """
    path = folder / CAPACITY_FILE
    if not path.is_file():
        return None
    searches = read_searches(path)["searches"]
    return [row for search in searches for row in search.get("found") or ()]


@dataclass
class CapacityCheckpoint:
    """Runs of all searches in a folder: earlier ones are read, new ones are written; thread-safe.

    `cells` is the list of cells of `held`, in the order of the searches in `samples`. `neighbours`
    and `options.shares_of` remain those of the first run when a search is resumed. If `lazy`, the
    file is written every five seconds and at the end.
    """

    held: RunFolder
    cells: list[str]
    options: SearchOptions
    lazy: bool = False
    samples: dict[str, list[LevelSample]] = field(default_factory=dict)
    neighbours: dict[str, tuple[float, ...]] = field(default_factory=dict)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    written_s: float = -math.inf
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def recall(self, capacity_options: CapacityOptions) -> None:
        """Read the runs of an interrupted search, if there are any, and its options: targets,
        tolerance and budget are the search's where `capacity_options` does not set them.

        Raises:
            SloBenchError: it had other targets or another tolerance, or a file is damaged.
        """
        path = self.held.path / CAPACITY_FILE
        for problem in self.held.damaged.values():
            raise problem
        if not path.is_file():
            return
        kept = read_searches(path)
        if "targets" not in capacity_options.model_fields_set:
            self.options = replace(self.options, targets=tuple(kept["targets"]))
        if "tolerance" not in capacity_options.model_fields_set:
            self.options = replace(self.options, tolerance=kept["tolerance"])
        check_settings(path, _settings(**kept), _settings(**vars(self.options)))
        first = Budget(**kept["shares_of"])
        last = Budget(**kept.get("budget", kept["shares_of"]))  # older files lack it
        again = self.options.budget if capacity_options.has_budget else last
        self.options = replace(self.options, budget=again, shares_of=first)
        for search in kept["searches"]:
            self.samples[search["search"]] = [sample_from_plain(run) for run in search["runs"]]
            self.neighbours[search["search"]] = tuple(search["neighbours"])
        check_rows(self.held.path, len(self.held.finished))

    def remembering(
        self, name: str, runner: LevelRunner, expect: Foresee | None = None
    ) -> RememberingRunner:
        """A runner that makes only the runs that this search has not made before."""
        return RememberingRunner(runner, self.samples.setdefault(name, []), self._add, expect)

    def keep_row(self, cell: str, row: Row) -> None:
        """Add the row of a cell, whose details are on disk."""
        with self._lock:
            if cell not in self.cells:
                self.cells.append(cell)
            self.held.keep(cell, row)

    def keep_result(self, record: CapacityRecord) -> None:
        """Add the result of a finished search and write the file."""
        with self._lock:
            self.results[record.name] = record.rows()
            self.write()

    def _add(self, samples: list[LevelSample], sample: LevelSample) -> None:
        with self._lock:
            samples.append(sample)
            if not self.lazy or time.monotonic() - self.written_s > _BETWEEN_WRITES_S:
                self.write()

    def write(self) -> None:
        """Write all files; rows first, because `capacity.json` must not have runs without a row."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if not self.held.finished:
            return
        place = {name: number for number, name in enumerate(self.samples)}
        self.cells.sort(key=lambda cell: place.get(search_of(cell), len(place)))
        self.held.write()
        kept = {
            "targets": list(self.options.targets),
            "tolerance": self.options.tolerance,
            "budget": vars(self.options.budget),
            "shares_of": vars(self.options.shares_of or self.options.budget),
            "searches": [
                {
                    "search": name,
                    "neighbours": self.neighbours.get(name, ()),
                    "runs": [vars(sample) for sample in samples],
                    "found": self.results.get(name),
                }
                for name, samples in self.samples.items()
                if name in self.neighbours
            ],
        }
        experiment_file = self.held.path / EXPERIMENT
        text = json.dumps(sealed(kept, experiment_file), allow_nan=False)
        write_whole(self.held.path / CAPACITY_FILE, [text.encode()])
        self.written_s = time.monotonic()


@dataclass(frozen=True)
class RememberingRunner:
    """A `LevelRunner` that returns samples of earlier runs; `runner` makes new ones."""

    runner: LevelRunner
    samples: list[LevelSample]
    add: Callable[[list[LevelSample], LevelSample], None]
    begin: Foresee | None = None  # starts runs before they are needed

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        """The sample of an earlier run, or of a new one, which is kept."""
        sample = self._known(rate_rps, seed, requests)
        if sample is None:
            sample = self.runner.run(rate_rps, seed, requests)
            self.add(self.samples, sample)
        return sample

    def expect(self, rate_rps: float, seeds: Iterable[int], requests: int) -> None:
        """Start the runs that have not been made yet."""
        if self.begin is not None:
            new = [seed for seed in seeds if self._known(rate_rps, seed, requests) is None]
            self.begin(rate_rps, new, requests)

    def _known(self, rate_rps: float, seed: int, requests: int) -> LevelSample | None:
        """The run, or the shorter one for which the time of an earlier search sufficed."""
        runs = [run for run in self.samples if (run.rate_rps, run.seed) == (rate_rps, seed)]
        return max(
            (run for run in runs if run.requests <= requests),
            key=lambda run: run.requests,
            default=None,
        )


def _settings(targets: Iterable[float], tolerance: float, **_: object) -> str:
    """The settings of a search that must be the same when it is resumed."""
    return f"targets = {sorted(targets)}\ntolerance = {tolerance}"


def cells_in(folder: Path) -> list[str]:
    """Names of the finished cells in a run folder."""
    table = folder / "cells.csv"
    return [str(row["cell"]) for row in read_rows(table)] if table.is_file() else []
