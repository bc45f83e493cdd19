"""Objectives and settings of a tuning run, and its file: an experiment with a table `[tune]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...harness.experiments.config.experiment_file import (
    SettingError,
    line_of,
    read_toml,
    setting_error,
    to_toml,
)
from ...harness.experiments.config.setting import Count, Positive, Several, setting
from ...harness.servers.server_kinds import LaunchedName
from ...workloads.errors import FileFormatError, SloBenchError, UnknownNameError

if TYPE_CHECKING:
    from ...harness.experiments.experiment import Experiment
    from ...harness.results.request_figures import Form


CAPACITY = "capacity"
COST = "cost"


@dataclass(frozen=True)
class TuningObjective:
    """One objective. `column` is that of `cells.csv`; None if a single run does not give it."""

    name: str
    maximise: bool
    label: str
    form: Form
    column: str | None = None


def tuning_objectives() -> dict[str, TuningObjective]:
    """All objectives, by name: capacity, GPUs, and the figures of which more or less is better."""
    from ...harness.results.metrics import objectives  # brings numpy: not for --help

    of_figures = (
        TuningObjective(name, figure.higher_is_better, figure.label, figure.form, figure.name)
        for name, figure in objectives().items()
        if figure.is_column and figure.higher_is_better is not None
    )
    others = (
        TuningObjective(CAPACITY, True, "capacity, req/s", "per_s"),
        TuningObjective(COST, False, "GPUs", "number"),
    )
    return {objective.name: objective for objective in (*others, *of_figures)}


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
        by_name = tuning_objectives()
        for name in names:
            if name not in by_name:
                raise UnknownNameError("objective", name, by_name)
        return cls(tuple(by_name[name] for name in names), target, rate_rps)

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

    def better(self, objective: TuningObjective, value: float, other: float) -> bool:
        """Whether `value` is strictly better than `other`."""
        return value > other if objective.maximise else value < other


SOUGHT = "Objectives"
SEARCHED = "Search"
PROVED = "Confirmation"


def _searched(text: str) -> tuple[str, str]:
    """A `--search` option: a name, and its range, which may be left out."""
    name, equals, values = (piece.strip() for piece in text.partition("="))
    if not name or (equals and not values):
        raise SloBenchError(
            f"cannot read --search {text!r}; write NAME, NAME=LOW..HIGH or NAME=A,B,…"
        )
    return name, values


class TuneSettings(BaseModel):
    """Settings of a tuning run: objectives, search space, sampler, budget and confirmation.

    `search` is name to range, as in `--search`; empty: all parameters of the system. A budget of
    None is no limit. `confirm_backend`: the winner is also measured on that backend.

    Raises:
        SloBenchError: a value is invalid.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    objectives: Annotated[Several[str], Field(min_length=1)] = setting(
        SOUGHT,
        "Objective: capacity (req/s at --target), goodput, attainment, cost (fewest GPUs), "
        "ttft_p50, ttft_p99, tpot_p50, tpot_p99, itl_p99, e2e_p50 or e2e_p99 (at --rate). "
        "Repeated: a Pareto front.",
        (CAPACITY,),
        option="--objective",
        metavar="O",
        repeated=True,
        split=True,
    )
    search: Mapping[str, Any] = setting(
        SEARCHED,
        "Parameter or setting to search, with its range: slo_weight (its whole range), "
        "threshold=1..4000 (…:log for a logarithmic scale), tp=1,2,4, slo_weight=0:7:1, or "
        "parameters (all of the system). Others stay fixed. May be repeated. Default: "
        "parameters.",
        {},
        metavar="NAME[=LOW..HIGH|A,B,…]",
        read=_searched,
    )
    target: float = setting(
        SOUGHT, "Target attainment of the objectives capacity and cost.", 0.9, metavar="SHARE"
    )
    tolerance: Annotated[float, Field(ge=0.001, le=0.5)] = setting(
        SOUGHT,
        "Relative precision of a capacity: its interval is within ± this share.",
        0.03,
        metavar="SHARE",
    )
    rate_rps: Positive | None = setting(
        SOUGHT,
        "Offered rate in req/s, for objectives measured at one rate.",
        option="--rate",
        metavar="R",
    )
    sampler: str = setting(
        SEARCHED,
        "Optuna sampler: tpe, gp (needs the extra torch), cmaes (numbers only), nsga2, random "
        "or grid. Default: tpe; for several objectives nsga2.",
        "",
        metavar="S",
    )
    sampler_seed: int = setting(SEARCHED, "Seed of the sampler.", 0)
    trials: Count = setting(SEARCHED, "Number of configurations to try.", 50)
    max_requests: Count | None = setting(SEARCHED, "Start no trial after this number of requests.")
    max_time_s: Positive | None = setting(
        SEARCHED,
        "Start no trial after this time. On a real server a capacity search has a sixth of "
        "it; bursts before it and runs that others are raced against come on top.",
        unit="s",
    )
    confirm_workloads: Several[str] = setting(
        PROVED,
        "Also measure the best configuration and the default on this workload. May be repeated.",
        (),
        option="--confirm-workload",
        metavar="W",
        repeated=True,
    )
    confirm_backend: LaunchedName | None = setting(
        PROVED,
        "Also measure the best configuration and the default on this real server.",
        option="--confirm",
    )
    confirm: bool = setting(
        PROVED, "Skip the final measurement with new seeds.", True, option="--no-confirm"
    )

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise setting_error(error, type(self), "setting in [tune]") from None
        if not self.sampler:
            default = "tpe" if len(self.objectives) == 1 else "nsga2"
            object.__setattr__(self, "sampler", default)
        self.aim  # noqa: B018 - says what contradicts

    @property
    def aim(self) -> Aim:
        """The objectives.

        Raises:
            SloBenchError: they are unknown, or contradict each other.
        """
        return Aim.of(self.objectives, self.target, self.rate_rps)

    def changed(self, **changes: Any) -> TuneSettings:
        """A copy with some values changed.

        Raises:
            SloBenchError: a value is invalid.
        """
        return TuneSettings(**self.model_dump() | changes)


