"""A map of layers to devices: as text, as plain values, and drawn on a page of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...predictors.specs import ModelSpec
from ...tuner.placement.compare import SolverResult
from ...tuner.placement.problem import Problem
from ...tuner.placement.topology import Topology
from .document import page, table, write_page

_METHODS = {
    "exact": "exact optimum",
    "helr": "the paper's procedure, mended",
    "even": "even, over all devices",
    "optuna": "Optuna",
    "morphling": "Morphling",
}
_BAR = 24  # characters of the longest bar
_COLOURS = ("blue", "dark_orange3", "green4", "magenta", "gold3", "cyan", "grey42", "red3")


@dataclass(frozen=True)
class FoundMap:
    """What is shown: the question, the answers, and which of them was chosen."""

    model: ModelSpec
    topology: Topology
    problem: Problem
    mode: str
    answers: Sequence[SolverResult]
    chosen: SolverResult
    notes: Sequence[str] = ()

    @property
    def best(self) -> SolverResult:
        """The cheapest that fits."""
        return min(self.answers, key=lambda a: a.cost)


def _ranges(chosen: SolverResult) -> list[tuple[int, int, int]]:
    """Device, first layer and last layer of each stage."""
    found, begin = [], 0
    for held in chosen.placed:
        found.append((held.device, begin, begin + held.layers - 1))
        begin += held.layers
    return found


def headline(found: FoundMap) -> str:
    """How many layers went to how many devices, and how long a pass takes."""
    chosen, devices = found.chosen, len(found.topology.devices)
    return (
        f"{found.problem.layers} layers of {found.model.name} on {len(chosen.placed)} of {devices} "
        f"{'device' if devices == 1 else 'devices'} ({found.mode}, {_METHODS[chosen.method]}): "
        f"{1e3 * chosen.latency_s:.2f} ms a pass (estimated)."
    )


def map_text(found: FoundMap) -> RenderableType:
    """Headline, the methods side by side, the map drawn."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method")
    for name in ("devices", "latency", "cost", "above the best"):
        table.add_column(name, justify="right", no_wrap=True)
    for answer in found.answers:
        table.add_row(*map(Text, _cells(found, answer)))
    notes = [Text(note, style="dim") for note in _notes(found)]
    return Group(Text(headline(found), style="bold"), table, *_drawn(found), *notes)


def _notes(found: FoundMap) -> list[str]:
    refused = [f"{_METHODS[a.method]}: {a.refused}" for a in found.answers if a.refused]
    overfull = [
        f"{_METHODS[a.method]}: its map does not fit"
        for a in found.answers
        if a.placed and not a.fits
    ]
    return [*refused, *overfull, *found.notes]


def _cells(found: FoundMap, answer: SolverResult) -> list[str]:
    name = _METHODS[answer.method]
    if not answer.placed:
        return [name, "–", "–", "–", "–"]
    gap = answer.gap(found.best)
    return [
        name,
        str(len(answer.placed)),
        f"{1e3 * answer.latency_s:.2f} ms",
        f"{answer.cost:.4g}" if answer.fits else "does not fit",
        f"{100 * gap:.2f} %" if math.isfinite(gap) else "–",
    ]


def _drawn(found: FoundMap) -> list[Text]:
    devices, problem = found.topology.devices, found.problem
    used = _ranges(found.chosen)
    width = max(len(device.name) for device in devices)
    kinds = max(len(device.gpu.name) for device in devices)
    lines = []
    for place, (device, first, last) in enumerate(used):
        machine, layers = devices[device], last - first + 1
        bar = "█" * max(1, round(_BAR * layers / problem.layers))
        room = problem.devices[device].holds(first=place == 0, last=place == len(used) - 1)
        line = Text(f"  {machine.name:{width}}  {machine.gpu.name:{kinds}}  ")
        line.append(f"{bar:{_BAR}}", style=_COLOURS[place % len(_COLOURS)])
        line.append(f"  layers {first}–{last} ({layers} of {room})")
        lines.append(line)
        if place + 1 < len(used):
            link = found.topology.links[device][used[place + 1][0]]
            assert link is not None
            hop_us = 1e6 * problem.hop_s[device][used[place + 1][0]]
            lines.append(Text(f"  {'':{width}}  ↓ {link.name}, {hop_us:.0f} µs a hop", style="dim"))
    idle = [machine.name for i, machine in enumerate(devices) if i not in {d for d, *_ in used}]
    if idle:
        said = ", ".join(idle[:_IDLE])
        said += f" and {len(idle) - _IDLE} more" if len(idle) > _IDLE else ""
        lines.append(Text(f"  not used: {said}", style="dim"))
    lines.append(Text("  in brackets: layers held, of those that fit there", style="dim"))
    return lines


def map_json(found: FoundMap) -> dict[str, Any]:
    """All of it as plain values; times in seconds."""
    return {
        "model": found.model.name,
        "mode": found.mode,
        "ideal_s": found.problem.ideal_s,
        "chosen": found.chosen.method,
        "answers": [
            {
                "method": answer.method,
                "stages": [
                    {
                        "device": found.topology.devices[device].name,
                        "first_layer": first,
                        "last_layer": last,
                    }
                    for device, first, last in _ranges(answer)
                ],
                "devices": len(answer.placed),
                "fits": answer.fits,
                "latency_s": answer.latency_s if answer.placed else None,
                "cost": answer.cost if answer.fits else None,
                "gap": answer.gap(found.best) if answer.fits else None,
                "refused": answer.refused or None,
            }
            for answer in found.answers
        ],
        "notes": list(found.notes),
    }


