"""Sensitivity of a ranking of systems to errors of the simulation.

Every system is simulated with the same requests while one input at a time is varied: step times or
their parts, predicted lengths, burstiness. Where two systems change places, the result names them,
with the number of seeds that agree.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...harness.core.records.request_records import Result
from ...harness.experiments.execution.cell_specs import CellSpec
from ...harness.experiments.execution.cells import simulated, simulated_figures
from ...harness.results.metrics import FIGURES, objectives
from ...harness.results.request_figures import Figure, Form
from ...workloads.errors import SloBenchError, UnknownNameError
from .perturbations import Perturbation, World, world

CAPACITY = "capacity"
DEFAULT_TARGET = 0.9
TOLERANCE = 0.02  # of a capacity
_STRIDE = 1.3
_MOST_STRIDES = 12  # of 30 %: a factor of 23
BASE = "base"


@dataclass(frozen=True)
class Ranked:
    """The metric that ranks systems. Capacity is the highest rate at which attainment is `target`;
    other metrics are measured at the rate of the cells.
    """

    metric: str = CAPACITY
    target: float = DEFAULT_TARGET

    def __post_init__(self) -> None:
        if self.metric != CAPACITY and self.figure.short != self.metric:
            raise UnknownNameError("metric", self.metric, [CAPACITY, *_ranking()])
        if not 0 < self.target < 1:
            raise SloBenchError(f"target must be between 0 and 1 but is {self.target}")

    @property
    def figure(self) -> Figure:
        """The figure of cells that is compared; attainment where capacity ranks."""
        return _ranking().get(self.metric, FIGURES["attainment"])

    @property
    def more_is_better(self) -> bool:
        """Whether the largest value ranks first."""
        return bool(self.figure.higher_is_better)

    @property
    def form(self) -> Form:
        """What kind of number the metric is."""
        return "per_s" if self.metric == CAPACITY else self.figure.form


def _ranking() -> dict[str, Figure]:
    """Figures that can rank systems, by their short names."""
    return {name: figure for name, figure in objectives().items() if figure.is_column}


@dataclass(frozen=True)
class Point:
    """Values of the metric at one value of one perturbation: one for each system and seed."""

    axis: str
    value: float
    outcomes: Mapping[str, tuple[float, ...]]

    def mean(self, system: str) -> float:
        """Mean of a system's metric over the seeds."""
        return float(np.mean(self.outcomes[system]))

    def ranking(self, ranked: Ranked) -> list[str]:
        """Best first, by the mean; what has no figure last."""

        def merit(system: str) -> float:
            mean = self.mean(system)
            if math.isnan(mean):
                return math.inf
            return -mean if ranked.more_is_better else mean

        return sorted(self.outcomes, key=merit)

    def seeds_that_prefer(self, first: str, second: str, ranked: Ranked) -> int:
        """Number of seeds in which `first` is strictly better than `second`."""
        pairs = zip(self.outcomes[first], self.outcomes[second], strict=True)
        return sum(a > b if ranked.more_is_better else a < b for a, b in pairs)


@dataclass(frozen=True)
class Flip:
    """At `value` of `axis`, `winner` overtakes `loser`, which is ahead of it at the base."""

    axis: str
    value: float
    winner: str
    loser: str
    seeds: int
    of_seeds: int
    base_seeds: int

    @property
    def certain(self) -> bool:
        """Whether every seed agrees, here and at the base."""
        return self.seeds == self.base_seeds == self.of_seeds


@dataclass(frozen=True)
class Sensitivity:
    """All points, the base first among those of its axis by value, and the flips among them."""

    ranked: Ranked
    systems: tuple[str, ...]
    axes: tuple[Perturbation, ...]
    base: Point
    points: Sequence[Point]
    flips: Sequence[Flip]
    notes: tuple[str, ...]

    def along(self, axis: Perturbation) -> list[Point]:
        """The points of one axis in order, the base where it belongs."""
        axis_points = [point for point in self.points if point.axis == axis.name]
        axis_points.append(dataclasses.replace(self.base, axis=axis.name, value=axis.neutral))
        return sorted(axis_points, key=lambda point: point.value)


