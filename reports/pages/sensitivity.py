"""A sensitivity study as table, plain values and one figure on a page of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...tuner.sensitivity.perturbations import Perturbation
from ...tuner.sensitivity.study import CAPACITY, Flip, Point, Ranked, Sensitivity
from ..figures.figure import Axis, Figure, Format, View, as_json
from ..figures.numbers import percent_text, rate_text, seconds_text
from . import sections
from .document import page, table, write_page


def headline(found: Sensitivity) -> str:
    """Who is ahead at the base, and whether that ever changes."""
    order = found.base.ranking(found.ranked)
    values = [value_text(found.ranked, found.base.mean(system)) for system in order]
    told = ", ".join(f"{s} {v}" for s, v in zip(order, values, strict=True))
    changed = len(found.points)
    flipped = len({(flip.axis, flip.value) for flip in found.flips})
    what = "The ranking never changes" if not flipped else f"The ranking changes at {flipped}"
    end = f"at any of {changed} other points." if not flipped else f"of {changed} other points."
    return f"By {metric_text(found.ranked)}: {told}. {what} {end}"


def metric_text(ranked: Ranked) -> str:
    """What systems are ranked by, in words."""
    if ranked.metric == CAPACITY:
        return f"capacity (highest req/s with {ranked.target:.0%} in SLO)"
    return ranked.metric


def value_text(ranked: Ranked, value: float) -> str:
    """A figure with its unit."""
    if math.isnan(value):
        return "–"
    if ranked.metric == "attainment":
        return percent_text(value)
    return rate_text(value) if ranked.more_is_better else seconds_text(value)


def flip_text(found: Sensitivity, flip: Flip) -> str:
    """`host overhead × 4: sarathi overtakes vllm (3 of 3 seeds; at the base 3 of 3 say …)`."""
    axis = next(axis for axis in found.axes if axis.name == flip.axis)
    doubt = "" if flip.certain else "; may be noise"
    return (
        f"{axis.label} {flip.value:g}: {flip.winner} overtakes {flip.loser} "
        f"(in {flip.seeds} of {flip.of_seeds} seeds; before, {flip.loser} was ahead in "
        f"{flip.base_seeds}{doubt})."
    )


def sensitivity_text(found: Sensitivity) -> RenderableType:
    """Headline, a table of all axes, the flips by name."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("changed", no_wrap=True)
    table.add_column("to", justify="right", no_wrap=True)
    for system in found.systems:
        table.add_column(Text(system, overflow="fold"), justify="right")
    table.add_column("ahead")
    table.add_column("by", justify="right", no_wrap=True)
    for axis in found.axes:
        for place, point in enumerate(found.along(axis)):
            table.add_row(*map(Text, _cells(found, axis, point, place)), end_section=False)
        table.add_section()
    lines = [Text(flip_text(found, flip), style="yellow") for flip in found.flips]
    notes = [Text(note, style="dim") for note in (*found.notes, _note(found))]
    return Group(Text(headline(found), style="bold"), table, *lines, *notes)


def _note(found: Sensitivity) -> str:
    seeds = len(next(iter(found.base.outcomes.values())))
    return (
        f"Means of {seeds} seeds, the same requests for all systems (simulated); one thing changed "
        "at a time."
    )


def _cells(found: Sensitivity, axis: Perturbation, point: Point, place: int) -> list[str]:
    order = point.ranking(found.ranked)
    lead = _lead(found, point)
    base = " (base)" if point.value == axis.neutral else ""
    return [
        axis.label if place == 0 else "",
        f"{point.value:g}{base}",
        *(value_text(found.ranked, point.mean(system)) for system in found.systems),
        order[0] if lead else "tie",
        f"{100 * lead:.1f} %" if math.isfinite(lead) else "–",
    ]


def _lead(found: Sensitivity, point: Point) -> float:
    """How far the first is ahead of the second, as a share of the second."""
    first, second = (point.mean(system) for system in point.ranking(found.ranked)[:2])
    if not second or math.isnan(second):
        return 0.0 if first == second else math.inf
    return abs(first - second) / second


