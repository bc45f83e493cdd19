"""How commands declare their options, flags, arguments and examples.

Each function returns the metadata of an `Annotated` parameter. `names` are the option's names, such
as "--out" and "-o"; by default "--" and the parameter's name. `panel` is the option's panel in the
help; `complete` returns the values that begin with what was typed. Further keywords are those of
`typer.Option`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

Complete = Callable[[str], list[str]]

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
    panel: str | None = None,
    complete: Complete | None = None,
    **more: Any,
) -> Any:
    """An option with a value, which the help shows as `metavar`."""
    return typer.Option(
        *names,
        metavar=metavar,
        help=text,
        rich_help_panel=panel,
        autocompletion=complete,
        **more,
    )


def flag(text: str, *names: str, panel: str | None = None) -> Any:
    """An option without a value."""
    return typer.Option(*names, help=text, rich_help_panel=panel)


def added_flag(name: str, text: str, then: Callable[[Any, Any, bool], None]) -> Any:
    """A flag, such as "--help-all", to be added to the parameters of a command that has been made:
    `then` is called with the context, the flag and whether it was given.
    """

    def carrier(is_set: bool = False) -> None:
        pass

    carrier.__annotations__["is_set"] = Annotated[bool, flag(text, name)]
    app = typer.Typer(add_completion=False)
    app.command()(carrier)
    parameter: Any = get_command(app).params[0]
    parameter.name = name.removeprefix("--").replace("-", "_")
    parameter.expose_value, parameter.callback = False, then
    return parameter


def argument(metavar: str, text: str, *, complete: Callable[..., list[str]] | None = None) -> Any:
    """A positional argument of a command, shown in the help as `metavar` with `text`."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=complete)


def epilog(examples: Sequence[str]) -> str:
    """The examples below a command's help, each on a line of its own."""
    return "\n\n".join(["Examples:", *examples])
