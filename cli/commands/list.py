"""`slo-bench list`: the names that other commands take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from ...workloads.errors import UnknownNameError
from ..options.names import KINDS, Entry, complete_kind, complete_name
from ..options.parameters import argument, flag

EXAMPLES = (
    "slo-bench list systems",
    "slo-bench list systems ascendra",
    "slo-bench list suites ascendra-drop",
    "slo-bench list gpus --json",
)

_BRIEFLY = {
    "systems": ("name", "description"),
    "workloads": ("name", "title", "mean_prompt_tokens", "mean_output_tokens"),
}

_LONGEST_WORD = 12  # characters of a text that stay together where a terminal is narrow


def list_names(
    kind: Annotated[
        str,
        argument(
            "KIND",
            "Kind of names: systems, compatibility (systems by backend), models, gpus, links, "
            "workloads, suites or routers.",
            complete=complete_kind,
        ),
    ],
    name: Annotated[
        str | None, argument("[NAME]", "Show the details of this name.", complete=complete_name)
    ] = None,
    as_json: Annotated[bool, flag("Print a JSON list.", "--json")] = False,
) -> None:
    """List the names that other commands accept, or show the details of one name."""
    if kind not in KINDS:
        raise UnknownNameError("list", kind, KINDS)
    entries = KINDS[kind]()
    if name is not None:
        there = [str(entry["name"]) for entry in entries]
        if name not in there:
            raise UnknownNameError(f"name among {kind}", name, there)
        entries = [entries[there.index(name)]]
    if as_json:
        typer.echo(json.dumps(entries, ensure_ascii=False, indent=2))
    elif name is not None:
        _show_whole(entries[0])
        if kind == "systems":
            _show_parameters(name)
        elif kind == "suites":
            _show_allowances(name)
    else:
        _show_all(kind, entries)


def _show_all(kind: str, entries: list[Entry]) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..output.console import terminal

    if kind == "compatibility":  # reasons are shown only for a single name
        entries = [{c: str(v).partition(":")[0] for c, v in e.items()} for e in entries]
    elif kind in _BRIEFLY:
        entries = [{column: entry[column] for column in _BRIEFLY[kind]} for entry in entries]
    table = Table(box=None, pad_edge=False, header_style="bold")
    console = terminal()
    columns = [_Column.of(name, [entry[name] for entry in entries]) for name in entries[0]]
    left = console.width - sum(column.least + 2 for column in columns) + 2
    for column in columns:  # those on the left get what is left first
        more = max(0, min(left, column.full - column.least))
        left -= more
        table.add_column(
            column.head,
            justify="right" if column.numbers else "left",
            width=column.least + more,
            overflow="fold",
        )
    for entry in entries:
        table.add_row(*(Text(_shown(value)) for value in entry.values()))
    console.print(table)
    if kind in (*_BRIEFLY, "compatibility"):
        typer.echo(f"\nMore about one: slo-bench list {kind} {entries[0]['name']}", err=True)


@dataclass(frozen=True)
class _Column:
    """Widths that a column of a list needs, in characters."""

    head: str
    numbers: bool
    least: int  # the head breaks at spaces, texts too
    full: int

    @classmethod
    def of(cls, name: str, values: Sequence[str | float | None]) -> _Column:
        """Of the values below its head."""
        head, texts = name.replace("_", " "), [_shown(value) for value in values]
        numbers = all(isinstance(value, int | float | None) for value in values)
        whole = texts if numbers or name == "name" else " ".join(texts).split()
        short = (text[:_LONGEST_WORD] if whole is not texts else text for text in whole)
        least = max(map(len, (*head.split(), *short)))
        return cls(head, numbers, least, max(map(len, (head, *texts))))


def _show_whole(entry: Entry) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..output.console import terminal

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for column, value in entry.items():
        if column != "parameters":
            table.add_row(column.replace("_", " "), Text(_shown(value)))
    terminal().print(table)


def _show_parameters(name: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from ...harness.policies.systems import system
    from ..output.console import terminal

    found = system(name)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("parameter", no_wrap=True)
    table.add_column("default", justify="right", overflow="fold")
    table.add_column("may be", overflow="fold")
    values = found.parameters()
    for parameter, bounds in found.bounds().items():
        value = values[parameter]
        shown = str(value).lower() if isinstance(value, bool) else _shown(value)
        table.add_row(parameter, Text(shown or "–"), Text(str(bounds)))
    terminal().print()
    terminal().print(table)


def _show_allowances(name: str) -> None:
    from rich.table import Table

    from ...harness.experiments.allowances import HEADS, allowances
    from ...harness.experiments.experiment import Experiment
    from ..output.console import terminal

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in HEADS:
        table.add_column(head, overflow="fold", no_wrap=head == "system")
    for one in allowances(Experiment.suite(name)):
        table.add_row(*one.row)
    terminal().print()
    terminal().print(table)


def _shown(value: str | float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