def sensitivity_json(found: Sensitivity) -> dict[str, Any]:
    """All of it as plain values."""
    return {
        "metric": found.ranked.metric,
        "target": found.ranked.target if found.ranked.metric == CAPACITY else None,
        "systems": list(found.systems),
        "base": _point_json(found, found.base),
        "points": [_point_json(found, point) for point in found.points],
        "flips": [
            {
                "axis": flip.axis,
                "value": flip.value,
                "winner": flip.winner,
                "loser": flip.loser,
                "seeds": flip.seeds,
                "of_seeds": flip.of_seeds,
                "base_seeds": flip.base_seeds,
                "certain": flip.certain,
            }
            for flip in found.flips
        ],
        "notes": list(found.notes),
    }


def _point_json(found: Sensitivity, point: Point) -> dict[str, Any]:
    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "axis": point.axis,
        "value": point.value,
        "means": {system: known(point.mean(system)) for system in found.systems},
        "seeds": {s: [known(v) for v in point.outcomes[s]] for s in found.systems},
        "ranking": point.ranking(found.ranked),
    }


def figure(found: Sensitivity) -> Figure:
    """The one figure: what is changed is picked, a line for each system, a band over its seeds."""
    formats: dict[bool, Format] = {True: "rate", False: "seconds"}
    form: Format = formats[found.ranked.more_is_better]
    if found.ranked.metric == "attainment":
        form = "percent"
    label = "capacity, req/s" if found.ranked.metric == CAPACITY else found.ranked.metric
    return Figure(
        id="sensitivity",
        kind="lines",
        title="What if the simulation is off?",
        note="Line: mean over seeds; band: lowest to highest seed. One thing is changed at a time.",
        x=Axis("changed to", "number"),
        y=Axis(label, form),
        views={axis.name: _view(found, axis) for axis in found.axes},
        picker="local",
        options=[[axis.name, axis.label] for axis in found.axes],
    )


def _view(found: Sensitivity, axis: Perturbation) -> View:
    points = found.along(axis)
    curves: list[View] = [
        {
            "s": place,
            "x": [point.value for point in points],
            "y": [point.mean(system) for point in points],
            "lo": [min(point.outcomes[system]) for point in points],
            "hi": [max(point.outcomes[system]) for point in points],
        }
        for place, system in enumerate(found.systems)
    ]
    return {
        "series": curves,
        "lines": [{"axis": "x", "value": axis.neutral, "label": "as simulated"}],
    }


def write_sensitivity(found: Sensitivity, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    drawn = figure(found)
    cells = pd.DataFrame({"backend": ["simulated"], "step_time": [""]})
    title = f"{' or '.join(found.systems)}: how certain is the ranking?"
    body = f"""
<header class="top">
<p class="eyebrow">Sensitivity by slo-bench</p>
<h1>{escape(title)}</h1>
</header>
<main>
<p class="answer">{escape(headline(found))}</p>
<noscript><div class="notice">The figure needs JavaScript; the table does not.</div></noscript>
<section><div class="grid">{sections.figure(drawn, cells)}</div></section>
<section><h2>Where the ranking changes</h2>{_flips_html(found)}</section>
<section><h2>Numbers</h2>{_table_html(found)}</section>
</main>
<footer>{escape(_note(found))}</footer>"""
    names = list(found.systems)
    data = {"series": names, "origin": "simulated", **as_json([drawn])}
    return write_page(page(f"{title} – sensitivity", body, data), out)


def _flips_html(found: Sensitivity) -> str:
    lines = [flip_text(found, flip) for flip in found.flips] or ["Nowhere in the range tried."]
    return "".join(f"<p>{escape(line)}</p>" for line in (*lines, *found.notes))


def _table_html(found: Sensitivity) -> str:
    heads = ("Changed", "To", *found.systems, "Ahead", "By")
    rows: list[Sequence[str]] = [
        _cells(found, axis, point, place)
        for axis in found.axes
        for place, point in enumerate(found.along(axis))
    ]
    return table("All points", heads, rows)
