"""What a cell is called: its name, which is a file name, and the columns that identify it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ....predictors.specs import model
from ....workloads.models import parse_models
from ...results.run_folder import Value
from ...servers.launch.backend_names import SIMULATED
from ..config.schema import ExperimentSchema
from .specs import CellSpec, WorkloadSpec, source

_ALWAYS_COLUMNS = ("workload", "model", "gpu", "gpus")
_LONGEST_NAME = 150  # characters of a cell's name, which is a file name


@dataclass(frozen=True)
class AxisColumns:
    """Which settings have a column, and what they call workloads and models there."""

    swept: tuple[str, ...]
    named: tuple[str, ...]  # those of them in a cell's name: not settled by the variant
    workload: Mapping[str, str]
    model: Mapping[str, str]
    backend: str

    @classmethod
    def of(cls, asked: ExperimentSchema, workloads: Iterable[WorkloadSpec]) -> AxisColumns:
        """Name the settings that have several values; short names are used if they are distinct."""
        names = {spec.workload: source(spec).name for spec in workloads}
        variants = asked.each_variant().values()
        several = {name: [getattr(of, name) for of in variants] for name in asked.axes()}
        models = {text for of in variants for text in of.model}
        return cls(
            tuple(
                name
                for name, of in several.items()
                if any(one != of[0] for one in of) or len(of[0]) > 1
            ),
            tuple(name for name, of in several.items() if any(len(one) > 1 for one in of)),
            _if_distinct(names),
            _if_distinct({text: _model_name(text, asked.backend) for text in models}),
            asked.backend,
        )

    def model_of(self, values: Mapping[str, Any]) -> str:
        """Return the served model as written in the column `model`."""
        models = values["models"]
        if models is None:
            return self.model[values["model"]]
        return f"{len(parse_models(models).names)} models"

    def settings(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """The columns of the settings that have several values."""
        named = (name for name in self.swept if name not in _ALWAYS_COLUMNS)
        return {name: column_value(values[name]) for name in named}


def _model_name(text: str, backend: str) -> str:
    """A served model may be none that we know: then it is called as its folder is."""
    return model(text).name if backend == SIMULATED else text.rstrip("/").rpartition("/")[2]


def _if_distinct(names: Mapping[str, str]) -> Mapping[str, str]:
    """Return short names if they are distinct, otherwise the full texts."""
    return names if len(set(names.values())) == len(names) else {text: text for text in names}


def column_value(value: object) -> Value:
    """Return a setting's value as written in its column."""
    if isinstance(value, Mapping):
        return _slo_text(value)
    assert value is None or isinstance(value, str | int | float)
    return value


def _slo_text(table: Mapping[str, Any]) -> str:
    """A table of SLOs in the short form: `ttft=1,tpot=0.15; chat:ttft=0.5`."""

    def bounds(of: Mapping[str, Any]) -> str:
        return ",".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in of.items()
        )

    for_all = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    pieces = [bounds(for_all)] if for_all else []
    pieces += [f"{name}:{bounds(of)}" for name, of in table.items() if isinstance(of, Mapping)]
    return "; ".join(pieces)


def name_part(name: str, value: object) -> str:
    """Return a setting's value as written in a cell's name."""
    text = f"{value:g}" if isinstance(value, float) else str(column_value(value))
    return text if name in ("workload", "model", "gpu") else f"{name}-{text}"


def file_name(parts: Iterable[str]) -> str:
    """The parts as one name that every file system takes."""
    plain = (re.sub(r"[^A-Za-z0-9.+-]+", "-", part.rpartition("/")[2]) for part in parts)
    return "_".join(part.strip("-.") for part in plain)[:_LONGEST_NAME]


def distinct(cells: Iterable[CellSpec]) -> Iterator[CellSpec]:
    """Append numbers to equal cell names."""
    taken: set[str] = set()
    for spec in cells:
        name, number = spec.cell, 2
        while name.lower() in taken:  # some file systems know no case
            name, number = f"{spec.cell}_{number}", number + 1
        taken.add(name.lower())
        yield replace(spec, cell=name, columns={"cell": name, **spec.columns})
