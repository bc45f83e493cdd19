"""The levels of a plan: deployments at a rate, judged here or by the processes of a pool, and kept.

Levels may be begun before it is certain that they are needed. A level's verdict depends on nothing
but the level, so a plan is the same with and without a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from ...harness.experiments.execution.specs import CellSpec
from ...harness.experiments.execution.workers import WorkerPool
from ...harness.results.checkpoint import Checkpoint
from ..capacity.cells import CellRunner, Simulator
from ..capacity.samples import LevelRunner
from .verdict import RunLength, Verdict, verdict

Say = Callable[[str], None]
RunnerOf = Callable[[CellSpec], LevelRunner]


def simulated_runner(spec: CellSpec) -> LevelRunner:
    """Simulates a cell at the rates that are asked for."""
    return CellRunner(spec, "plan", Simulator(), lambda cell, row: None)


@dataclass(frozen=True)
class DeploymentLevel:
    """A deployment at a rate, in runs of a length from a seed on."""

    name: str  # of the deployment
    spec: CellSpec
    rate_rps: float
    target: float
    first_seed: int
    length: RunLength

    @property
    def line(self) -> str:
        """A line that says what is simulated; no other level has it."""
        return f"{self.name} at {self.rate_rps:.3g} req/s, runs of {self.length.requests:,}"


def judged(level: DeploymentLevel, runner_of: RunnerOf = simulated_runner) -> Verdict:
    """Run a level until its verdict is certain."""
    runner = runner_of(level.spec)
    return verdict(runner, level.rate_rps, level.target, level.first_seed, level.length)


class Levels:
    """Verdicts by level: those that a plan's folder holds, and new ones, which are kept in it."""

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        runner_of: RunnerOf,
        pool: WorkerPool | None,
        say: Say,
    ) -> None:
        self._checkpoint = checkpoint
        self._runner_of = runner_of
        self._pool = pool
        self._say = say
        self._known: dict[str, Verdict] = {}
        self._begun: dict[str, Future[Verdict]] = {}
        if checkpoint is not None and checkpoint.path.exists():
            self._known = {one["name"]: Verdict(**one["level"]) for one in checkpoint.read()}

    def begin(self, level: DeploymentLevel) -> None:
        """Start a level in the pool, if there is one and the level is not known or started."""
        line = level.line
        if self._pool is not None and line not in self._known and line not in self._begun:
            self._begun[line] = self._pool.begin(judged, level)

    def carried(self, level: DeploymentLevel) -> bool:
        """Whether the level is known by now, and carries its rate."""
        line = level.line
        if line in self._known:
            return self._known[line].carries
        begun = self._begun.get(line)
        if begun is None or not begun.done() or begun.exception() is not None:
            return False  # an error of a level that is needed comes from `verdict`
        return begun.result().carries

    def drop_begun(self) -> None:
        """Give up the levels that were started and asked for by nobody."""
        for begun in self._begun.values():
            begun.cancel()
        self._begun.clear()

    def verdict(self, level: DeploymentLevel) -> Verdict:
        """The verdict on a level, which is kept in the folder."""
        line = level.line
        if line not in self._known:
            self._say(line)
            self.begin(level)
            begun = self._begun.pop(line, None)
            found = judged(level, self._runner_of) if begun is None else begun.result()
            self._known[line] = found
            if self._checkpoint is not None:
                self._checkpoint.append({"name": line, "level": asdict(found)})
        return self._known[line]