def write_map(found: FoundMap, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    title = f"{found.model.name}: which layers on which device?"
    notes = "".join(f"<p>{escape(note)}</p>" for note in _notes(found))
    body = f"""
<header class="top">
<p class="eyebrow">Device map by slo-bench</p>
<h1>{escape(title)}</h1>
</header>
<main>
<p class="answer">{escape(headline(found))}</p>
<section><h2>The map</h2><figure class="figure">{map_svg(found)}</figure></section>
<section><h2>Methods</h2>{_table_html(found)}{notes}</section>
</main>
<footer>Times are estimates of one decode step, not measurements.</footer>"""
    return write_page(page(f"{title} – device map", body, {"series": [], "figures": {}}), out)


_WIDE, _HIGH, _LEFT, _GAP = 1000, 34, 250, 26
_IDLE = 8  # unused devices that are shown


def map_svg(found: FoundMap) -> str:
    """Every device a row; what it holds stands where these layers are in the model."""
    devices, problem = found.topology.devices, found.problem
    used = _ranges(found.chosen)
    idle = [i for i in range(len(devices)) if i not in {device for device, *_ in used}]
    rows = [*used, *((device, -1, -1) for device in idle[:_IDLE])]
    each = (_WIDE - _LEFT - 10) / problem.layers
    height = len(rows) * (_HIGH + _GAP) + 24
    parts = [
        f'<svg viewBox="0 0 {_WIDE} {height}" role="img" width="100%" '
        f'aria-label="{escape(headline(found))}" font-size="13">'
    ]
    for n, (device, first, last) in enumerate(rows):
        machine, top = devices[device], n * (_HIGH + _GAP) + 4
        parts.append(
            f'<text x="4" y="{top + 14}" fill="var(--ink)">{escape(machine.name)}</text>'
            f'<text x="4" y="{top + 30}" fill="var(--soft)" font-size="12">'
            f"{escape(machine.gpu.name)}</text>"
            f'<rect x="{_LEFT}" y="{top}" width="{each * problem.layers:.1f}" height="{_HIGH}" '
            f'rx="4" fill="var(--grid)"/>'
        )
        if first < 0:
            parts.append(
                f'<text x="{_LEFT + 8}" y="{top + 22}" fill="var(--soft)">'
                f"{_unused(n, rows, idle)}</text>"
            )
            continue
        x, wide = _LEFT + first * each, (last - first + 1) * each
        room = problem.devices[device].holds(first=n == 0, last=n == len(used) - 1)
        parts.append(
            f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{_HIGH}" rx="4" '
            f'fill="var(--s{n % 8})"><title>{escape(machine.name)}: layers {first}–{last}, '
            f"room for {room}</title></rect>"
        )
        label = f"{first}–{last}" if last > first else f"{first}"
        inside = wide > 9 * len(label)
        at, anchor = (x + wide / 2, "middle") if inside else (x + wide + 4, "start")
        if not inside and at > _WIDE - 60:
            at, anchor = x - 4, "end"
        colour = "var(--card)" if inside else "var(--ink)"
        parts.append(
            f'<text x="{at:.1f}" y="{top + 22}" text-anchor="{anchor}" fill="{colour}">'
            f"{label}</text>"
        )
        if n + 1 < len(used):
            link = found.topology.links[device][used[n + 1][0]]
            assert link is not None
            hop_us, end = 1e6 * problem.hop_s[device][used[n + 1][0]], x + wide
            at, anchor = (end + 8, "start") if end < _WIDE - 150 else (end - 8, "end")
            parts.append(
                f'<line x1="{end:.1f}" y1="{top + _HIGH}" x2="{end:.1f}" '
                f'y2="{top + _HIGH + _GAP}" stroke="var(--line)" stroke-width="2"/>'
                f'<text x="{at:.1f}" y="{top + _HIGH + 18}" text-anchor="{anchor}" '
                f'fill="var(--soft)" font-size="12">{escape(link.name)}, {hop_us:.0f} µs</text>'
            )
    for layer in sorted({0, problem.layers // 4, problem.layers // 2, 3 * problem.layers // 4}):
        parts.append(
            f'<text x="{_LEFT + layer * each:.1f}" y="{height - 6}" fill="var(--soft)" '
            f'font-size="12">layer {layer}</text>'
        )
    return "".join(parts) + "</svg>"


def _unused(row: int, rows: Sequence[object], idle: Sequence[int]) -> str:
    """In the last row that is shown: how many more there are."""
    more = len(idle) - _IDLE
    return f"not used, nor are {more} more" if row == len(rows) - 1 and more > 0 else "not used"


def _table_html(found: FoundMap) -> str:
    heads = ("Method", "Devices", "Latency", "Cost", "Above the best")
    return table("Methods", heads, [_cells(found, answer) for answer in found.answers])
