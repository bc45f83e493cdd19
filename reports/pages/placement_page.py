"""A map of layers to devices: as text, as plain values, and drawn on a page of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ...predictors.specs import ModelSpec
from ...tuner.placement.compare_placements import SolverResult, unused_reasons
from ...tuner.placement.problem import CostWeights, Problem
from ...tuner.placement.topology import Topology
from .document import page, write_page
from .table import Table, one_group

_METHODS = {
    "exact": "exact optimum",
    "optuna-alone": "Optuna, as a check",
    "helr": "the paper's procedure, mended",
    "even": "even, over all devices",
    "optuna": "Optuna, from the exact map",
    "morphling": "Morphling",
}
_IDLE = 8  # unused devices that are shown
_BAR = 24  # characters of the longest bar
_COLOURS = ("blue", "dark_orange3", "green4", "magenta", "gold3", "cyan", "grey42", "red3")


@dataclass(frozen=True)
class FoundMap:
    """A placement problem, its solutions, and the chosen one."""

    model: ModelSpec
    topology: Topology
    problem: Problem
    weights: CostWeights
    mode: str
    answers: Sequence[SolverResult]
    chosen: SolverResult
    notes: Sequence[str] = ()

    @property
    def best(self) -> SolverResult:
        """The solution with the lowest cost."""
        return min(self.answers, key=lambda a: a.cost)


def _ranges(chosen: SolverResult) -> list[tuple[int, int, int]]:
    """Device, first layer and last layer of each stage."""
    ranges, begin = [], 0
    for held in chosen.placed:
        ranges.append((held.device, begin, begin + held.layers - 1))
        begin += held.layers
    return ranges


def headline(device_map: FoundMap) -> str:
    """One sentence: number of layers, number of devices, time of a pass."""
    chosen, devices = device_map.chosen, len(device_map.topology.devices)
    return (
        f"{device_map.problem.layers} layers of {device_map.model.name} on "
        f"{len(chosen.placed)} of {devices} "
        f"{'device' if devices == 1 else 'devices'} ({device_map.mode}, {_method(chosen)}): "
        f"{1e3 * chosen.latency_s:.2f} ms a pass (estimated)."
    )


def _method(answer: SolverResult) -> str:
    """Name of the solver; of the exact one with its bound, if it was not reached in time."""
    if answer.bound_gap:
        return f"at most {100 * answer.bound_gap:.2g} % above the optimum"
    return _METHODS[answer.method]


def map_text(device_map: FoundMap) -> RenderableType:
    """Headline, the methods side by side, the map drawn."""
    notes = [Text(note, style="dim") for note in _notes(device_map)]
    table = _methods(device_map).rich()
    return Group(Text(headline(device_map), style="bold"), table, *_drawn(device_map), *notes)


def _methods(device_map: FoundMap) -> Table:
    heads = ("method", "devices", "latency", "cost", "above the best")
    return one_group(
        "Methods", heads, [_cells(device_map, answer) for answer in device_map.answers]
    )


def _notes(device_map: FoundMap) -> list[str]:
    refused = [f"{_METHODS[a.method]}: {a.refused}" for a in device_map.answers if a.refused]
    overfull = [
        f"{_METHODS[a.method]}: its map does not fit"
        for a in device_map.answers
        if a.placed and not a.fits
    ]
    return [*refused, *overfull, *device_map.notes, *_unused(device_map)]


def _unused(device_map: FoundMap) -> list[str]:
    """Why devices hold nothing, equal reasons together."""
    if not device_map.chosen.fits:
        return []
    names = [device.name for device in device_map.topology.devices]
    reasons = unused_reasons(device_map.problem, device_map.weights, device_map.chosen.placed)
    lines = []
    for reason, devices in reasons.items():
        more = f" and {len(devices) - _IDLE} more" if len(devices) > _IDLE else ""
        lines.append(f"{', '.join(names[i] for i in devices[:_IDLE])}{more} not used: {reason}")
    return lines


def _cells(device_map: FoundMap, answer: SolverResult) -> list[str]:
    name = _method(answer)
    if not answer.placed:
        return [name, "–", "–", "–", "–"]
    gap = answer.gap(device_map.best)
    return [
        name,
        str(len(answer.placed)),
        f"{1e3 * answer.latency_s:.2f} ms",
        f"{answer.cost:.4g}" if answer.fits else "does not fit",
        f"{100 * gap:.2f} %" if math.isfinite(gap) else "–",
    ]


def _drawn(device_map: FoundMap) -> list[Text]:
    rows = _rows(device_map)
    used = [row for row in rows if "unused" not in row]
    width = max(len(device.name) for device in device_map.topology.devices)
    kinds = max(len(device.gpu.name) for device in device_map.topology.devices)
    lines = []
    for place, row in enumerate(used):
        layers = row["last"] - row["first"] + 1
        bar = "█" * max(1, round(_BAR * layers / device_map.problem.layers))
        line = Text(f"  {row['name']:{width}}  {row['gpu']:{kinds}}  ")
        line.append(f"{bar:{_BAR}}", style=_COLOURS[place % len(_COLOURS)])
        line.append(f"  layers {row['first']}–{row['last']} ({layers} of {row['room']})")
        lines.append(line)
        if row["link"]:
            hop = f"  {'':{width}}  ↓ {row['link']}, {row['hop_us']:.0f} µs a hop"
            lines.append(Text(hop, style="dim"))
    lines.append(Text("  in brackets: layers held, of those that fit there", style="dim"))
    return lines


def map_json(device_map: FoundMap) -> dict[str, Any]:
    """All of it as plain values; times in seconds."""
    return {
        "model": device_map.model.name,
        "mode": device_map.mode,
        "ideal_s": device_map.problem.ideal_s,
        "chosen": device_map.chosen.method,
        "answers": [
            {
                "method": answer.method,
                "stages": [
                    {
                        "device": device_map.topology.devices[device].name,
                        "first_layer": first,
                        "last_layer": last,
                    }
                    for device, first, last in _ranges(answer)
                ],
                "devices": len(answer.placed),
                "fits": answer.fits,
                "latency_s": answer.latency_s if answer.placed else None,
                "cost": answer.cost if answer.fits else None,
                "gap": answer.gap(device_map.best) if answer.fits else None,
                "bound_gap": answer.bound_gap,
                "refused": answer.refused or None,
            }
            for answer in device_map.answers
        ],
        "notes": _notes(device_map),
    }


def write_map(device_map: FoundMap, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    text = page(
        "placement.html",
        {"series": [], "figures": {}},
        heading=f"{device_map.model.name}: which layers on which device?",
        answer=headline(device_map),
        rows=_rows(device_map),
        layers=device_map.problem.layers,
        methods=_methods(device_map),
        notes=_notes(device_map),
        footer="Times are estimates of one decode step, not measurements.",
    )
    return write_page(text, out)


def _rows(device_map: FoundMap) -> list[dict[str, Any]]:
    """The devices that are drawn: what they hold, and the way to the next."""
    devices, problem = device_map.topology.devices, device_map.problem
    used = _ranges(device_map.chosen)
    rows: list[dict[str, Any]] = []
    for place, (device, first, last) in enumerate(used):
        name, gpu = devices[device].name, devices[device].gpu.name
        room = problem.devices[device].holds(first=place == 0, last=place == len(used) - 1)
        row = {"name": name, "gpu": gpu, "first": first, "last": last, "room": room, "link": ""}
        if place + 1 < len(used):
            after = used[place + 1][0]
            link = device_map.topology.links[device][after]
            assert link is not None
            row["link"], row["hop_us"] = link.name, 1e6 * problem.hop_s[device][after]
        rows.append(row)
    held = {device for device, *_ in used}
    idle = [machine for place, machine in enumerate(devices) if place not in held]
    texts = ["not used"] * min(len(idle), _IDLE)
    if len(idle) > _IDLE:
        texts[-1] = f"not used, nor are {len(idle) - _IDLE} more"
    return rows + [
        {"name": machine.name, "gpu": machine.gpu.name, "unused": text}
        for machine, text in zip(idle, texts, strict=False)
    ]
