"""Names that options take: what `slo-bench list` prints of each, and their shell completion."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from .parameters import Complete

if TYPE_CHECKING:
    from ...predictors.model_spec import ModelSpec

Entry = dict[str, str | int | float | None]


def _systems() -> list[Entry]:
    from ...harness.policies.systems import SYSTEMS, installed_systems
    from ...harness.servers.launch.compatibility import compatibility_of

    return [
        {
            "name": system.name,
            "description": system.description,
            "source": system.source,
            "router": None if system.cluster or system.sharing else system.router,
            "runs_on": ", ".join(
                b for b, reason in compatibility_of(system).items() if reason is None
            ),
            "parameters": ", ".join(
                f"{name}={value}" for name, value in system.parameters().items()
            ),
            "counters": "; ".join(f"{c}: {text}" for c, text in system.counters().items()),
        }
        for system in (*SYSTEMS.values(), *installed_systems())
    ]


def _compatibility() -> list[Entry]:
    from ...harness.policies.systems import SYSTEMS, installed_systems
    from ...harness.servers.launch.compatibility import compatibility_of, limitation

    entries: list[Entry] = []
    for system in (*SYSTEMS.values(), *installed_systems()):
        entry: Entry = {"name": system.name}
        for backend, reason in compatibility_of(system).items():
            part = limitation(system, backend)
            runs = f"part: {part}" if part else "yes"
            entry[backend] = runs if reason is None else f"no: {reason}"
        entries.append(entry)
    return entries


def _models() -> list[Entry]:
    from ...predictors.specs import models

    return [model_entry(spec) for spec in models().values()]


def model_entry(spec: ModelSpec) -> Entry:
    """What `slo-bench list models` says of a model."""
    return {
        "name": spec.name,
        "family": spec.family,
        "parameters_billions": round(spec.parameters / 1e9, 3),
        "layers": spec.layers,
        "context_tokens": spec.context_tokens,
        "kv_bytes_per_token": spec.kv_bytes_per_token(),
        "checkpoint_dtype": spec.checkpoint_dtype,
    }


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
            "origin": spec.origin,
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
    from ...workloads.source import catalogue

    columns = (
        *("name", "title", "mean_prompt_tokens", "mean_output_tokens", "natural_rate_rps"),
        *("licence", "origin"),
    )
    return [
        {column: getattr(entry, column) for column in columns} for entry in catalogue().values()
    ]


def _suites() -> list[Entry]:
    from ...harness.experiments.suite_files import suites

    return [
        {"name": name, "question": _first_sentences(path.read_text("utf-8"))}
        for name, path in suites().items()
    ]


_SENTENCE_END = re.compile(r"(?<!\bFig)(?<!\bFigs)(?<!\bEq)(?<!\bal)[.?!](?=\s|$)")


def _first_sentences(text: str) -> str:
    """The sentences that begin on the first line of a file's first comment, whole."""
    comment = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    first, *rest = [line.removeprefix("# ").strip() for line in comment]
    paragraph = " ".join([first, *rest])
    end = _SENTENCE_END.search(paragraph, len(first) - 1)
    return paragraph if end is None else paragraph[: end.end()]


def _routers() -> list[Entry]:
    import inspect

    from ...harness.policies.routers import ROUTERS
    from ...harness.policies.stock import first_sentence

    return [
        {"name": name, "description": first_sentence(inspect.getdoc(router) or name)}
        for name, router in ROUTERS.items()
    ]


def _formats() -> list[Entry]:
    from ...workloads.readers.formats import FORMATS

    return [
        {"name": name, "description": trace.help, "recognised_by": ", ".join(trace.header) or None}
        for name, trace in FORMATS.items()
    ]


KINDS: dict[str, Callable[[], list[Entry]]] = {
    "systems": _systems,
    "compatibility": _compatibility,
    "models": _models,
    "gpus": _gpus,
    "links": _links,
    "workloads": _workloads,
    "formats": _formats,
    "suites": _suites,
    "routers": _routers,
}


_BRIEFLY = {
    "gpus": ("name", "memory_gib", "bandwidth_gb_per_s", "tflops_16bit", "power_w", "usd_per_hour"),
    "models": (
        *("name", "family", "parameters_billions"),
        *("layers", "context_tokens", "checkpoint_dtype"),
    ),
    "workloads": ("name", "title", "mean_prompt_tokens", "mean_output_tokens"),
}


def in_brief(kind: str) -> list[Entry]:
    """The columns that `list KIND` prints; of systems without importing their policies."""
    if kind == "systems":
        return _described_systems()
    if kind == "compatibility":  # reasons are shown only for a single name
        return [{c: str(v).partition(":")[0] for c, v in e.items()} for e in KINDS[kind]()]
    entries = KINDS[kind]()
    return [{column: entry[column] for column in _BRIEFLY.get(kind, entry)} for entry in entries]


def _described_systems() -> list[Entry]:
    from importlib.metadata import entry_points

    from ...harness.policies.stock import ENTRY_POINT_GROUP, STOCK

    names = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}
    with suppress(OSError):
        described = {name: stock.description for name, stock in STOCK.items()}
        if names <= described.keys():
            return [{"name": name, "description": text} for name, text in described.items()]
    return [{column: entry[column] for column in ("name", "description")} for entry in _systems()]


def names(kind: str) -> list[str]:
    """Return the names that `list KIND` prints."""
    same_names = "systems" if kind == "compatibility" else kind
    return [str(entry["name"]) for entry in in_brief(same_names)]


def among(*names: str) -> Complete:
    """Return a completion function for a fixed list of values."""
    return lambda incomplete: _beginning_with(incomplete, names)


def listed(kind: str) -> Complete:
    """Complete a name of `slo-bench list KIND`; after a comma another one."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in _beginning_with(last, names(kind))]

    return complete


def complete_kind(incomplete: str) -> list[str]:
    """Complete KIND of `slo-bench list KIND`."""
    return _beginning_with(incomplete, KINDS)


def complete_name(context: typer.Context, incomplete: str) -> list[str]:
    """Complete NAME of `slo-bench list KIND NAME`."""
    kind = context.params.get("kind")
    return _beginning_with(incomplete, names(kind)) if kind in KINDS else []


def _beginning_with(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
