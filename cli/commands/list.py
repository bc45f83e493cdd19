"""`slo-bench list`: the names that other commands take."""

from __future__ import annotations

import json
import textwrap
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
    "gpus": ("name", "memory_gib", "bandwidth_gb_per_s", "tflops_16bit", "power_w", "usd_per_hour"),
    "models": (
        *("name", "family", "parameters_billions"),
        *("layers", "context_tokens", "checkpoint_dtype"),
    ),
    "systems": ("name", "description"),
    "workloads": ("name", "title", "mean_prompt_tokens", "mean_output_tokens"),
}


_HEAD_WIDTH = 12  # characters


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
    for column in entries[0]:
        numbers = all(isinstance(entry[column], int | float | None) for entry in entries)
        table.add_column(
            textwrap.fill(column.replace("_", " "), _HEAD_WIDTH),
            justify="right" if numbers else "left",
            no_wrap=column == "name" or numbers,
            overflow="fold",
        )
    for entry in entries:
        table.add_row(*(Text(_shown(value)) for value in entry.values()))
    terminal().print(table)
    if kind in (*_BRIEFLY, "compatibility"):
        typer.echo(f"\nMore about one: slo-bench list {kind} {entries[0]['name']}", err=True)


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
