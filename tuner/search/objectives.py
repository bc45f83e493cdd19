"""Objectives of tuning: the better direction, and what each needs to be measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...workloads.errors import SloBenchError, UnknownNameError

CAPACITY = "capacity"
COST = "cost"


@dataclass(frozen=True)
class TuningObjective:
    """One objective. `column` is that of `cells.csv`; None if a single run does not give it."""

    name: str
    maximise: bool
    label: str
    column: str | None = None


def _latency(name: str, label: str) -> TuningObjective:
    return TuningObjective(name, False, label, f"{name}_s")


OBJECTIVES = {
    objective.name: objective
    for objective in (
        TuningObjective(CAPACITY, True, "capacity, req/s"),
        TuningObjective("goodput", True, "goodput, req/s", "goodput_rps"),
        TuningObjective("attainment", True, "share in SLO", "attainment"),
        TuningObjective(COST, False, "GPUs"),
        _latency("ttft_p50", "TTFT p50, s"),
        _latency("ttft_p99", "TTFT p99, s"),
        _latency("tpot_p50", "TPOT p50, s"),
        _latency("tpot_p99", "TPOT p99, s"),
        _latency("itl_p99", "ITL p99, s"),
        _latency("e2e_p50", "end to end p50, s"),
        _latency("e2e_p99", "end to end p99, s"),
    )
}


@dataclass(frozen=True)
class Aim:
    """The objectives, the attainment that capacity and cost are about, and the offered rate.

    Raises:
        SloBenchError: the objectives are unknown, repeated, or contradict each other or the rate.
    """

    objectives: tuple[TuningObjective, ...]
    target: float = 0.9
    rate_rps: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise SloBenchError(f"target must lie between 0 and 1 but is {self.target:g}")
        if self.rate_rps is not None and not self.rate_rps > 0:
            raise SloBenchError(f"rate must be positive but is {self.rate_rps:g}")
        names = [objective.name for objective in self.objectives]
        for name in names:
            if names.count(name) > 1:
                raise SloBenchError(f"the objective {name} is given twice; keep one of them")
        if {"goodput", "attainment"} <= set(names):
            raise SloBenchError(
                "goodput and attainment at one rate are the same objective; keep one of them"
            )
        at_rate = [o.name for o in self.objectives if o.column is not None]
        if at_rate and self.rate_rps is None:
            raise SloBenchError(f"{at_rate[0]} is measured at one rate: give it (--rate 4)")
        if names == [COST] and self.rate_rps is None:
            raise SloBenchError(
                "cost is the fewest GPUs that carry a rate: give it (--rate 4), or add the "
                "objective capacity"
            )
        if self.rate_rps is not None and names == [CAPACITY]:
            raise SloBenchError(
                "capacity finds the rate itself: leave --rate out, or choose goodput"
            )

    @classmethod
    def of(cls, names: Sequence[str], target: float, rate_rps: float | None) -> Aim:
        """The aim with the objectives of these names.

        Raises:
            SloBenchError: see `Aim`.
        """
        for name in names:
            if name not in OBJECTIVES:
                raise UnknownNameError("objective", name, OBJECTIVES)
        return cls(tuple(OBJECTIVES[name] for name in names), target, rate_rps)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the objectives in order."""
        return tuple(objective.name for objective in self.objectives)

    @property
    def single(self) -> TuningObjective | None:
        """The only objective, if there is one."""
        return self.objectives[0] if len(self.objectives) == 1 else None

    @property
    def searches_capacity(self) -> bool:
        """Whether the capacity of a configuration must be found."""
        return CAPACITY in self.names

    @property
    def measures_level(self) -> bool:
        """Whether a configuration is measured at the rate."""
        return any(o.column is not None for o in self.objectives) or self.must_attain

    @property
    def must_attain(self) -> bool:
        """Whether only configurations count that reach the target at the rate."""
        return COST in self.names and CAPACITY not in self.names

    def better(self, objective: TuningObjective, one: float, other: float) -> bool:
        """Whether `one` is strictly better than `other`."""
        return one > other if objective.maximise else one < other
