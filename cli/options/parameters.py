"""How commands declare their options, flags, arguments and examples.

Each function returns the default of a parameter of a command, or of a field of an `option_group`.
`names` are the option's names, such as "--out" and "-o"; by default "--" and the parameter's name.
`default` is the value where it is not given; `...`: it must be. `panel` is the option's panel in
the help; `complete` returns the values that begin with what was typed. Further keywords are those
of `typer.Option`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

import typer
from typer.main import get_command

Complete = Callable[[str], list[str]]
T = TypeVar("T")

# Names of options that several commands have.
OUT = ("--out", "-o")
MODEL = ("--model", "-m")
GPU = ("--gpu", "-g")
CELL = ("--cell", "-c")
JOBS = ("--jobs", "-j")
BACKEND = ("--backend", "-b")


def option(
    metavar: str | None,
    text: str,
    *names: str,
    default: Any = None,
    panel: str | None = None,
    complete: Complete | None = None,
    **more: Any,
) -> Any:
    """An option with a value, which the help shows as `metavar`."""
    return typer.Option(
        default,
        *names,
        metavar=metavar,
        help=text,
        rich_help_panel=panel,
        autocompletion=complete,
        **more,
    )


def allow_host(panel: str | None = None) -> Any:
    """Names under which an address of this machine answers, as a list."""
    return option(
        "NAME",
        "Another name under which the address answers (header Host). May be repeated. Default: "
        "those of this machine alone, so that no web page can ask it as its own.",
        "--allow-host",
        panel=panel,
    )


def flag(text: str, *names: str, default: bool | None = False, panel: str | None = None) -> Any:
    """An option without a value."""
    return typer.Option(default, *names, help=text, rich_help_panel=panel)


VERBOSE = flag("Also print every system at every rate, and all notes.", "--verbose", "-v")


def added_flag(name: str, text: str, then: Callable[[Any, Any, bool], None]) -> Any:
    """A flag, such as "--help-all", to be added to the parameters of a command that has been made:
    `then` is called with the context, the flag and whether it was given.
    """

    def carrier(is_set: bool = flag(text, name)) -> None:
        pass

    app = typer.Typer(add_completion=False)
    app.command()(carrier)
    parameter: Any = get_command(app).params[0]
    parameter.name = name.removeprefix("--").replace("-", "_")
    parameter.expose_value, parameter.callback = False, then
    return parameter


def argument(
    metavar: str,
    text: str,
    *,
    default: Any = ...,
    complete: Callable[..., list[str]] | None = None,
) -> Any:
    """A positional argument of a command, shown in the help as `metavar` with `text`."""
    return typer.Argument(default, metavar=metavar, help=text, autocompletion=complete)


@dataclass_transform(frozen_default=True)
def option_group(group: type[T]) -> type[T]:
    """A frozen dataclass whose fields are options, for a parameter of a command `with_options`."""
    for name in inspect.get_annotations(group):
        declaration = vars(group)[name]
        group_field: Any = field(default=declaration.default, metadata={"option": declaration})
        setattr(group, name, group_field)
    return dataclass(frozen=True)(group)


def parameters_of(group: Any) -> list[inspect.Parameter]:
    """The parameters of a command that are the options of an `option_group`."""
    parameters = inspect.signature(group, eval_str=True).parameters
    return [
        parameters[declared.name].replace(default=declared.metadata["option"])
        for declared in fields(group)
    ]


def epilog(examples: Sequence[str]) -> str:
    """The examples below a command's help, each on a line of its own."""
    return "\n\n".join(["Examples:", *examples])
