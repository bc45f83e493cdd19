"""Objectives and settings of a tuning run, and its file: an experiment with a table `[tune]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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


MAKESPAN = "makespan"
Arrivals = Literal["any", "at a rate", "without a rate"]


@dataclass(frozen=True)
class TuningObjective:
    """One objective.

    Attributes:
        column: that of `cells.csv`; None if a single run does not give it.
        arrivals: those under which it says something; `without a rate`: in a closed loop, or all
            at once.
    """

    name: str
    maximise: bool
    label: str
    form: Form
    column: str | None = None
    arrivals: Arrivals = "any"


def tuning_objectives() -> dict[str, TuningObjective]:
    """All objectives, by name: capacity, GPUs, and the figures of which more or less is better."""
    from ...harness.results.metrics import objectives  # brings numpy: not for --help

    of_figures = (
        TuningObjective(
            name,
            figure.higher_is_better,
            figure.label,
            figure.form,
            figure.name,
            "without a rate" if name == MAKESPAN else "any",
        )
        for name, figure in objectives().items()
        if figure.is_column and figure.higher_is_better is not None
    )
    others = (
        TuningObjective(CAPACITY, True, "capacity, req/s", "per_s", arrivals="at a rate"),
        TuningObjective(COST, False, "GPUs", "number"),
    )
    return {objective.name: objective for objective in (*others, *of_figures)}


@dataclass(frozen=True)
class TrialLoad:
    """The load under which a run measures a configuration.

    Attributes:
        text: `at 4 req/s`, `with 8 users` or `with 100 requests at once`.
        rate_rps: what is offered; None: the arrivals have no rate.
    """

    text: str
    rate_rps: float | None = None

    @classmethod
    def of(cls, experiment: Experiment, rate_rps: float | None) -> TrialLoad | None:
        """The load of an experiment's trials; None where only a capacity search gives the rate.

        Raises:
            SloBenchError: the rate is not positive, or the arrivals have none.
        """
        from ...harness.experiments.execution.cell_specs import WorkloadSpec, source
        from ...workloads.arrivals import Concurrency
        from ..capacity.search_options import requests_of_a_run

        spec = WorkloadSpec.first_of(experiment)
        origin = source(spec)
        if origin.has_rate:
            if rate_rps is not None and not rate_rps > 0:
                raise SloBenchError(f"rate must be positive but is {rate_rps:g}")
            return None if rate_rps is None else cls(f"at {rate_rps:g} req/s", rate_rps)
        if rate_rps is not None:
            named = spec.arrivals if origin.closed_loop else origin.name
            raise SloBenchError(
                f"{named} sets the load itself and has no rate: leave --rate out, or choose other "
                "arrivals"
            )
        requests = len(origin.make(requests=requests_of_a_run(experiment)))
        if isinstance(origin.arrivals, Concurrency) and origin.arrivals.users < requests:
            users = origin.arrivals.users
            return cls(f"with {users:,} user{'s' * (users > 1)}")
        return cls(f"with {requests:,} requests at once")


@dataclass(frozen=True)
class Aim:
    """The objectives, the attainment that capacity and cost are about, and the load of a run.

    Raises:
        SloBenchError: the objectives contradict each other or the load.
    """

    objectives: tuple[TuningObjective, ...]
    target: float = 0.9
    load: TrialLoad | None = None

    def __post_init__(self) -> None:
        names, load = self.names, self.load
        at_rate = load is None or load.rate_rps is not None
        arrivals: Arrivals = "at a rate" if at_rate else "without a rate"
        for objective in self.objectives:
            if objective.arrivals not in ("any", arrivals):
                raise SloBenchError(_wrong_arrivals(objective, load))
        if at_rate and {"goodput", "attainment"} <= set(names):
            raise SloBenchError(
                "goodput and attainment at one rate are the same objective; keep one of them"
            )
        if load is None and (of_runs := [o.name for o in self.objectives if o.column is not None]):
            raise SloBenchError(
                f"{of_runs[0]} is measured at one rate: give it (--rate 4), or arrivals that have "
                "none (--arrivals 'concurrency(100)')"
            )
        if load is None and names == (COST,):
            raise SloBenchError(
                "cost is the fewest GPUs that carry a rate: give it (--rate 4), or add the "
                "objective capacity"
            )
        if load is not None and names == (CAPACITY,):
            raise SloBenchError(
                "capacity finds the rate itself: leave --rate out, or choose goodput"
            )

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
        """Whether a configuration is measured under the load."""
        return any(o.column is not None for o in self.objectives) or self.must_attain

    @property
    def must_attain(self) -> bool:
        """Whether only configurations count that reach the target under the load."""
        return COST in self.names and CAPACITY not in self.names

    def better(self, objective: TuningObjective, value: float, other: float) -> bool:
        """Whether `value` is strictly better than `other`."""
        return value > other if objective.maximise else value < other


def _wrong_arrivals(objective: TuningObjective, load: TrialLoad | None) -> str:
    """Why an objective says nothing under these arrivals, and what does."""
    if objective.arrivals == "at a rate":
        load_text = "" if load is None else load.text
        return (
            f"{objective.name} is a rate, which a load {load_text} does not have: choose "
            "--objective attainment, goodput, e2e_mean or makespan, or other arrivals"
        )
    return (
        f"{objective.name} is set by the arrivals where they have a rate: choose --objective "
        "e2e_p99 or goodput, or arrivals without one (--arrivals 'concurrency(100)')"
    )


def objectives_named(names: Sequence[str]) -> tuple[TuningObjective, ...]:
    """The objectives of these names.

    Raises:
        SloBenchError: one is unknown or repeated.
    """
    by_name = tuning_objectives()
    for name in names:
        if name not in by_name:
            raise UnknownNameError("objective", name, by_name)
        if names.count(name) > 1:
            raise SloBenchError(f"the objective {name} is given twice; keep one of them")
    return tuple(by_name[name] for name in names)


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
        "ttft_p50, ttft_p99, tpot_p50, tpot_p99, itl_p99, e2e_mean, e2e_p50 or e2e_p99 (at "
        "--rate); under arrivals without a rate ('concurrency(100)') makespan and all of these "
        "but capacity. Repeated: a Pareto front.",
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
        "Offered rate in req/s, for objectives measured at one rate; arrivals such as "
        "'concurrency(100)' have none.",
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
    max_requests: Count | None = setting(
        SEARCHED,
        "Start no trial after this number of requests. Objective capacity keeps a sixth of them "
        "for the search of the best one.",
    )
    max_time_s: Positive | None = setting(
        SEARCHED,
        "Start no trial after this time. Objective capacity keeps a sixth of it for the search of "
        "the best one; on a real server bursts before it come on top.",
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
        if not 0 < self.target < 1:
            raise SloBenchError(f"target must lie between 0 and 1 but is {self.target:g}")
        objectives_named(self.objectives)

    def aim(self, experiment: Experiment) -> Aim:
        """The objectives, and the load under which the experiment's configurations are measured.

        Raises:
            SloBenchError: they contradict each other, or the workload cannot be read.
        """
        load = TrialLoad.of(experiment, self.rate_rps)
        return Aim(objectives_named(self.objectives), self.target, load)

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
