"""The option --trust-code, and the question that it answers beforehand."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from ..workloads.errors import SloBenchError
from .options.parameters import flag

COMMANDS = (
    *("run", "capacity", "report", "compare", "gate", "explain", "sensitivity", "validate"),
    *("plan", "tune", "predict-eval"),
)

_trusted = False


def trust_option() -> Any:
    """The option, for a command that reads experiments or studies that others may have written."""

    def carrier(
        trust_code: Annotated[
            bool,
            flag(
                "Run policy files that an experiment file or run folder names, and use the "
                "storage that a study names, without asking.",
                "--trust-code",
            ),
        ] = False,
    ) -> None:
        pass

    app = typer.Typer(add_completion=False)
    app.command()(carrier)
    option: Any = next(p for p in get_command(app).params if p.name == "trust_code")
    option.expose_value, option.callback = False, _trust
    return option


def consent(claim: str) -> None:
    """Say what a file would do; go on with --trust-code or after a yes on a terminal.

    Raises:
        SloBenchError: it is not trusted.
    """
    from .output.console import harmless

    claim = harmless(claim)
    if _trusted:
        typer.echo(claim, err=True)
    elif not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise SloBenchError(f"{claim}; add --trust-code if you trust its author")
    elif not typer.confirm(f"{claim}. Do you trust its author?", err=True):
        raise SloBenchError("not trusted; nothing was run")


def named_code(words: Sequence[str]) -> list[str]:
    """Absolute paths of the policy files that the user's own words name."""
    global _trusted
    _trusted = False
    pieces = (re.sub(r":\w+$", "", piece) for word in words for piece in re.split("[=,]", word))
    return [str(Path(piece).absolute()) for piece in pieces if piece.endswith(".py")]


def _trust(context: Any, option: Any, given: bool) -> None:
    global _trusted
    _trusted = _trusted or given
