"""Experiment files: TOML text, relative paths, and errors that name the line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from pydantic import BaseModel, ValidationError

from ....workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from ....workloads.input_files import check_input
from ....workloads.parsing import parse_toml
from .setting import declared
from .tables import ClientSchema, ServerSchema, TuningRecord

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

TABLES: Mapping[str, type[BaseModel]] = {"client": ClientSchema, "server": ServerSchema}
_HEADER = re.compile(r"\s*\[\[?([^\]]+)\]\]?")
_ASSIGNMENT = re.compile(r"\s*((?:[A-Za-z0-9_.-]|\"[^\"]*\"|'[^']*')+)\s*=")
_KEY_PART = re.compile(r"\"([^\"]*)\"|'([^']*)'|([^.\s]+)")


def read_toml(path: Path) -> tuple[dict[str, object], str]:
    """The table in a file, and the file's text.

    Raises:
        FileFormatError: it cannot be read or is not TOML.
    """
    check_input(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(path, None, f"cannot be read: {error.strerror or error}") from error
    except UnicodeError as error:
        raise FileFormatError(path, None, f"is not UTF-8 text: {error}") from error
    try:
        return parse_toml(text), text
    except tomllib.TOMLDecodeError as error:
        match = re.match(r"(.*) \(at line (\d+), column \d+\)", str(error))
        line = int(match[2]) if match else None
        raise FileFormatError(path, line, f"is not TOML: {match[1] if match else error}") from error


def line_of(text: str, location: Sequence[str | int]) -> int | None:
    """The line that sets `location`, say ("parameters", "vllm", "max_num_seqs"), or the one above
    it.
    """
    target = [str(part) for part in location if isinstance(part, str)]
    best, best_line = 0, None
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            here = table
        elif assignment := _ASSIGNMENT.match(line):
            here = table + _parts(assignment[1])
        else:
            continue
        depth = min(len(here), len(target))
        if depth > best and here[:depth] == target[:depth] and len(here) <= len(target):
            best, best_line = depth, number
    return best_line


def _parts(key: str) -> list[str]:
    return [a or b or c for a, b, c in _KEY_PART.findall(key)]


def to_toml(table: Mapping[str, object]) -> str:
    """`table` as TOML: values first, then its tables. None has no word in TOML; it is left out."""
    return tomli_w.dumps(_without_none(table))


def _without_none(table: Mapping[str, object]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in table.items()
        if value is not None
    }


def all_anchored(
    settings: Mapping[str, Any], folder: Path, schema: type[BaseModel]
) -> dict[str, Any]:
    """The settings that name files, and the tables, with relative paths starting at `folder`."""
    tables = {name: dict(settings[name]) for name in TABLES if _is_table(settings.get(name))}
    tables |= {"": {name: value for name, value in settings.items() if name not in tables}}
    for path, declaration in declared(schema).items():
        table, _, name = path.rpartition(".")
        value = tables.get(table, {}).get(name)
        if value and declaration.setting.file == "maybe":
            tables[table][name] = _in_each(value, partial(_anchored, folder=folder))
        elif value and declaration.setting.file == "within":
            tables[table][name] = _in_each(value, partial(_within, folder=folder))
        elif value and declaration.setting.file == "yes":
            tables[table][name] = str(folder / value)
    if _is_table(settings.get("parameters")):
        tables[""]["parameters"] = {
            _anchored(k, folder): v for k, v in settings["parameters"].items()
        }
    if _is_table(settings.get("variants")):
        tables[""]["variants"] = {
            name: all_anchored(changes, folder, schema) if _is_table(changes) else changes
            for name, changes in settings["variants"].items()
        }
    return {**tables.pop(""), **tables}


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _in_each(value: object, change: Callable[[str], str]) -> object:
    """The value with every text in it changed."""
    if isinstance(value, list | tuple):
        return type(value)(_in_each(entry, change) for entry in value)
    return change(value) if isinstance(value, str) else value


def _anchored(value: str, folder: Path) -> str:
    """The name of a file in `folder`, made absolute; what is no file stays as it is."""
    path, colon, rest = value.partition(":")
    # A name like `sharegpt` is the catalogue's, also where a folder of that name exists.
    like_a_path = "/" in path or Path(path).suffix
    if like_a_path and (folder / path).exists():
        return f"{folder / path}{colon}{rest}"
    return value


def _within(value: str, folder: Path) -> str:
    return re.sub(r"[^:@<=]+", lambda part: _anchored(part[0], folder), value)


class SettingError(SloBenchError):
    """A setting that an experiment cannot have; `location` is its path in the file."""

    def __init__(self, location: tuple[str | int, ...], problem: str) -> None:
        super().__init__(problem)
        self.location = location


def setting_error(
    error: ValidationError, schema: type[BaseModel], kind: str = "setting"
) -> SettingError:
    """Error for the first problem that pydantic reports."""
    first = error.errors()[0]
    return SettingError(first["loc"], _problem(first, schema.model_fields, kind))


def _problem(error: ErrorDetails, fields: Mapping[str, object], setting_kind: str) -> str:
    location = [str(part) for part in error["loc"] if isinstance(part, str)]
    first = location[0] if location else ""
    depth = 3 if first in ("parameters", "tuning", "variants") else 2 if first in TABLES else 1
    setting = ".".join(location[:depth])
    kind, message = error["type"], str(error["msg"])
    if kind == "extra_forbidden":
        tables: Mapping[str, type[BaseModel]] = {**TABLES, "tuning": TuningRecord}
        names = tables[first].model_fields if first in tables else fields
        return str(UnknownNameError(setting_kind, location[depth - 1], names))
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        return f"{setting} {message}".strip()
    if kind == "missing":
        return f"{setting} is missing"
    if kind == "too_short":
        return f"{setting} must have at least one value"
    message = message.removeprefix("Input should be ")
    return f"{setting} must be {message} but is {error['input']!r}"
