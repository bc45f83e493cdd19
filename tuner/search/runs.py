"""Runs of configurations, kept on disk as they end, so that none is ever made twice.

runs/<key>.jsonl   one line for each run of the configuration of that key, with its checksum and
                   that of what the configuration is
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from ...harness.experiments.execution.cells import CellSpec
from ...harness.experiments.execution.workers import WorkerPool
from ...harness.results.run_folder import Row
from ...workloads.checksums import crc32_of, sealed, unsealed
from ...workloads.errors import FileFormatError
from ...workloads.parsing import parse_json
from ..capacity.cells import CellRunner, CellServer
from ..capacity.remote_runner import SpeculativeRuns
from ..capacity.samples import LevelSample
from .serving import QuickSimulator
from .storage import cut_half_a_line

Ended = Callable[[int, float], None]  # requests ended, clock in seconds
Made = tuple[LevelSample, Row]
_CELL = "cell_crc32"
_TUPLES = ("batch_met", "batch_requests", "backlog")


@dataclass(frozen=True)
class Run:
    """One run at one rate: what capacity is judged by, and the figures of its cell."""

    sample: LevelSample
    figures: Mapping[str, float]


@dataclass
class Runs:
    """All runs of one configuration: a `LevelRunner` that remembers.

    `server` is asked for only when a run must be made, so that a real one is started only then.
    With a `pool` the simulator runs elsewhere, and `server` is never asked for.
    """

    path: Path
    spec: CellSpec
    server: Callable[[], CellServer]
    ended: Ended | None = None
    pool: WorkerPool | None = None
    _known: dict[tuple[float, int, int], Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pool, plain = self.pool, dataclasses.asdict(self.spec)
        self._elsewhere: SpeculativeRuns[Made] | None = (
            None if pool is None else SpeculativeRuns(lambda *run: pool.begin(quickly, plain, *run))
        )
        self._cell = crc32_of(json.dumps(plain, sort_keys=True, default=str).encode())
        for line in _lines(self.path, self._cell):
            sample = {**line["sample"], **{name: tuple(line["sample"][name]) for name in _TUPLES}}
            run = Run(LevelSample(**sample), line["figures"])
            self._known[line["rate_rps"], line["seed"], line["requests"]] = run

    @property
    def requests(self) -> int:
        """Of all runs of the configuration."""
        return sum(run.sample.requests for run in self._known.values())

    @property
    def wall_s(self) -> float:
        """What they took."""
        return sum(run.sample.wall_s for run in self._known.values())

    def level(self, rate_rps: float, seed: int, requests: int) -> Run:
        """The run, made if there is none yet."""
        asked = (rate_rps, seed, requests)
        if asked not in self._known:
            self._known[asked] = self._made(*asked)
        return self._known[asked]

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        """See `LevelRunner`."""
        return self.level(rate_rps, seed, requests).sample

    def expect(self, rate_rps: float, seeds: Iterable[int], requests: int) -> None:
        """These will be asked for: a pool makes those that are new meanwhile."""
        if self._elsewhere is not None:
            new = [seed for seed in seeds if (rate_rps, seed, requests) not in self._known]
            self._elsewhere.expect(rate_rps, new, requests)

    def _made(self, rate_rps: float, seed: int, requests: int) -> Run:
        if self._elsewhere is not None:
            sample, row = self._elsewhere.result(rate_rps, seed, requests)
        else:
            sample, row = _make(self.spec, self.server(), rate_rps, seed, requests, self.ended)
        figures = {name: value for name, value in row.items() if _is_figure(value)}
        line: dict[str, Any] = {"rate_rps": rate_rps, "seed": seed, "requests": requests}
        line |= {"sample": vars(sample), "figures": figures, _CELL: self._cell}
        text = json.dumps(sealed(line), allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        return Run(sample, figures)


def _make(
    spec: CellSpec,
    server: CellServer,
    rate_rps: float,
    seed: int,
    requests: int,
    ended: Ended | None = None,
) -> Made:
    rows: list[Row] = []
    runner = CellRunner(spec, spec.cell, server, lambda cell, row: rows.append(row), ended)
    return runner.run(rate_rps, seed, requests), rows[0]


def quickly(plain: Mapping[str, Any], rate_rps: float, seed: int, requests: int) -> Made:
    """One simulated run, on whichever machine."""
    return _make(CellSpec.from_plain(plain), QuickSimulator(), rate_rps, seed, requests)


def _is_figure(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _lines(path: Path, cell: str) -> list[dict[str, Any]]:
    """All whole lines; the last is torn where a process was killed as it wrote.

    Raises:
        FileFormatError: one was damaged, or is of another configuration than `cell` says.
    """
    if not path.is_file():
        return []
    with path.open("r+b") as file:
        cut_half_a_line(file)
        return [_line(path, number, line, cell) for number, line in enumerate(file, start=1)]


def _line(path: Path, number: int, text: bytes, cell: str) -> dict[str, Any]:
    try:
        line = parse_json(text.decode())
    except ValueError as error:
        raise FileFormatError(path, number, f"is not JSON: {error}") from error
    if not isinstance(line, dict) or unsealed(path, line).get(_CELL) != cell:
        raise FileFormatError(path, number, "is no run of this configuration")
    return line
