"""Settings of a tuning run: the table `[tune]` of an experiment file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...harness.experiments.config.schema import SettingError
from ...harness.experiments.config.toml_text import line_of, read_toml, to_toml
from ...harness.experiments.experiment import Experiment
from ...workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from .objectives import CAPACITY, Aim
from .samplers import default_sampler
from .space import Asked

TABLE = "tune"
_BUDGET = ("trials", "max_requests", "max_time_s")  # may change when a study is resumed
_NUMBERS = {
    "target": (int, float),
    "tolerance": (int, float),
    "rate_rps": (int, float),
    "trials": (int,),
    "max_requests": (int,),
    "max_time_s": (int, float),
    "sampler_seed": (int,),
}
_LISTS = ("objectives", "confirm_workloads")


@dataclass(frozen=True)
class TuneSettings:
    """Objectives, search space, sampler, budget and confirmation of a tuning run.

    `search` is name to range, as in `--search`; empty: all parameters of the system. A budget of
    None is no limit. `confirm_backend`: the winner is also measured on that backend.

    Raises:
        SloBenchError: a value is invalid.
    """

    objectives: tuple[str, ...] = (CAPACITY,)
    search: Mapping[str, Asked] = field(default_factory=dict)
    target: float = 0.9
    tolerance: float = 0.03
    rate_rps: float | None = None
    sampler: str = ""
    sampler_seed: int = 0
    trials: int = 50
    max_requests: int | None = None
    max_time_s: float | None = None
    confirm_workloads: tuple[str, ...] = ()
    confirm_backend: str | None = None
    confirm: bool = True

    def __post_init__(self) -> None:
        if not self.objectives:
            raise SloBenchError("give at least one objective, as in capacity")
        if not self.sampler:
            object.__setattr__(self, "sampler", default_sampler(len(self.objectives)))
        for name, kinds in _NUMBERS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise SloBenchError(f"{name} must be a number but is {value!r}")
            if name != "sampler_seed" and not value > 0:
                raise SloBenchError(f"{name} must be positive but is {value}")
        self.aim  # noqa: B018 - raises if settings contradict each other
        if not 0.001 <= self.tolerance <= 0.5:
            raise SloBenchError(f"tolerance must lie in 0.001..0.5 but is {self.tolerance:g}")
        if self.confirm_backend not in (None, "vllm", "sglang"):
            raise SloBenchError(
                f"winners are confirmed on vllm or sglang, not on {self.confirm_backend!r}"
            )

    @property
    def aim(self) -> Aim:
        """The objectives.

        Raises:
            SloBenchError: they are unknown, or contradict each other.
        """
        return Aim.of(self.objectives, self.target, self.rate_rps)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> TuneSettings:
        """Settings from a table of a TOML file.

        Raises:
            SloBenchError: a name is unknown, or a value is invalid.
        """
        known = {one.name for one in dataclasses.fields(cls)}
        for name in table:
            if name not in known:
                raise UnknownNameError(f"setting in [{TABLE}]", name, known)
        values = dict(table)
        for name in _LISTS:
            if name in values:
                given = [values[name]] if isinstance(values[name], str) else values[name]
                texts = isinstance(given, list | tuple) and all(isinstance(v, str) for v in given)
                if not texts:
                    raise SloBenchError(f"{name} must be a list of texts but is {given!r}")
                values[name] = tuple(given)
        if not isinstance(values.get("search", {}), Mapping):
            raise SloBenchError("search must be a table of names and ranges")
        return cls(**values)

    def table(self) -> dict[str, Any]:
        """The settings as a table of a TOML file."""
        found = dataclasses.asdict(self)
        found["objectives"] = list(self.objectives)
        found["confirm_workloads"] = list(self.confirm_workloads)
        found["search"] = dict(self.search)
        return {name: value for name, value in found.items() if value not in (None, [], {})}


def load(path: Path) -> tuple[Experiment, TuneSettings]:
    """Read an experiment file with a table `[tune]`.

    Raises:
        FileFormatError: the file cannot be read, or has an invalid value (with its line).
    """
    read, text = read_toml(path)
    if not read:
        raise FileFormatError(path, None, "says nothing")
    table: dict[str, Any] = dict(read)
    tuned = table.pop(TABLE, {})
    if not isinstance(tuned, Mapping):
        raise FileFormatError(path, line_of(text, (TABLE,)), f"{TABLE} must be a table")
    try:
        settings = TuneSettings.of(tuned)
    except SloBenchError as error:
        named = next((name for name in tuned if name in str(error)), "")
        raise FileFormatError(path, line_of(text, (TABLE, named)), str(error)) from None
    try:
        experiment = Experiment(**table)
    except SettingError as error:
        raise FileFormatError(path, line_of(text, error.location), str(error)) from None
    return experiment.anchored(path.resolve().parent), settings


def text_of(experiment: Experiment, settings: TuneSettings, *, budget: bool = True) -> str:
    """Experiment and settings as one file; without the budget, equal texts mean the same study."""
    table = settings.table()
    if not budget:
        for name in _BUDGET:
            table.pop(name, None)
    return experiment.to_toml() + to_toml({TABLE: table})
