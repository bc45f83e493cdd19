"""Shell completion of option values: names in the catalogues."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from .names import KINDS, names

Complete = Callable[[str], list[str]]


def among(*names: str) -> Complete:
    """Return a completion function for a fixed list of values."""
    return lambda incomplete: _beginning_with(incomplete, names)


def listed(kind: str) -> Complete:
    """Complete a name of `slo-bench list KIND`; after a comma another one."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in _beginning_with(last, names(kind))]

    return complete


def kinds(incomplete: str) -> list[str]:
    """Complete KIND of `slo-bench list KIND`."""
    return _beginning_with(incomplete, KINDS)


def of_that_kind(context: typer.Context, incomplete: str) -> list[str]:
    """Complete NAME of `slo-bench list KIND NAME`."""
    kind = context.params.get("kind")
    return _beginning_with(incomplete, names(kind)) if kind in KINDS else []


def _beginning_with(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
