"""Levels that other machines simulate, those that are foreseen before they are asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...harness.cells import CellSpec
from ...harness.store import Row
from ...harness.workers import Pool, packed, unpack
from .cells import CellRunner, Simulator
from .samples import LevelSample

Run = tuple[float, int, int]  # rate in req/s, seed, requests
Level = tuple[LevelSample, str, Row, Mapping[str, bytes]]


@dataclass(frozen=True)
class PoolRunner:
    """A `LevelRunner` like `CellRunner`, whose levels a pool simulates.

    What was begun because it was foreseen, and is never asked for, leaves nothing behind.
    """

    template: CellSpec
    stem: str
    pool: Pool
    folder: Path
    records: str
    keep: Callable[[str, Row], None]
    _begun: dict[Run, Future[Level]] = field(default_factory=dict)

    def begin(self, rate_rps: float, seeds: Sequence[int], requests: int) -> None:
        """These will be asked for."""
        for seed in seeds:
            if (rate_rps, seed, requests) not in self._begun:
                self._begun[rate_rps, seed, requests] = self._level(rate_rps, seed, requests)

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        """See `LevelRunner`."""
        begun = self._begun.pop((rate_rps, seed, requests), None)
        level = begun or self._level(rate_rps, seed, requests)
        sample, cell, row, files = level.result()
        unpack(files, self.folder)
        self.keep(cell, row)
        return sample

    def _level(self, *run: float) -> Future[Level]:
        return self.pool.begin(simulated, asdict(self.template), self.stem, self.records, *run)


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
