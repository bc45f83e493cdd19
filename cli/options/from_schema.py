"""Options made from the settings of a schema, and what was given with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.experiments.config.setting import (
    ARRIVES,
    ARRIVES_MORE,
    CLIENT,
    COMPARED,
    RUN,
    SERVERS,
    SERVES,
    SERVES_MORE,
    Declared,
    declared,
)
from ...workloads.errors import SloBenchError
from ...workloads.parsing import parse_json
from ..one_thread import import_numpy
from .declared import STORAGE, BesideSettings
from .names import among, listed
from .parameters import parameters_of

_OWN = "panels of a command's own"
_PANELS = (
    *(None, COMPARED, _OWN, ARRIVES, SERVES, RUN, CLIENT),
    *(SERVERS, STORAGE, ARRIVES_MORE, SERVES_MORE),
)
_BESIDE = {parameter.name: parameter for parameter in parameters_of(BesideSettings)}


@dataclass(frozen=True)
class Given:
    """The options of settings that were given.

    `settings` are their values by path (`tp`, `client.api`); `sets` and `sweeps` are as typed.
    `variant`: the name of the only variant that is wanted. `like`: a deployment whose settings hold
    where these say nothing.
    """

    settings: dict[str, Any]
    file: Path | None = None
    suite: str | None = None
    sets: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()
    variant: str | None = None
    like: str | None = None

    def __bool__(self) -> bool:
        """Does any of them change an experiment?"""
        return bool(self.settings or self.sets or self.sweeps or self.variant or self.like)

    def value(self, path: str) -> Any:
        """Return the given value of a setting of an experiment, or its default.

        Raises:
            SloBenchError: the setting may not be that word.
        """
        declaration = declared(ExperimentSchema)[path]
        value = self.settings.get(path, declaration.first)
        if declaration.choices and value not in (None, *declaration.choices):
            words = " or ".join(map(repr, declaration.choices))
            raise SloBenchError(f"{declaration.option or path} must be {words} but is {value!r}")
        return value


@dataclass(frozen=True)
class Offer:
    """Which settings a command has options for: all of `schema`, or `only` these, `without` those.

    `changed` says what a command's option has in place of the schema's: fields of `Setting`.
    Beside settings there are `file`, `suite`, `set`, `sweep`, `variant` and `like`.
    """

    schema: type[BaseModel] = ExperimentSchema
    only: Collection[str] | None = None
    without: Collection[str] = ()
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def parameters(self) -> list[inspect.Parameter]:
        """Return the function parameters that correspond to these options."""
        beside = {name: option for name, option in _BESIDE.items() if self._has(name)}
        first = [beside.pop(name) for name in ("file", "suite") if name in beside]
        return [*first, *map(_parameter, self._settings()), *beside.values()]

    def given(self, typed: dict[str, Any]) -> Given:
        """Remove the values of these options from `typed`, and return those that were given.

        Raises:
            SloBenchError: a value cannot be read.
        """
        beside = {name: typed.pop(name, None) for name in _BESIDE if self._has(name)}
        values = {
            declaration.path: _value(declaration, typed.pop(_name(declaration)))
            for declaration in self._settings()
        }
        return Given(
            {path: value for path, value in values.items() if value is not None},
            beside.get("file"),
            beside.get("suite"),
            tuple(beside.get("set") or ()),
            tuple(beside.get("sweep") or ()),
            beside.get("variant"),
            beside.get("like"),
        )

    def _settings(self) -> list[Declared]:
        declarations = declared(self.schema)
        strangers = {*(self.only or ()), *self.without, *self.changed} - {*_BESIDE, *declarations}
        assert not strangers, f"no settings: {strangers}"
        return [
            replace(declaration, setting=replace(declaration.setting, **self.changed.get(path, {})))
            for path, declaration in declarations.items()
            if self._has(path) and declaration.option
        ]

    def _has(self, path: str) -> bool:
        if path in _BESIDE and not issubclass(self.schema, ExperimentSchema):
            return False
        return path not in self.without and (self.only is None or path in self.only)


def offer(schema: type[BaseModel] = ExperimentSchema, **how: Any) -> Any:
    """The default of a parameter that takes what was given of the options of an `Offer`."""
    return Offer(schema, **how)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command function with options in place of each parameter that groups several.

    Such a parameter has an `offer` of settings as its default, or is an `option_group`. Options are
    sorted by panel.
    """
    signature = inspect.signature(command, eval_str=True)
    readers: dict[str, Callable[[dict[str, Any]], Any]] = {}  # take the options of a group
    shown: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if isinstance(parameter.default, Offer):
            readers[name] = parameter.default.given
            shown += parameter.default.parameters()
        elif is_dataclass(group := parameter.annotation):
            readers[name] = functools.partial(_group_of, group)
            shown += parameters_of(group)
        else:
            shown.append(parameter)

    @functools.wraps(command)
    def called(**typed: Any) -> None:
        import_numpy()
        groups = {name: read(typed) for name, read in readers.items()}
        command(**typed, **groups)

    shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shown]
    shown.sort(key=_panel)
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    called.__dict__["__signature__"] = signature.replace(parameters=shown)
    return called