TABLE = "tune"
_BUDGET = ("trials", "max_requests", "max_time_s")  # may be another when a study goes on


def load(path: Path) -> tuple[Experiment, TuneSettings]:
    """An experiment with a table `[tune]`.

    Raises:
        FileFormatError: the file cannot be read, or says something wrong (with its line).
    """
    from ...harness.experiments.experiment import Experiment
    from ...workloads.slo import parse_slo

    read, text = read_toml(path)
    if not read:
        raise FileFormatError(path, None, "says nothing")
    table: dict[str, Any] = dict(read)
    tuned = table.pop(TABLE, {})
    if not isinstance(tuned, Mapping):
        raise FileFormatError(path, line_of(text, (TABLE,)), f"{TABLE} must be a table")
    try:
        settings = TuneSettings(**tuned)
    except SettingError as error:
        raise FileFormatError(path, line_of(text, (TABLE, *error.location)), str(error)) from None
    except SloBenchError as error:
        named = next((name for name in tuned if name in str(error)), "")
        raise FileFormatError(path, line_of(text, (TABLE, named)), str(error)) from None
    try:
        experiment = Experiment(**table)
    except SettingError as error:
        raise FileFormatError(path, line_of(text, error.location), str(error)) from None
    try:
        for slo in experiment.slo:
            parse_slo(slo)
    except SloBenchError as error:
        raise FileFormatError(path, line_of(text, ("slo",)), str(error)) from None
    return experiment.anchored(path.resolve().parent), settings


def text_of(experiment: Experiment, settings: TuneSettings, *, budget: bool = True) -> str:
    """Both as one TOML text; without the budget, equal texts mean the same tuning run."""
    table = {
        name: value
        for name, value in settings.model_dump(exclude=None if budget else set(_BUDGET)).items()
        if value not in (None, (), {})
    }
    return experiment.to_toml() + to_toml({TABLE: table})
