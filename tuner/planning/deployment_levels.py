"""The levels of a plan: deployments at a rate, judged here or by the processes of a pool, and kept.

Levels may be begun before it is certain that they are needed. A level's verdict depends on nothing
but the level, so a plan is the same with and without a pool.

A deployment carries a rate or not: runs of a chosen length are made until the verdict is certain.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...harness.experiments.execution.cell_specs import CellSpec
from ...harness.experiments.execution.experiment_plan import step_times_of
from ...harness.experiments.execution.workers import WorkerPool
from ...harness.experiments.experiment import simulator_of
from ...harness.results.request_fold import RequestSample
from ...harness.results.run_checkpoint import Checkpoint
from ...harness.results.run_folder import Row
from ...harness.results.stationarity import SETTLED_HORIZONS, drifts, requests_in, starves
from ..capacity.capacity_cells import CellRunner, Simulator
from ..capacity.curve import CapacityLevel
from ..capacity.level_samples import LevelRunner, LevelSample, sample_from_plain, wilson_interval

_MOST_RUNS = 6
_MISSES_AFTER = 3  # runs, a target that their attainment lies below
_LONG_ENOUGH = 0.9  # of the needed requests: these grow a little with the run
_LONGEST = 8  # times the length of the first run


@dataclass(frozen=True)
class RunLength:
    """How long runs are, and how many there are at least.

    A run has `requests` requests, more where they arrive in fewer than `horizons` horizons of the
    SLO or mean times in the system. There are at most `most_runs`. `proving`: a rate is carried
    only where runs show that the system keeps up, which takes long ones.
    """

    requests: int
    horizons: float
    runs: int = 1
    most_runs: int = _MOST_RUNS
    proving: bool = False


LOOK = RunLength(1000, 0.0, most_runs=1)
SEARCH = RunLength(2000, 2 * SETTLED_HORIZONS)
LIGHT = RunLength(300, 2 * SETTLED_HORIZONS)
CONFIRM = RunLength(8000, 4 * SETTLED_HORIZONS, runs=3, proving=True)


@dataclass(frozen=True)
class Verdict:
    """Attainment over all runs at a rate, with its 95 % interval, and whether it is carried."""

    carries: bool
    attainment: float
    low: float
    high: float
    runs: int
    requests: int  # of all runs
    samples: tuple[LevelSample, ...] = ()  # the runs
    # Sample and figures of the first proving run, where it was simulated; no folder holds them.
    first_run: tuple[RequestSample, Row] | None = field(default=None, compare=False, repr=False)


Say = Callable[[str], None]
RunnerOf = Callable[[CellSpec], LevelRunner]


def simulated_runner(
    spec: CellSpec, simulator: Simulator | None = None, rows: list[Row] | None = None
) -> LevelRunner:
    """Simulates a cell at the rates that are asked for, without a control variate; `rows` receives
    the figures of each run.
    """
    keep = None if rows is None else lambda _, row: rows.append(row)
    return CellRunner(spec, "plan", simulator or Simulator(), keep, controlled=False)


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
        return f"{self.name} at {self.rate_rps:.6g} req/s, runs of {self.length.requests:,}"


def judged(level: DeploymentLevel, runner_of: RunnerOf = simulated_runner) -> Verdict:
    """Run a level on seeds from its first one on, at most six times, until the verdict is certain.

    Where the runs are too short to show whether the system keeps up, the next one is twice as long;
    those after it are as long as the shortest that is settled.
    A first run with less than `_LONG_ENOUGH` of the requests that it needs is made again, longer;
    so is one that its first half alone may fail, as of a cold cache, at most `_LONGEST` times as
    long.

    The rate is carried if the interval lies above the target in settled runs, of which proving ones
    show that the system keeps up. It is not if the interval lies below, or the attainment of
    `_MISSES_AFTER` runs; if the backlog grows, attainment drifts during a run, or requests starve.
    What is still undecided after the last run is not carried.
    """
    runner, length = runner_of(level.spec), level.length
    kept, rows = list[tuple[float, RequestSample]](), list[Row]()
    if length.proving and runner_of is simulated_runner:
        runner = simulated_runner(level.spec, Simulator(samples=kept), rows)
    rate_rps, target = level.rate_rps, level.target
    requests = length.requests
    samples: list[LevelSample] = []
    while True:
        sample = runner.run(rate_rps, level.first_seed + len(samples), requests)
        lasting_s = length.horizons * max(sample.horizon_s, sample.stay_s)
        needed = requests_in(lasting_s, rate_rps, sample.horizon_s)
        if not samples and sample.attainment >= target and requests < _LONG_ENOUGH * needed:
            requests = needed
            continue
        samples.append(replace(sample, wall_s=0.0))
        runs = CapacityLevel(rate_rps, tuple(samples))
        low, high = runs.attainment_interval
        unsteady = runs.growing or any(drifts(sample) or starves(sample) for sample in samples)
        shown = runs.sustained if length.proving else any(run.settled for run in samples)
        carries = low >= target and shown and len(samples) >= length.runs
        misses = (high if len(samples) < _MISSES_AFTER else runs.attainment) < target
        longest = _LONGEST * max(length.requests, needed)
        fails = sample.attainment < target or drifts(sample)
        if len(samples) == 1 and fails and requests < longest and _warms_up(sample, target):
            samples.clear()
            requests = min(2 * requests, longest)
            continue
        if unsteady or misses or carries or len(samples) == length.most_runs:
            first_run = (kept[-len(samples)][1], rows[-len(samples)]) if rows else None
            numbers = runs.attainment, low, high, len(samples), runs.requests
            return Verdict(carries and not unsteady, *numbers, runs.samples, first_run)
        settled = [run.requests for run in samples if run.settled]
        requests = min(settled) if shown else min(2 * requests, longest)


def _warms_up(sample: LevelSample, target: float) -> bool:
    """Whether the second half of a run may reach the target, by its interval, and more than the
    first.
    """
    half = len(sample.batch_met) // 2
    requests = sum(sample.batch_requests[half:])
    second = sum(sample.batch_met[half:]) / requests
    return second > sample.attainment and wilson_interval(second, requests)[1] >= target


@dataclass
class Levels:
    """Verdicts by level: those that a plan's folder holds, and new ones, which are kept in it."""

    checkpoint: Checkpoint | None
    runner_of: RunnerOf
    pool: WorkerPool | None
    say: Say

    def __post_init__(self) -> None:
        self._known: dict[str, Verdict] = {}
        self._earlier: dict[str, dict[str, Any]] = {}  # of the folder, not compared yet
        self._begun: dict[str, Future[Verdict]] = {}
        if self.checkpoint is not None and self.checkpoint.path.exists():
            self._earlier = {
                entry["name"]: entry
                for entry in self.checkpoint.read()
                if "samples" in entry["level"]  # else of before 29 November, by other rules
            }

    def begin(self, level: DeploymentLevel) -> None:
        """Start a level in the pool, if there is one and the level is not known or started."""
        line = level.line
        levels = self._known, self._earlier, self._begun
        if self.pool and not any(line in lines for lines in levels):
            self._begun[line] = self.pool.begin(judged, level)

    def drop_begun(self) -> None:
        """Give up the levels that were started and asked for by nobody."""
        for begun in self._begun.values():
            begun.cancel()
        self._begun.clear()

    def verdict(self, level: DeploymentLevel) -> Verdict:
        """The verdict on a level, which is kept in the folder.

        Raises:
            SloBenchError: that of the folder is of another simulator.
        """
        line = level.line
        simulator: dict[str, object] = {}
        if self.checkpoint is not None and line not in self._known:
            simulator = simulator_of(step_times_of([level.spec]))
        if (entry := self._earlier.pop(line, None)) is not None:
            assert self.checkpoint is not None
            self.checkpoint.check_simulator(entry, simulator)
            plain = entry["level"]
            samples = tuple(map(sample_from_plain, plain["samples"]))
            self._known[line] = Verdict(**{**plain, "samples": samples})
        if line not in self._known:
            self.say(line)
            self.begin(level)
            begun = self._begun.pop(line, None)
            level_verdict = judged(level, self.runner_of) if begun is None else begun.result()
            self._known[line] = level_verdict
            if self.checkpoint is not None:
                level_entry = asdict(replace(level_verdict, first_run=None))
                self.checkpoint.append({"name": line, "level": level_entry}, simulator)
        return self._known[line]
