"""`capacity.json`: what searches were asked, every run as they saw it, and what they found.

A search that is resumed is repeated with the runs it remembers, and goes on where they end.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...harness.results.capacity_file import FILE, check_rows, read_searches
from ...harness.results.run_folder import EXPERIMENT, Row, RunFolder, Value, read_rows, write_whole
from ...workloads.checksums import sealed
from ...workloads.errors import SloBenchError
from .asked import Asked
from .cells import search_of
from .options import Budget, CapacitySearch
from .samples import LevelRunner, LevelSample

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
                "invalid_because": level.invalid_because,
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


def read_capacity(folder: Path) -> list[dict[str, Any]] | None:
    """The rows of the searches in a run folder; None if it holds none.

    Raises:
        FileFormatError: the file is no capacity.json.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    searches = read_searches(path)["searches"]
    return [row for search in searches for row in search.get("found") or ()]


@dataclass
class Memory:
    """The folder's runs: those of before are remembered, new ones are written; from any thread.

    `cells` is the list of cells that `held` has, those of one search after those of the one that
    `samples` names before it. `neighbours` and `shares_of` are what a search
    began with, which must be the same when it is repeated; a `lazy` memory writes now and then.
    """

    held: RunFolder
    cells: list[str]
    asked: Asked
    shares_of: Budget
    lazy: bool = False
    samples: dict[str, list[LevelSample]] = field(default_factory=dict)
    neighbours: dict[str, tuple[float, ...]] = field(default_factory=dict)
    found: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    written_s: float = -math.inf
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def recall(self) -> None:
        """Take in what an interrupted search left, if any.

        Raises:
            SloBenchError: it was asked something else.
        """
        path = self.held.path / FILE
        for problem in self.held.damaged.values():
            raise problem
        if not path.is_file():
            return
        kept = read_searches(path)
        for name, now in (
            ("targets", list(self.asked.targets)),
            ("tolerance", self.asked.tolerance),
        ):
            if kept[name] != now:
                raise SloBenchError(
                    f"{self.held.path} was searched with {name} {kept[name]}, not {now}; "
                    "choose another folder with --out"
                )
        self.shares_of = Budget(**kept["shares_of"])
        for search in kept["searches"]:
            self.samples[search["search"]] = [_sample(run) for run in search["runs"]]
            self.neighbours[search["search"]] = tuple(search["neighbours"])
        check_rows(self.held.path, len(self.held.finished))

    def remembering(self, name: str, runner: LevelRunner) -> LevelRunner:
        """The runner, but for runs that are known."""
        return _Remembering(runner, self.samples.setdefault(name, []), self._add)

    def knows(self, name: str, rate_rps: float, seed: int, requests: int) -> bool:
        """Whether that run of that search is remembered."""
        return _known(self.samples.get(name, ()), rate_rps, seed, requests) is not None

    def keep_row(self, cell: str, row: Row) -> None:
        """A run's cell has its details on disk."""
        with self._lock:
            if cell not in self.cells:
                self.cells.append(cell)
            self.held.keep(cell, row)

    def keep_found(self, found: Found) -> None:
        """A search has ended."""
        with self._lock:
            self.found[found.name] = found.rows()
            self.write()

    def _add(self, samples: list[LevelSample], sample: LevelSample) -> None:
        with self._lock:
            samples.append(sample)
            if not self.lazy or time.monotonic() - self.written_s > _BETWEEN_WRITES_S:
                self.write()

    def write(self) -> None:
        """Put everything on disk; rows first, since samples without a row would be lost to it."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if not self.held.finished:
            return
        place = {name: number for number, name in enumerate(self.samples)}
        self.cells.sort(key=lambda cell: place.get(search_of(cell), len(place)))
        self.held.write()
        kept = {
            "targets": list(self.asked.targets),
            "tolerance": self.asked.tolerance,
            "shares_of": vars(self.shares_of),
            "searches": [
                {
                    "search": name,
                    "neighbours": self.neighbours.get(name, ()),
                    "runs": [vars(sample) for sample in samples],
                    "found": self.found.get(name),
                }
                for name, samples in self.samples.items()
                if name in self.neighbours
            ],
        }
        asked = self.held.path / EXPERIMENT
        text = json.dumps(sealed(kept, asked), allow_nan=False)
        write_whole(self.held.path / FILE, [text.encode()])
        self.written_s = time.monotonic()


@dataclass(frozen=True)
class _Remembering:
    runner: LevelRunner
    samples: list[LevelSample]
    add: Callable[[list[LevelSample], LevelSample], None]

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        sample = _known(self.samples, rate_rps, seed, requests)
        if sample is None:
            sample = self.runner.run(rate_rps, seed, requests)
            self.add(self.samples, sample)
        return sample


def _known(
    samples: Iterable[LevelSample], rate_rps: float, seed: int, requests: int
) -> LevelSample | None:
    for sample in samples:
        if (sample.rate_rps, sample.seed) == (rate_rps, seed) and sample.requests == requests:
            return sample
    return None


def cells_in(folder: Path) -> list[str]:
    """The cells that a run folder has so far."""
    table = folder / "cells.csv"
    return [str(row["cell"]) for row in read_rows(table)] if table.is_file() else []


def _sample(plain: dict[str, Any]) -> LevelSample:
    for name in ("batch_met", "batch_requests", "backlog"):
        plain[name] = tuple(plain[name])
    return LevelSample(**plain)