def _group_of(group: Any, typed: dict[str, Any]) -> Any:
    return group(**{entry.name: typed.pop(entry.name) for entry in fields(group)})


def _panel(parameter: inspect.Parameter) -> int:
    """Return the position of an option's panel in the help."""
    panel = getattr(parameter.default, "rich_help_panel", None)
    return _PANELS.index(panel if panel in _PANELS else _OWN)


def _name(declaration: Declared) -> str:
    return declaration.option.removeprefix("--").replace("-", "_")


def _parameter(declaration: Declared) -> inspect.Parameter:
    setting, kind = declaration.setting, declaration.kind
    annotation: Any = str if setting.read else Path if setting.metavar in ("FILE", "DIR") else kind
    default: object = None
    names = [declaration.option, *filter(None, [setting.short])]
    if setting.repeated or kind is dict:
        annotation = list[str] if kind is dict else list[kind]  # type: ignore[valid-type]
    elif kind is bool and _only_switches(declaration):
        default = False
    elif kind is bool:
        names = [f"{declaration.option}/--no-{declaration.option[2:]}"]
    complete = among(*declaration.choices) if declaration.choices else None
    if setting.complete:
        complete = listed(setting.complete)
    option = typer.Option(
        default,
        *names,
        metavar=_metavar(declaration),
        help=declaration.help,
        autocompletion=complete,
        rich_help_panel=setting.panel,
    )
    return inspect.Parameter(
        _name(declaration),
        inspect.Parameter.KEYWORD_ONLY,
        default=option,
        annotation=annotation if default is False else annotation | None,
    )


def _only_switches(declaration: Declared) -> bool:
    """Return True for a setting that its option can only switch on, or only off."""
    return declaration.default is False or declaration.option.startswith("--no-")


def _metavar(declaration: Declared) -> str | None:
    if declaration.setting.metavar is not None:
        return declaration.setting.metavar
    if declaration.kind is dict:
        return "NAME=VALUE" if declaration.values is str else "KEY=JSON"
    if declaration.choices:
        return "|".join(declaration.choices)
    if declaration.setting.unit in ("s", "GiB"):
        return declaration.setting.unit.upper()
    return {int: "N", float: "X"}.get(declaration.kind)


def _value(declaration: Declared, typed: Any) -> Any:
    """Return the value given for the setting; None if the option is absent."""
    setting = declaration.setting
    if typed is None or (typed is False and _only_switches(declaration)) or typed in ([], ()):
        return None
    if declaration.kind is dict:
        return _pairs(declaration, typed)
    if setting.read is not None:
        try:
            return setting.read(typed)
        except SloBenchError as error:
            raise SloBenchError(f"{declaration.option}: {error}") from None
    if setting.repeated:
        return tuple(n for text in typed for n in (text.split(",") if setting.split else (text,)))
    if declaration.kind is bool:
        return typed != declaration.option.startswith("--no-")
    return str(typed) if isinstance(typed, Path) else typed


def _pairs(declaration: Declared, typed: list[str]) -> dict[str, Any]:
    read = declaration.setting.read or functools.partial(_pair, declaration)
    pairs: dict[str, Any] = {}
    for name, value in map(read, typed):
        if name in pairs:
            raise SloBenchError(f"{declaration.option} {name} is given twice; keep one of them")
        pairs[name] = value
    return pairs


def _pair(declaration: Declared, text: str) -> tuple[str, Any]:
    name, equals, value = (piece.strip() for piece in text.partition("="))
    if not equals or not name:
        # The value may be a secret: it is not repeated.
        raise SloBenchError(
            f"cannot read {declaration.option} {name!r}; write {_metavar(declaration)}"
        )
    if declaration.values is str:
        return name, value
    try:
        return name, parse_json(value)
    except ValueError:
        if value[:1] in ("{", "[", '"'):
            raise SloBenchError(f"{declaration.option} {name}: {value!r} is no JSON") from None
        return name, value
