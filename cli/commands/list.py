"""`slo-bench list`: the names that other commands take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ...workloads.errors import UnknownNameError
from ..options.names import KINDS, Entry, complete_kind, complete_name, in_brief, model_entry
from ..options.parameters import argument, flag

EXAMPLES = (
    "slo-bench list systems",
    "slo-bench list systems ascendra",
    "slo-bench list models ./checkpoint",
    "slo-bench list suites ascendra-drop",
    "slo-bench list gpus --json",
)

_HAVE_MORE = ("gpus", "models", "systems", "workloads", "compatibility")


def list_names(
    kind: str = argument(
        "KIND",
        "Kind of names: systems, compatibility (systems by backend), models, gpus, links, "
        "workloads, formats (of traces), suites or routers.",
        complete=complete_kind,
    ),
    name: str | None = argument(
        "[NAME]",
        "Show the details of this name, or of a folder with a model.",
        default=None,
        complete=complete_name,
    ),
    as_json: bool = flag("Print a JSON list.", "--json"),
) -> None:
    """List the names that other commands accept, or show the details of one name."""
    if kind not in KINDS:
        raise UnknownNameError("list", kind, KINDS)
    entries = in_brief(kind) if name is None and not as_json else KINDS[kind]()
    if name is not None:
        there = [str(entry["name"]) for entry in entries]
        if name in there:
            entries = [entries[there.index(name)]]
        elif kind == "models" and Path(name).expanduser().exists():
            from ...predictors.specs import model

            entries = [model_entry(model(name))]
        else:
            raise UnknownNameError(f"name among {kind}", name, there)
    if as_json:
        typer.echo(json.dumps(entries, ensure_ascii=False, indent=2))
    elif name is not None:
        _show_whole(entries[0])
        if kind == "systems":
            _show_parameters(name)
            _show_counters(name)
        elif kind == "suites":
            _show_allowances(name)
    else:
        _show_all(kind, entries)


app = list_names  # `list` itself is a name of Python


def _show_all(kind: str, entries: list[Entry]) -> None:
    heads = {c: c.removeprefix("checkpoint_").replace("_", " ") for c in entries[0]}
    numbers = [
        head
        for column, head in heads.items()
        if all(isinstance(entry[column], int | float | None) for entry in entries)
    ]
    rows = [[_shown(value) for value in entry.values()] for entry in entries]
    _print(list(heads.values()), rows, numbers=numbers, unbroken=("name", *numbers))
    if kind in _HAVE_MORE:
        typer.echo(f"\nMore about one: slo-bench list {kind} {entries[0]['name']}", err=True)


def _show_whole(entry: Entry) -> None:
    from rich.text import Text

    rows = [
        (Text(column.replace("_", " "), style="bold"), _shown(value))
        for column, value in entry.items()
        if column not in ("parameters", "counters")
    ]
    _print(("", " "), rows, unbroken=("",))


def _show_parameters(name: str) -> None:
    from ...harness.policies.systems import system as system_by_name

    system = system_by_name(name)
    values = system.parameters()
    rows = []
    for parameter, bounds in system.bounds().items():
        value = values[parameter]
        shown = str(value).lower() if isinstance(value, bool) else _shown(value)
        rows.append((parameter, shown or "–", bounds))
    typer.echo()
    _print(("parameter", "default", "may be"), rows, numbers=("default",), unbroken=("parameter",))


def _show_counters(name: str) -> None:
    from ...harness.policies.systems import system as system_by_name

    if counters := system_by_name(name).counters():
        typer.echo()
        _print(("column", "counts"), list(counters.items()), unbroken=("column",))


def _show_allowances(name: str) -> None:
    from ...harness.experiments.allowances import HEADS, allowances
    from ...harness.experiments.experiment import Experiment

    typer.echo()
    _print(
        HEADS,
        [allowance.row for allowance in allowances(Experiment.suite(name))],
        unbroken=("system",),
    )


def _print(heads: Sequence[str], rows: Sequence[Sequence[object]], **options: Any) -> None:
    from ..output.console import print_result, text_table

    print_result(text_table(heads, rows, **options))


def _shown(value: str | float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
