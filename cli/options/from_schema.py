"""Options made from the settings of a schema, and what was given with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

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
from .declared import STORAGE, File, Set, Suite, Sweep, Variant
from .names import among, listed

_OWN = "panels of a command's own"
_PANELS = (
    *(None, COMPARED, _OWN, ARRIVES, SERVES, RUN, CLIENT),
    *(SERVERS, STORAGE, ARRIVES_MORE, SERVES_MORE),
)
# What is no setting itself.
_BESIDE = {"file": File, "suite": Suite, "set": Set, "sweep": Sweep, "variant": Variant}


@dataclass(frozen=True)
class Given:
    """The options of settings that were given.

    `settings` are their values by path (`tp`, `client.api`); `sets` and `sweeps` are as typed.
    `variant`: the name of the only variant that is wanted.
    """

    settings: dict[str, Any]
    file: Path | None = None
    suite: str | None = None
    sets: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()
    variant: str | None = None

    def __bool__(self) -> bool:
        """Does any of them change an experiment?"""
        return bool(self.settings or self.sets or self.sweeps or self.variant)

    def value(self, path: str) -> Any:
        """Return the given value of a setting of an experiment, or its default.

        Raises:
            SloBenchError: the setting may not be that word.
        """
        one = declared(ExperimentSchema)[path]
        first = one.default[0] if one.several and one.default else one.default
        found = self.settings.get(path, first)
        if one.choices and found is not None and found not in one.choices:
            words = " or ".join(map(repr, one.choices))
            raise SloBenchError(f"{one.option or path} must be {words} but is {found!r}")
        return found


@dataclass(frozen=True)
class Offer:
    """Which settings a command has options for: all of `schema`, or `only` these, `without` those.

    `changed` says what a command's option has in place of the schema's: fields of `Setting`.
    Beside settings there are `file`, `suite`, `set`, `sweep` and `variant`.
    """

    schema: type[BaseModel] = ExperimentSchema
    only: Collection[str] | None = None
    without: Collection[str] = ()
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def parameters(self) -> list[inspect.Parameter]:
        """Return the function parameters that correspond to these options."""
        beside = {
            name: inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
            )
            for name, kind in _BESIDE.items()
            if self._has(name)
        }
        first = [beside.pop(name) for name in ("file", "suite") if name in beside]
        return [*first, *map(_parameter, self._settings()), *beside.values()]

    def given(self, typed: dict[str, Any]) -> Given:
        """Remove the values of these options from `typed`, and return those that were given.

        Raises:
            SloBenchError: a value cannot be read.
        """
        beside = {name: typed.pop(name, None) for name in _BESIDE if self._has(name)}
        values = {one.path: _value(one, typed.pop(_name(one))) for one in self._settings()}
        return Given(
            {path: value for path, value in values.items() if value is not None},
            beside.get("file"),
            beside.get("suite"),
            tuple(beside.get("set") or ()),
            tuple(beside.get("sweep") or ()),
            beside.get("variant"),
        )

    def _settings(self) -> list[Declared]:
        known = declared(self.schema)
        strangers = {*(self.only or ()), *self.without, *self.changed} - {*_BESIDE, *known}
        assert not strangers, f"no settings: {strangers}"
        return [
            replace(one, setting=replace(one.setting, **self.changed.get(path, {})))
            for path, one in known.items()
            if self._has(path) and one.option
        ]

    def _has(self, path: str) -> bool:
        if path in _BESIDE and not issubclass(self.schema, ExperimentSchema):
            return False
        return path not in self.without and (self.only is None or path in self.only)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command function with options in place of each parameter that groups several.

    Such a parameter is annotated with an `Offer` (settings), or is a dataclass whose fields are
    options. Options are sorted by panel.
    """
    signature = inspect.signature(command, eval_str=True)
    offers: dict[str, Offer | type] = {}
    shown: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        named = getattr(parameter.annotation, "__metadata__", ())
        offer = next((one for one in named if isinstance(one, Offer)), None)
        if offer is not None:
            offers[name] = offer
            shown += offer.parameters()
        elif is_dataclass(group := parameter.annotation) and isinstance(group, type):
            offers[name] = group
            shown += inspect.signature(group, eval_str=True).parameters.values()
        else:
            shown.append(parameter)

    @functools.wraps(command)
    def called(**typed: Any) -> None:
        import_numpy()
        given: dict[str, Any] = {}
        for name, offer in offers.items():
            if isinstance(offer, Offer):
                given[name] = offer.given(typed)
            else:
                given[name] = offer(**{one.name: typed.pop(one.name) for one in fields(offer)})
        command(**typed, **given)

    shown = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in shown]
    shown.sort(key=_panel)
    called.__dict__["__signature__"] = signature.replace(parameters=shown)
    return called


