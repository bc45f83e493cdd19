"""`slo-bench list`: the names that other commands take."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import typer

from ...workloads.errors import UnknownNameError
from ..options import completion

EXAMPLES = (
    "slo-bench list systems",
    "slo-bench list systems ascendra",
    "slo-bench list gpus --json",
)

Entry = dict[str, str | int | float | None]
_BRIEFLY = {
    "systems": ("name", "description"),
    "workloads": ("name", "title", "mean_prompt_tokens", "mean_output_tokens"),
}


def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="systems, matrix (which runs on which backend), models, gpus, links, workloads, "
            "suites or routers.",
            autocompletion=completion.kinds,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Everything about this one.",
            autocompletion=completion.of_that_kind,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the names that other commands take, or show all that stands behind one of them."""
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
            _show_knobs(name)
    else:
        _show_all(kind, entries)


def names(kind: str) -> list[str]:
    """All that `list KIND` lists."""
    return [str(entry["name"]) for entry in KINDS[kind]()]


def _show_all(kind: str, entries: list[Entry]) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..output.console import terminal

    if kind == "matrix":  # the reasons have room where one is asked for
        entries = [{c: str(v).partition(":")[0] for c, v in e.items()} for e in entries]
    elif kind in _BRIEFLY:
        entries = [{column: entry[column] for column in _BRIEFLY[kind]} for entry in entries]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in entries[0]:
        numbers = all(isinstance(entry[column], int | float | None) for entry in entries)
        table.add_column(
            column.replace("_", " "),
            justify="right" if numbers else "left",
            no_wrap=column == "name" or numbers,
            overflow="fold",
        )
    for entry in entries:
        table.add_row(*(Text(_shown(value)) for value in entry.values()))
    terminal().print(table)
    if kind in (*_BRIEFLY, "matrix"):
        typer.echo(f"\nMore about one: slo-bench list {kind} {entries[0]['name']}", err=True)


def _show_whole(entry: Entry) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..output.console import terminal

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for column, value in entry.items():
        if column != "knobs":
            table.add_row(column.replace("_", " "), Text(_shown(value)))
    terminal().print(table)


def _show_knobs(name: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from ...harness.policies.systems import system
    from ..output.console import terminal

    found = system(name)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("knob", no_wrap=True)
    table.add_column("default", justify="right", overflow="fold")
    table.add_column("may be", overflow="fold")
    values = found.knobs()
    for knob, bounds in found.bounds().items():
        value = values[knob]
        shown = str(value).lower() if isinstance(value, bool) else _shown(value)
        table.add_row(knob, Text(shown or "–"), Text(str(bounds)))
    terminal().print()
    terminal().print(table)


def _shown(value: str | float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _systems() -> list[Entry]:
    from ...harness.policies.systems import SYSTEMS
    from ...harness.servers.launch.compatibility import matrix

    return [
        {
            "name": system.name,
            "description": system.description,
            "source": system.source,
            "router": None if system.cluster or system.sharing else system.router,
            "runs_on": ", ".join(b for b, reason in matrix(system).items() if reason is None),
            "knobs": ", ".join(f"{name}={value}" for name, value in system.knobs().items()),
        }
        for system in SYSTEMS.values()
    ]


def _matrix() -> list[Entry]:
    from ...harness.policies.systems import SYSTEMS
    from ...harness.servers.launch.compatibility import matrix

    entries: list[Entry] = []
    for system in SYSTEMS.values():
        entry: Entry = {"name": system.name}
        for backend, reason in matrix(system).items():
            entry[backend] = "yes" if reason is None else f"no: {reason}"
        entries.append(entry)
    return entries


def _models() -> list[Entry]:
    from ...predictors.specs import models

    return [
        {
            "name": spec.name,
            "family": spec.family,
            "parameters_billions": round(spec.parameters / 1e9, 3),
            "layers": spec.layers,
            "context_tokens": spec.context_tokens,
            "kv_bytes_per_token": spec.kv_bytes_per_token(),
        }
        for spec in models().values()
    ]


def _gpus() -> list[Entry]:
    from ...predictors.specs import GIB, gpus

    return [
        {
            "name": spec.name,
            "memory_gib": round(spec.memory_bytes / GIB, 1),
            "bandwidth_gb_per_s": spec.bandwidth_bytes_per_s / 1e9,
            "tflops_16bit": spec.flops_16bit / 1e12,
            "power_w": spec.power_w,
            "usd_per_hour": spec.price_per_hour_usd or None,
            "host_link": spec.host_link,
            "peer_link": spec.peer_link,
        }
        for spec in gpus().values()
    ]


def _links() -> list[Entry]:
    from ...predictors.specs import links

    return [
        {
            "name": spec.name,
            "bandwidth_gb_per_s": spec.bandwidth_bytes_per_s / 1e9,
            "latency_us": round(spec.latency_s * 1e6, 3),
            "origin": spec.origin,
        }
        for spec in links().values()
    ]


def _workloads() -> list[Entry]:
    from ...workloads.catalogue import catalogue

    return [
        {
            "name": entry.name,
            "title": entry.title,
            "mean_prompt_tokens": entry.mean_prompt_tokens,
            "mean_output_tokens": entry.mean_output_tokens,
            "natural_rate_rps": entry.natural_rate_rps,
            "licence": entry.licence,
            "origin": entry.origin,
        }
        for entry in catalogue().values()
    ]


def _suites() -> list[Entry]:
    from ...harness.experiments.experiment import suites

    return [
        {"name": name, "question": path.read_text("utf-8").splitlines()[0].lstrip("# ")}
        for name, path in suites().items()
    ]


def _routers() -> list[Entry]:
    import inspect

    from ...harness.policies.routers import ROUTERS

    return [
        {"name": name, "description": (inspect.getdoc(router) or "").splitlines()[0]}
        for name, router in ROUTERS.items()
    ]


KINDS: dict[str, Callable[[], list[Entry]]] = {
    "systems": _systems,
    "matrix": _matrix,
    "models": _models,
    "gpus": _gpus,
    "links": _links,
    "workloads": _workloads,
    "suites": _suites,
    "routers": _routers,
}