Progress = Callable[[int, int], None]  # points done, of how many


@dataclass
class _Study:
    ranked: Ranked
    cells: Mapping[str, Sequence[CellSpec]]
    progress: Progress | None
    total: int
    done: int = 0
    guesses_rps: dict[tuple[str, int], float] = field(default_factory=dict)
    drifting_after_s: dict[str, float] = field(default_factory=dict)  # at the base, by system

    def point(self, axis: Perturbation | None, value: float, systems: Sequence[str]) -> Point:
        """The figures of these systems; the others' are as at the base."""
        outcomes = {}
        for system in systems:
            outcomes[system] = tuple(
                self._outcome(system, spec, axis, value) for spec in self.cells[system]
            )
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)
        return Point(BASE if axis is None else axis.name, value, outcomes)

    def _outcome(
        self, system: str, spec: CellSpec, axis: Perturbation | None, value: float
    ) -> float:
        def figures(rate_rps: float | None) -> Mapping[str, float | int | bool | None]:
            at_rate = dataclasses.replace(spec, rate_rps=rate_rps)
            changed = world(at_rate) if axis is None else axis.change(at_rate, value)
            return simulated_figures(at_rate, changed.workload, _simulated(at_rate, changed))

        def figure(by_column: Mapping[str, float | int | bool | None]) -> float:
            figure_value = by_column[self.ranked.figure.name]
            return math.nan if figure_value is None else float(figure_value)

        if self.ranked.metric != CAPACITY:
            run_figures = figures(spec.rate_rps)
            if axis is None and run_figures["stationary"] is False:
                self.drifting_after_s[system] = float(run_figures["arrival_window_s"] or 0.0)
            return figure(run_figures)
        assert spec.rate_rps is not None
        key = (system, spec.seed)
        crossing_rps = highest_rps(
            lambda rate_rps: figure(figures(rate_rps)) >= self.ranked.target,
            self.guesses_rps.get(key, spec.rate_rps),
        )
        if axis is None and crossing_rps > 0:
            self.guesses_rps[key] = crossing_rps
        return crossing_rps


def study(
    cells: Sequence[CellSpec],
    axes: Sequence[tuple[Perturbation, Sequence[float]]],
    ranked: Ranked,
    *,
    progress: Progress | None = None,
) -> Sensitivity:
    """Rank the systems of `cells` with every value of every axis, one at a time.

    Args:
        cells: one for each system and seed, equal in everything else; for capacity their rate is
            where the search begins.
        axes: the perturbations and their values.
        ranked: the metric.
        progress: called after each point.

    Raises:
        SloBenchError: there are fewer than two systems, or the cells cannot be perturbed.
    """
    by_system = _by_system(cells, ranked)
    systems = tuple(by_system)
    checked = [(axis, axis.checked(values)) for axis, values in axes]
    tasks = [(axis, v) for axis, values in checked for v in values if v != axis.neutral]
    believers = _systems_that_predict(by_system, axes)
    if not believers:
        tasks = [(axis, value) for axis, value in tasks if axis.name != "prediction"]
        checked = [(axis, values) for axis, values in checked if axis.name != "prediction"]
    running = _Study(ranked, by_system, progress, len(tasks) + 1)
    base = running.point(None, 0.0, systems)
    points = []
    for axis, value in tasks:
        moved = [s for s in systems if axis.name != "prediction" or s in believers]
        point = running.point(axis, value, moved)
        outcomes = {s: point.outcomes.get(s, base.outcomes[s]) for s in systems}
        points.append(dataclasses.replace(point, outcomes=outcomes))
    notes = []
    if any(axis.name == "prediction" for axis, _ in axes):
        unmoved_names = [s for s in systems if s not in believers]
        if unmoved_names:
            notes.append(f"Predicted lengths make no difference to {', '.join(unmoved_names)}.")
    if running.drifting_after_s:
        drifting = (f"{s} after {time_s:.3g} s" for s, time_s in running.drifting_after_s.items())
        notes.append(
            f"Overloaded at the base: {', '.join(drifting)}. The figures hold after that time "
            "of arrivals and change with a longer run."
        )
    return Sensitivity(
        ranked=ranked,
        systems=systems,
        axes=tuple(axis for axis, _ in checked),
        base=base,
        points=points,
        flips=_flips(base, points, ranked),
        notes=tuple(notes),
    )


