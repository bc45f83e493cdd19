"""Runs of tuned configurations, kept on disk so that each is made only once; and their servers.

runs/<key>.jsonl   one line for each run of the configuration of that key
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from ...harness.experiments.execution.cell_specs import CellSpec
from ...harness.experiments.execution.workers import WorkerPool
from ...harness.experiments.experiment import Experiment, backend_of, salted
from ...harness.results.run_checkpoint import Checkpoint
from ...harness.results.run_folder import PROMPT_SALT, Row
from ...harness.servers.launch.backend_names import SIMULATED
from ...workloads.errors import SloBenchError
from ..capacity.capacity_cells import (
    CellRunner,
    CellServer,
    Ended,
    PoolRunner,
    RealServer,
    Simulator,
)
from ..capacity.level_samples import LevelSample, faults_of, sample_from_plain

FAULTS = "faults"  # figure of a trial: failed requests and longer answers, where there are any


class InfeasibleError(SloBenchError):
    """The configuration cannot be deployed."""


@dataclass(frozen=True)
class Run:
    """One run under one load: what capacity is judged by, and the figures of its cell."""

    sample: LevelSample
    figures: Mapping[str, float]


@dataclass
class Runs:
    """All runs of one configuration: a `LevelRunner` that reads known runs from its file.

    `server` is called only when a run must be made, so a real server is started only then. With a
    `pool` its processes simulate, and `server` is never called. `simulator` (`simulator_of`) is
    that of the runs in the file, too; empty where they are measured.

    Raises:
        SloBenchError: the file's runs are of another simulator.
    """

    path: Path
    spec: CellSpec
    server: Callable[[], CellServer]
    ended: Ended | None = None
    pool: WorkerPool | None = None
    simulator: Mapping[str, object] = field(default_factory=dict)
    _known: dict[tuple[float | None, int, int], Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows: list[Row] = []
        self._remote: PoolRunner | None = None
        if self.pool is not None:
            self._remote = PoolRunner(
                self.spec, self.spec.cell, self.pool, None, "none", self._keep_row
            )
        settings = json.dumps(self.spec.plain(), sort_keys=True, default=str)
        self._checkpoint = Checkpoint(self.path, settings)
        for line in self._checkpoint.read():
            self._checkpoint.check_simulator(line, self.simulator)
            run = Run(sample_from_plain(line["sample"]), line["figures"])
            self._known[line["rate_rps"], line["seed"], line["requests"]] = run

    @property
    def requests(self) -> int:
        """Total requests of all runs of the configuration."""
        return sum(run.sample.requests for run in self._known.values())

    @property
    def results(self) -> frozenset[Hashable]:
        """What was run, and the requests in SLO by batch: the same of configurations that make no
        difference.
        """
        return frozenset((key, run.sample.batch_met) for key, run in self._known.items())

    @property
    def wall_s(self) -> float:
        """Total duration of the runs in seconds."""
        return sum(run.sample.wall_s for run in self._known.values())

    @property
    def faults(self) -> dict[str, Any]:
        """Faults of all runs, as by `faults_of`; empty where there are none."""
        faults = faults_of([run.sample for run in self._known.values()])
        return faults if faults["failed"] or faults["surplus_outputs"] else {}

    def level(self, rate_rps: float | None, seed: int, requests: int) -> Run:
        """The run, made if there is none yet; `rate_rps` None: arrivals have no rate.

        Raises:
            InfeasibleError: models with requests stood on no GPU; leaving them out sheds load.
        """
        key = (rate_rps, seed, requests)
        if key not in self._known:
            self._known[key] = self._made(*key)
        if without := self._known[key].figures.get("models_unplaced"):
            models = f"{without:.0f} model{'s' * (without > 1)}"
            raise InfeasibleError(f"no GPU had room for {models}")
        return self._known[key]

    def run(self, rate_rps: float | None, seed: int, requests: int) -> LevelSample:
        """The sample of the run, which is made unless it is known."""
        return self.level(rate_rps, seed, requests).sample

    def expect(self, rate_rps: float | None, seeds: Iterable[int], requests: int) -> None:
        """Begin the runs that are new in the pool, if there is one, before they are needed."""
        if self._remote is not None:
            new = [seed for seed in seeds if (rate_rps, seed, requests) not in self._known]
            self._remote.expect(rate_rps, new, requests)

    def _keep_row(self, cell: str, row: Row) -> None:
        self._rows.append(row)

    def _made(self, rate_rps: float | None, seed: int, requests: int) -> Run:
        runner = self._remote or CellRunner(
            self.spec, self.spec.cell, self.server(), self._keep_row, self.ended
        )
        sample = runner.run(rate_rps, seed, requests)
        row = self._rows.pop()
        figures = {name: value for name, value in row.items() if _is_figure(value)}
        run = {"rate_rps": rate_rps, "seed": seed, "requests": requests}
        kept = {**run, "sample": vars(sample), "figures": figures}
        self._checkpoint.append(kept, self.simulator)
        return Run(sample, figures)


def _is_figure(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass
class Servers:
    """At most one running server, kept while configurations can share it.

    Leaving the block stops it. Server logs are kept in `folder`, under the cell's name. `say` is
    called with what goes on: a server starts, it is probed, it stops.
    """

    folder: Path
    prompt_salt: str = field(default_factory=lambda: secrets.token_hex(8))
    say: Callable[[str], None] = lambda line: None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _running: tuple[Hashable, CellServer] | None = None

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server that runs, if one does."""
        if self._running is not None:
            self.say("stopping the server")
        self._running = None
        self._stack.close()
        self._stack = contextlib.ExitStack()

    def of(self, experiment: Experiment, spec: CellSpec) -> CellServer:
        """The server for a configuration, restarted if the running one has other settings.

        Raises:
            ServerError: it did not start.
        """
        if experiment.backend == SIMULATED:
            return Simulator()
        salted_experiment = salted(experiment, {PROMPT_SALT: self.prompt_salt})
        backend = backend_of(salted_experiment, say=self.say)
        key = (backend.name, repr(backend), backend.configuration(spec))
        if self._running is not None and self._running[0] == key:
            return self._running[1]
        self.stop()
        folder = self.folder / spec.cell
        deployment = self._stack.enter_context(backend.started(spec, folder))
        server = RealServer(deployment, folder, "none")
        self._running = (key, server)
        return server
