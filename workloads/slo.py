"""Service level objectives: for all requests or by class, fixed, scaled or drawn."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from .arrays import Floats, Mask
from .call_parser import parse_call, parse_values, positive, split_outside
from .errors import SloBenchError, UnknownNameError
from .models import shape_of
from .request import SLO_COLUMNS
from .workload import Workload, shortest

_UNITS: Mapping[str, Fraction] = {
    **{"us": Fraction(1, 10**6), "ms": Fraction(1, 1000), "s": Fraction(1)},
    **{"min": Fraction(60), "h": Fraction(3600)},
}  # seconds of each
_WITH_UNIT = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]+)")


class SloBound(Protocol):
    """A bound in seconds, for each of n requests."""

    def draw(self, n: int, rng: np.random.Generator) -> Floats:
        """Draw one bound for each request, in seconds."""


@dataclass(frozen=True)
class FixedBound:
    """The same bound for every request."""

    seconds: float

    def draw(self, n: int, rng: np.random.Generator) -> Floats:
        return np.full(n, self.seconds)


@dataclass(frozen=True)
class UniformBound:
    """Anything between two bounds, equally likely."""

    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        if self.high_s < self.low_s:
            raise SloBenchError(
                f"uniform({self.low_s:g},{self.high_s:g}): the second must not be below the first"
            )

    def draw(self, n: int, rng: np.random.Generator) -> Floats:
        return rng.uniform(self.low_s, self.high_s, n)


@dataclass(frozen=True)
class ChoiceBound:
    """One of several bounds, equally likely."""

    seconds: tuple[float, ...]

    def draw(self, n: int, rng: np.random.Generator) -> Floats:
        return np.array(self.seconds)[rng.integers(len(self.seconds), size=n)]


@dataclass(frozen=True)
class ClassSlo:
    """SLO bounds of one class of requests, of one model, or of all requests if `class_name` is
    None.
    """

    class_name: str | None
    bounds: Mapping[str, SloBound]


@dataclass(frozen=True)
class SloSpec:
    """The SLOs of a workload; later entries override earlier ones.

    `slo_scale` multiplies every finite bound, including those of the trace. A deadline is a time on
    the workload's clock, and is scaled as such.
    """

    entries: tuple[ClassSlo, ...] = ()
    slo_scale: float = 1.0

    def __post_init__(self) -> None:
        positive(self.slo_scale, "slo_scale")

    @property
    def same_for_all(self) -> bool:
        """Whether every request has the same bounds from its arrival on."""
        return all(
            entry.class_name is None
            and "deadline" not in entry.bounds
            and all(isinstance(bound, FixedBound) for bound in entry.bounds.values())
            for entry in self.entries
        )

    def scaled(self, factor: float) -> SloSpec:
        """The specification with every bound multiplied by `factor`."""
        return dataclasses.replace(self, slo_scale=self.slo_scale * positive(factor, "slo_scale"))

    def apply(self, workload: Workload, rng: np.random.Generator) -> Workload:
        """The workload with these objectives; bounds not named here stay as they were.

        Raises:
            UnknownNameError: an entry names a class or model that the workload does not have.
        """
        columns = {c: shortest(getattr(workload, c)) for c in SLO_COLUMNS.values()}
        n = len(workload)
        for entry in self.entries:
            mine = _members(workload, entry.class_name)
            for key, bound in entry.bounds.items():
                column = SLO_COLUMNS[key]
                if entry.class_name is None and isinstance(bound, FixedBound):
                    columns[column] = bound.draw(1, rng)
                else:
                    columns[column] = np.where(mine, bound.draw(n, rng), columns[column])
        scaled: dict[str, Any] = {name: column * self.slo_scale for name, column in columns.items()}
        return dataclasses.replace(workload, **scaled)


def _members(workload: Workload, class_name: str | None) -> Mask:
    if class_name is None:
        return np.ones(len(workload), dtype=bool)
    mine: Mask
    # `llama-3.1-8b` asks for all of its fine-tuned copies, `llama-3.1-8b#2` for one.
    names = workload.model_names
    named = [i for i, name in enumerate(names) if class_name in (name, shape_of(name))]
    if named:
        mine = np.isin(workload.model_index, named)
        return mine
    if class_name not in workload.class_names:
        choices = [name for name in (*workload.class_names, *names) if name]
        if not choices:
            raise SloBenchError(
                f"there is an SLO for class {class_name!r}, but {workload.name} has no classes"
            )
        raise UnknownNameError("class in the SLO", class_name, choices)
    mine = workload.class_index == workload.class_names.index(class_name)
    return mine


def parse_slo(text: str | Mapping[str, Any] | None, slo_scale: float = 1.0) -> SloSpec:
    """Read `ttft=1,tpot=0.15`, `e2e=uniform(1,350)`, `deadline=60`, and by class
    `ttft=1; chat:ttft=0.5,tpot=choice(0.1,0.2)`; or the same as a table,
    `{"ttft": 1, "chat": {"ttft": 0.5}}`; by model likewise. A bound has a unit (`80ms`, `1s`,
    `2min`), or is in seconds; empty asks for nothing.

    Raises:
        SloBenchError: a bound is not a positive number or the text has another form.
        UnknownNameError: a key other than ttft, tpot, e2e and deadline.
    """
    if text is None:
        return SloSpec(slo_scale=slo_scale)
    if isinstance(text, Mapping):
        return SloSpec(_from_table(text), slo_scale)
    entries = []
    for piece in split_outside(text, ";"):
        if not piece:
            continue
        class_name, colon, bounds = piece.rpartition(":")
        if colon and not class_name.strip():
            raise SloBenchError(f"a class name is missing before ':' in {piece!r}")
        positional, named = parse_values(bounds)
        if positional or not named:
            raise SloBenchError(f"cannot read SLO {piece!r}; write ttft=1s,tpot=150ms")
        entries.append(_entry(class_name.strip() if colon else None, named))
    return SloSpec(tuple(entries), slo_scale)


def _from_table(table: Mapping[str, Any]) -> tuple[ClassSlo, ...]:
    for_all = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    by_class = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    entries = [_entry(None, for_all)] if for_all else []
    return (*entries, *(_entry(name, bounds) for name, bounds in by_class.items()))


def _entry(class_name: str | None, bounds: Mapping[str, Any]) -> ClassSlo:
    parsed, owner = {}, "SLO " if class_name is None else f"SLO {class_name}:"
    for key, value in bounds.items():
        short = key.removesuffix("_s").removesuffix("_slo")
        if short not in SLO_COLUMNS:
            raise UnknownNameError("SLO", key, SLO_COLUMNS)
        parsed[short] = _bound(value, owner + key)
    return ClassSlo(class_name, parsed)


def _bound(value: str | float, label: str) -> SloBound:
    if not isinstance(value, str) or "(" not in value:
        return FixedBound(_seconds(value, label))
    call = parse_call(value)
    values = tuple(_seconds(bound, label) for bound in call.positional)
    if call.named or not values:
        raise SloBenchError(f"cannot read {label}={value}; write uniform(1,350) or choice(1,2,5)")
    if call.name == "choice":
        return ChoiceBound(values)
    if call.name != "uniform":
        raise UnknownNameError(f"distribution for {label}", call.name, ("uniform", "choice"))
    if len(values) != 2:
        raise SloBenchError(f"{label}: uniform takes two bounds, as in uniform(1,350)")
    return UniformBound(*values)


def _seconds(value: str | float, label: str) -> float:
    """The seconds of a bound such as 1, `0.15`, `150ms` or `2 min`.

    Raises:
        SloBenchError: it is no positive number with a unit of time.
    """
    with_unit = _WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if with_unit is None:
        return positive(value, label)
    amount, unit = with_unit.groups()
    if unit not in _UNITS:
        raise SloBenchError(
            f"{label}={value}: there is no unit {unit}; write {', '.join(_UNITS)}, or a number of "
            "seconds"
        )
    positive(amount, label)
    return float(Fraction(amount) * _UNITS[unit])  # 80ms is the very number that 0.08 is