def _panel(parameter: inspect.Parameter) -> int:
    """Return the position of an option's panel in the help."""
    panel = getattr(parameter.annotation.__metadata__[0], "rich_help_panel", None)
    return _PANELS.index(panel if panel in _PANELS else _OWN)


def _name(one: Declared) -> str:
    return one.option.removeprefix("--").replace("-", "_")


def _parameter(one: Declared) -> inspect.Parameter:
    how, kind = one.setting, one.kind
    taken: Any = str if how.read else Path if how.metavar in ("FILE", "DIR") else kind
    default: object = None
    names = [one.option, *filter(None, [how.short])]
    if how.repeated or kind is dict:
        taken = list[str] if kind is dict else list[kind]  # type: ignore[valid-type]
    elif kind is bool and _only_switches(one):
        default = False
    elif kind is bool:
        names = [f"{one.option}/--no-{one.option[2:]}"]
    complete = (
        listed(how.complete) if how.complete else among(*one.choices) if one.choices else None
    )
    option = typer.Option(
        *names,
        metavar=_metavar(one),
        help=one.help,
        autocompletion=complete,
        rich_help_panel=how.panel,
    )
    return inspect.Parameter(
        _name(one),
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[taken if default is False else taken | None, option],
    )


def _only_switches(one: Declared) -> bool:
    """Return True for a setting that its option can only switch on, or only off."""
    return one.default is False or one.option.startswith("--no-")


def _metavar(one: Declared) -> str | None:
    if one.setting.metavar is not None:
        return one.setting.metavar
    if one.kind is dict:
        return "NAME=VALUE" if one.values is str else "KEY=JSON"
    if one.choices:
        return "|".join(one.choices)
    if one.setting.unit in ("s", "GiB"):
        return one.setting.unit.upper()
    return {int: "N", float: "X"}.get(one.kind)


def _value(one: Declared, typed: Any) -> Any:
    """Return the value given for the setting; None if the option is absent."""
    how = one.setting
    if typed is None or (typed is False and _only_switches(one)) or typed in ([], ()):
        return None
    if one.kind is dict:
        return _pairs(one, typed)
    if how.read is not None:
        try:
            return how.read(typed)
        except SloBenchError as error:
            raise SloBenchError(f"{one.option}: {error}") from None
    if how.repeated:
        return tuple(n for one in typed for n in (one.split(",") if how.split else (one,)))
    if one.kind is bool:
        return typed != one.option.startswith("--no-")
    return str(typed) if isinstance(typed, Path) else typed


def _pairs(one: Declared, typed: list[str]) -> dict[str, Any]:
    read = one.setting.read or functools.partial(_pair, one)
    found: dict[str, Any] = {}
    for name, value in map(read, typed):
        if name in found:
            raise SloBenchError(f"{one.option} {name} is given twice; keep one of them")
        found[name] = value
    return found


def _pair(one: Declared, text: str) -> tuple[str, Any]:
    name, equals, value = (piece.strip() for piece in text.partition("="))
    if not equals or not name:
        # The value may be a secret: it is not repeated.
        raise SloBenchError(f"cannot read {one.option} {name!r}; write {_metavar(one)}")
    if one.values is str:
        return name, value
    try:
        return name, parse_json(value)
    except ValueError:
        if value[:1] in ("{", "[", '"'):
            raise SloBenchError(f"{one.option} {name}: {value!r} is no JSON") from None
        return name, value
