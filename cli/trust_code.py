"""The option --trust-code, and the question that it answers beforehand."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ..workloads.errors import SloBenchError
from .options.parameters import added_flag

COMMANDS = (
    *("run", "capacity", "report", "compare", "gate", "explain", "sensitivity", "validate"),
    *("plan", "tune", "predict-eval"),
)

_trusted = False


def trust_option() -> Any:
    """The option, for a command that reads experiments or studies that others may have written."""
    return added_flag(
        "--trust-code",
        "Run policy files that an experiment file or run folder names, and use the storage that a "
        "study names, without asking.",
        _trust,
    )


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


def _trust(context: Any, option: Any, is_set: bool) -> None:
    global _trusted
    _trusted = _trusted or is_set