def _by_system(cells: Sequence[CellSpec], ranked: Ranked) -> dict[str, list[CellSpec]]:
    by_system: dict[str, list[CellSpec]] = {}
    for spec in cells:
        if spec.columns.get("backend", "simulated") != "simulated":
            raise SloBenchError("sensitivity needs the simulated backend")
        if spec.workload.models is not None:
            raise SloBenchError("sensitivity compares systems of one model; leave out --models")
        if ranked.metric == CAPACITY and spec.rate_rps is None:
            raise SloBenchError(
                "capacity is searched over rates, so that arrivals must be drawn; choose another "
                "--metric or another workload"
            )
        by_system.setdefault(str(spec.columns["system"]), []).append(spec)
    if len(by_system) < 2:
        raise SloBenchError("sensitivity needs at least two systems")
    seeds = {name: [spec.seed for spec in specs] for name, specs in by_system.items()}
    for name, system_seeds in seeds.items():
        if len(set(system_seeds)) != len(system_seeds):
            raise SloBenchError(
                f"{name} has several cells for one seed; vary one thing here and the rest with "
                "`slo-bench run --sweep`"
            )
    return by_system


def _systems_that_predict(
    by_system: Mapping[str, Sequence[CellSpec]],
    axes: Sequence[tuple[Perturbation, Sequence[float]]],
) -> set[str]:
    """Systems whose results depend on predicted lengths."""
    axis = next((axis for axis, _ in axes if axis.name == "prediction"), None)
    if axis is None:
        return set()
    names = set()
    for system, specs in by_system.items():
        rate_rps = specs[0].rate_rps
        # At twice the rate, because policies decide nothing without a queue.
        spec = dataclasses.replace(specs[0], rate_rps=None if rate_rps is None else 2 * rate_rps)
        right, wrong = (_simulated(spec, axis.change(spec, sigma)).records for sigma in (0.0, 2.0))
        if not np.array_equal(right.finish_s, wrong.finish_s, equal_nan=True):
            names.add(system)
    return names


def _simulated(spec: CellSpec, changed: World) -> Result:
    return simulated(
        spec, changed.workload, changed.predicted_output_tokens, step_time=changed.step_time
    )


def highest_rps(holds: Callable[[float], bool], guess_rps: float) -> float:
    """The highest rate that holds, to `TOLERANCE`, on fixed seeds; 0 where none seems to.

    On fixed seeds the same requests come faster or slower, so that what holds at a rate holds, but
    for rare quirks, below it; nothing here is noise that would have to be averaged out.
    """
    low = high = guess_rps
    if holds(guess_rps):
        for _ in range(_MOST_STRIDES):
            high = low * _STRIDE
            if not holds(high):
                break
            low = high
        else:
            return low
    else:
        for _ in range(_MOST_STRIDES):
            low = high / _STRIDE
            if holds(low):
                break
            high = low
        else:
            return 0.0
    while high / low > 1 + TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return math.sqrt(low * high)


def _flips(base: Point, points: Sequence[Point], ranked: Ranked) -> list[Flip]:
    """Points at which two systems have the opposite order to the base. A tie is no flip."""
    order = base.ranking(ranked)
    flips = []
    for point in points:
        for ahead, behind in itertools.combinations(order, 2):
            means = point.mean(ahead), point.mean(behind)
            overtaken = means[1] > means[0] if ranked.more_is_better else means[1] < means[0]
            if overtaken and base.mean(ahead) != base.mean(behind):
                flips.append(
                    Flip(
                        axis=point.axis,
                        value=point.value,
                        winner=behind,
                        loser=ahead,
                        seeds=point.seeds_that_prefer(behind, ahead, ranked),
                        of_seeds=len(base.outcomes[ahead]),
                        base_seeds=base.seeds_that_prefer(ahead, behind, ranked),
                    )
                )
    return flips
