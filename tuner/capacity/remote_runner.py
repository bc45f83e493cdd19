"""Levels that other machines simulate, those that are foreseen before they are asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...harness.experiments.execution.cells import CellSpec
from ...harness.experiments.execution.workers import WorkerPool, packed, unpack
from ...harness.results.run_folder import Row
from .cells import CellRunner, Simulator
from .samples import LevelSample

Level = tuple[LevelSample, str, Row, Mapping[str, bytes]]
T = TypeVar("T")


@dataclass(frozen=True)
class SpeculativeRuns(Generic[T]):
    """Runs (rate in req/s, seed, requests) that are under way before they are asked for.

    What was begun, and is never asked for, leaves nothing behind.
    """

    begin: Callable[[float, int, int], Future[T]]
    _begun: dict[tuple[float, int, int], Future[T]] = field(default_factory=dict)

    def expect(self, rate_rps: float, seeds: Iterable[int], requests: int) -> None:
        """These will be asked for."""
        for seed in seeds:
            run = (rate_rps, seed, requests)
            if run not in self._begun:
                self._begun[run] = self.begin(*run)

    def result(self, rate_rps: float, seed: int, requests: int) -> T:
        """What came of a run."""
        run = (rate_rps, seed, requests)
        return (self._begun.pop(run, None) or self.begin(*run)).result()


class PoolRunner:
    """A `LevelRunner` like `CellRunner`, whose levels a pool simulates."""

    def __init__(
        self,
        template: CellSpec,
        stem: str,
        pool: WorkerPool,
        folder: Path,
        records: str,
        keep: Callable[[str, Row], None],
    ) -> None:
        self._folder = folder
        self._keep = keep
        given = (asdict(template), stem, records)
        self._levels: SpeculativeRuns[Level] = SpeculativeRuns(
            lambda *run: pool.begin(simulated, *given, *run)
        )
        self.expect = self._levels.expect

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        """See `LevelRunner`."""
        sample, cell, row, files = self._levels.result(rate_rps, seed, requests)
        unpack(files, self._folder)
        self._keep(cell, row)
        return sample


def simulated(
    template: Mapping[str, Any], stem: str, records: str, rate_rps: float, seed: int, requests: int
) -> Level:
    """One level, on whichever machine: its sample, and its cell with its row and its details."""
    with tempfile.TemporaryDirectory(prefix="slo-bench-") as made:
        folder = Path(made)
        rows: list[tuple[str, Row]] = []
        runner = CellRunner(
            CellSpec.from_plain(template),
            stem,
            Simulator(folder, records),
            keep=lambda cell, row: rows.append((cell, row)),
        )
        sample = runner.run(rate_rps, seed, requests)
        return sample, *rows[0], packed(folder)
