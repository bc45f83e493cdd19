"""Settings of two runs side by side: the conditions of a comparison, and what is compared.

The schema of an experiment says which settings are conditions (`Setting.condition`). Settings of
the deployment and parameters of systems are what is compared. A setting with several values is a
column of cells.csv and is matched row by row (`matching.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel

from ...harness.experiments.config.experiment_file import TABLES
from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.experiments.config.setting import (
    ARRIVES,
    ARRIVES_MORE,
    Declared,
    column_value,
    declared,
    listed,
)
from ...harness.results.run_columns import API_COLUMN
from ...workloads.errors import SloBenchError, UnknownNameError
from ...workloads.slo import parse_slo

Pair = tuple[str, str]  # of A and of B
Inputs = tuple[Mapping[str, str], Mapping[str, str]]  # likewise, as in `Settings`
NONE = "none"
RATES = "rates"
SLO = ("slo", "slo_scale")
# Tables by system or by name.
_NO_SETTINGS = ExperimentSchema.model_fields.keys() - declared(ExperimentSchema) - TABLES.keys()


@dataclass(frozen=True)
class Settings:
    """An experiment's settings by path (`failures`, `client.api`), as its file has them.

    `inputs` holds the CRC-32 of the files that they name, by path.
    """

    values: Mapping[str, Any]
    parameters: Mapping[str, Mapping[str, Any]]  # by system
    inputs: Mapping[str, str]

    @classmethod
    def of(cls, table: Mapping[str, Any], inputs: object) -> Settings:
        """The settings of an experiment file, and the `inputs` of environment.json."""
        values: dict[str, Any] = {}
        for name, value in table.items():
            if name in TABLES and isinstance(value, Mapping):
                values |= {f"{name}.{key}": of_key for key, of_key in value.items()}
            elif name not in _NO_SETTINGS:
                values[name] = value
        parameters = _mapping(table.get("parameters"))
        by_system = {name: chosen for name, chosen in parameters.items() if _mapping(chosen)}
        return cls(values, by_system, _mapping(inputs))

    def with_api(self, cells: pd.DataFrame) -> Settings:
        """These settings with the API that the cells of a run were sent to, if it is one."""
        apis = set(cells[API_COLUMN]) - {""} if API_COLUMN in cells else set()
        values = dict.fromkeys(["client.api"], *apis) if len(apis) == 1 else {}
        return dataclasses.replace(self, values={**self.values, **values})

    def value(self, setting: Declared) -> Any:
        """The value of a setting; its default where the file does not name it."""
        return self.values.get(setting.path, setting.default)

    def columns(self, names: Iterable[str], cell: Mapping[str, str]) -> dict[str, str]:
        """Those of the named columns that are a setting with one value, or a parameter of the
        system of `cell`, with their text as `column_text` has it.
        """
        texts = {}
        for name in names:
            setting = declared(ExperimentSchema).get(name)
            system, _, parameter = name.rpartition(".")
            if setting is not None:
                values = listed(self.value(setting))
            elif system and system == cell.get("system"):
                values = listed(self.parameters.get(system, {}).get(parameter, ()))
            else:
                continue
            if len(values) == 1:
                texts[name] = column_text(name, values[0])
        return texts


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def column_text(path: str, value: object) -> str:
    """One value of a setting as text by which columns are matched: 16, 16.0 and "16" of a number
    are the same, and so are unset and empty.
    """
    if value is None or value != value or value == "":
        return NONE
    setting = declared(ExperimentSchema).get(path)
    if setting is not None and setting.kind in (int, float):
        with contextlib.suppress(TypeError, ValueError):
            return f"{float(value):.9g}"  # type: ignore[arg-type]
    return str(column_value(_plain(value)))


@dataclass(frozen=True)
class SettingDifferences:
    """Conditions and `settings` of the deployment that are not equal, and `parameters` as
    `system.parameter`, as texts of A and B. `notes` name what is not known.
    """

    settings: Mapping[str, Pair]
    parameters: Mapping[str, Pair]
    notes: tuple[str, ...] = ()


def differences(
    a: Settings, b: Settings, names: Pair, *, schema: type[BaseModel] = ExperimentSchema
) -> SettingDifferences:
    """The settings in which two experiments differ, but for those with several values on a side.

    A value counts as equal if it means the same: 1 and 1.0, unset and the default, one SLO written
    in two ways, a file of the same content or (where that is not known) of the same name.
    """
    unequal = {}
    inputs = a.inputs, b.inputs
    fields = {*schema.model_fields}
    fields |= {f"{name}.{field}" for name, table in TABLES.items() for field in table.model_fields}
    lacking: tuple[list[str], list[str]] = ([], [])
    for path, setting in declared(schema).items():
        if not (setting.condition or setting.role == "deployment"):
            continue
        in_a, in_b = a.value(setting), b.value(setting)
        if setting.several and "." not in path and len(listed(in_a)) + len(listed(in_b)) > 2:
            if not _equal_contents(setting, in_a, in_b, inputs):
                unequal[path] = _texts(in_a, in_b)
            continue
        always_written = "." not in path and setting.default not in (None, (None,))
        if always_written and (path in a.values) != (path in b.values):
            lacking[path in a.values].append(path)
        if not _equal(setting, in_a, in_b, inputs):
            unequal[path] = _texts(in_a, in_b)
    notes = [
        f"{name} does not name {', '.join(paths)}: taken as the default."
        for name, paths in zip(names, lacking, strict=True)
        if paths
    ]
    for name, settings in zip(names, (a, b), strict=True):
        if unknown := [path for path in settings.values if path not in fields]:
            notes.append(
                f"{name} has settings that this version does not know, and that are not compared: "
                f"{', '.join(unknown)}."
            )
    return SettingDifferences(unequal, _parameters(a, b), tuple(notes))


def _parameters(a: Settings, b: Settings) -> dict[str, Pair]:
    """Parameters of systems in both, of one value each, that are not equal."""
    unequal = {}
    for system in {**a.parameters, **b.parameters}:
        of_a, of_b = a.parameters.get(system, {}), b.parameters.get(system, {})
        for name in {**of_a, **of_b}:
            pair = of_a.get(name, "default"), of_b.get(name, "default")
            if pair[0] != pair[1] and not any(isinstance(value, list) for value in pair):
                unequal[f"{system}.{name}"] = _texts(*pair)
    return unequal


def _equal(setting: Declared, a: Any, b: Any, inputs: Inputs) -> bool:
    values_a, values_b = listed(a), listed(b)
    return len(values_a) == len(values_b) and all(
        _equal_values(setting, value_a, value_b, inputs)
        for value_a, value_b in zip(values_a, values_b, strict=True)
    )


def _equal_values(setting: Declared, a: Any, b: Any, inputs: Inputs) -> bool:
    if setting.path == "slo" and all(isinstance(value, str | Mapping) for value in (a, b)):
        with contextlib.suppress(SloBenchError):
            return parse_slo(a) == parse_slo(b)
    if not (isinstance(a, str) and isinstance(b, str)):
        return bool(a == b)
    if setting.setting.file != "no":
        contents_a, contents_b = _contents(a, inputs[0]), _contents(b, inputs[1])
        both = contents_a.keys() & contents_b.keys()
        if any(contents_a[place] != contents_b[place] for place in both):
            return False
        if "(" not in a:
            return bool(both) or Path(a).name == Path(b).name
    return a.split() == b.split() or "".join(a.split()) == "".join(b.split())


def _equal_contents(setting: Declared, a: Any, b: Any, inputs: Inputs) -> bool:
    """Whether files of one name among several values have the same content, as far as known."""
    return setting.setting.file == "no" or all(
        _equal_values(setting, value_a, value_b, inputs)
        for value_a, value_b in itertools.product(listed(a), listed(b))
        if value_a and value_b and Path(value_a).name == Path(value_b).name
    )


def _contents(value: str, inputs: Mapping[str, str]) -> dict[tuple[int, str], str]:
    """CRC-32 of the files that a value names, also as part of a mix or in a folder, by the part's
    number and the path within the folder. A name without a slash is no folder.
    """
    contents = {}
    for number, part in enumerate(re.split(r"[,:@<=()]", value)):
        steps = [step for step in part.strip().split("/") if step not in ("", ".", "..")]
        for path, crc32 in inputs.items():
            _, named, rest = path.rpartition(f"/{'/'.join(steps)}") if steps else ("", "", "")
            if named and (not rest or (rest[0] == "/" and "/" in part)):
                contents[number, rest] = crc32
    return contents


def _texts(a: Any, b: Any) -> Pair:
    texts = _text(a), _text(b)
    return texts if texts[0] != texts[1] else (texts[0], f"{texts[1]} (another content)")


def _text(value: Any) -> str:
    values = listed(value)
    if values in ((), [], (None,), ({},)):
        return NONE
    return ", ".join(
        f"{value:g}" if isinstance(value, float) else str(column_value(value)) or "''"
        for value in map(_plain, values)
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | Mapping) else str(value)


def condition_names(schema: type[BaseModel] = ExperimentSchema) -> list[str]:
    """The settings that may be allowed to differ, with `rates`."""
    return [path for path, setting in declared(schema).items() if setting.condition] + [RATES]


def check_allowed(names: Collection[str]) -> None:
    """Refuse a name that is no condition.

    Raises:
        UnknownNameError: there is no such setting.
        SloBenchError: the setting may differ in any case.
    """
    for name in names:
        if name in condition_names():
            continue
        if name in declared(ExperimentSchema):
            raise SloBenchError(f"{name} is no condition: it may differ without --allow-different")
        raise UnknownNameError("condition", name, condition_names())


def changes_requests(names: Iterable[str]) -> bool:
    """Whether requests of the same seed may differ because of one of these settings."""
    settings = declared(ExperimentSchema)
    return any(
        settings[name].setting.panel in (ARRIVES, ARRIVES_MORE)
        for name in names
        if name in settings and name not in SLO
    )
