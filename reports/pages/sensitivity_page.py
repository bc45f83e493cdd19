"""A sensitivity study as table, plain values and one figure on a page of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from ...tuner.sensitivity.perturbations import Perturbation
from ...tuner.sensitivity.study import CAPACITY, Flip, Point, Ranked, Sensitivity
from ...workloads.parsing import finite
from ..figures.drawing import page_data
from ..figures.figure import AXES, Axis, Figure, View, curve, form_text
from ..figures.levels import GOODPUT_DIVISOR
from ..terminal.screen import Screen
from .document import page, write_page
from .table import Table


def headline(sensitivity: Sensitivity) -> str:
    """One sentence: the best system at the base values, and whether the ranking changes."""
    order = sensitivity.base.ranking(sensitivity.ranked)
    values = [value_text(sensitivity.ranked, sensitivity.base.mean(system)) for system in order]
    ranking = ", ".join(f"{s} {v}" for s, v in zip(order, values, strict=True))
    changed = len(sensitivity.points)
    flipped = len({(flip.axis, flip.value) for flip in sensitivity.flips})
    verdict = "The ranking never changes" if not flipped else f"The ranking changes at {flipped}"
    end = f"at any of {changed} other points." if not flipped else f"of {changed} other points."
    return f"By {metric_text(sensitivity.ranked)}: {ranking}. {verdict} {end}"


def metric_text(ranked: Ranked) -> str:
    """Name of the metric that ranks the systems."""
    if ranked.metric == CAPACITY:
        return f"capacity (highest req/s with {ranked.target:.0%} in SLO)"
    return ranked.metric


def value_text(ranked: Ranked, value: float) -> str:
    """The metric's value as text, with its unit."""
    return "–" if math.isnan(value) else form_text(ranked.form, value)


def flip_text(sensitivity: Sensitivity, flip: Flip) -> str:
    """`host overhead × 4: sarathi overtakes vllm (3 of 3 seeds; at the base 3 of 3 say …)`."""
    axis = next(axis for axis in sensitivity.axes if axis.name == flip.axis)
    doubt = "" if flip.certain else "; may be noise"
    return (
        f"{axis.label} {flip.value:g}: {flip.winner} overtakes {flip.loser} "
        f"(in {flip.seeds} of {flip.of_seeds} seeds; before, {flip.loser} was ahead in "
        f"{flip.base_seeds}{doubt})."
    )


def sensitivity_text(sensitivity: Sensitivity, tested: Sequence[str] = ()) -> Group:
    """A table of all axes and notes; then what was tested, the flips by name, and the headline."""
    notes = [Text(note, style="dim") for note in (*sensitivity.notes, _note(sensitivity))]
    flips = [flip_text(sensitivity, flip) for flip in sensitivity.flips]
    answer = Screen(tested, notes=flips, answer=[headline(sensitivity)])
    return Group(_points(sensitivity).rich(), *notes, answer)


def _points(sensitivity: Sensitivity) -> Table:
    heads = ("changed", "to", *sensitivity.systems, "ahead", "by")
    groups = [
        ("", [_cells(sensitivity, axis, point) for point in sensitivity.along(axis)])
        for axis in sensitivity.axes
    ]
    return Table("All points", heads, groups, texts=(0, len(heads) - 2), names=sensitivity.systems)


def _note(sensitivity: Sensitivity) -> str:
    seeds = len(next(iter(sensitivity.base.outcomes.values())))
    of_seeds = "One seed" if seeds == 1 else f"Means of {seeds} seeds"
    return (
        f"{of_seeds}, the same requests for all systems (simulated); one thing changed "
        "at a time." + (f" {GOODPUT_DIVISOR}." if sensitivity.ranked.metric == "goodput" else "")
    )


def _cells(sensitivity: Sensitivity, axis: Perturbation, point: Point) -> list[str]:
    order = point.ranking(sensitivity.ranked)
    lead = _lead(sensitivity, point)
    base = " (base)" if point.value == axis.neutral else ""
    return [
        axis.label,
        f"{point.value:g}{base}",
        *(value_text(sensitivity.ranked, point.mean(system)) for system in sensitivity.systems),
        order[0] if lead else "tie",
        f"{100 * lead:.1f} %" if math.isfinite(lead) else "–",
    ]


def _lead(sensitivity: Sensitivity, point: Point) -> float:
    """Lead of the first system over the second, as a share of the second."""
    first, second = (point.mean(system) for system in point.ranking(sensitivity.ranked)[:2])
    if not second or math.isnan(second):
        return 0.0 if first == second else math.inf
    return abs(first - second) / second


def sensitivity_json(sensitivity: Sensitivity) -> dict[str, Any]:
    """All of it as plain values."""
    return {
        "metric": sensitivity.ranked.metric,
        "target": sensitivity.ranked.target if sensitivity.ranked.metric == CAPACITY else None,
        "systems": list(sensitivity.systems),
        "base": _point_json(sensitivity, sensitivity.base),
        "points": [_point_json(sensitivity, point) for point in sensitivity.points],
        "flips": [
            dataclasses.asdict(flip) | {"certain": flip.certain} for flip in sensitivity.flips
        ],
        "notes": list(sensitivity.notes),
    }


def _point_json(sensitivity: Sensitivity, point: Point) -> dict[str, Any]:
    return {
        "axis": point.axis,
        "value": point.value,
        "means": {system: finite(point.mean(system)) for system in sensitivity.systems},
        "seeds": {s: [finite(v) for v in point.outcomes[s]] for s in sensitivity.systems},
        "ranking": point.ranking(sensitivity.ranked),
    }


def figure(sensitivity: Sensitivity) -> Figure:
    """The one figure: what is changed is picked, a line for each system, a band over its seeds."""
    metric = sensitivity.ranked.metric
    return Figure(
        id="sensitivity",
        title="Sensitivity to errors of the simulation",
        note="Line: mean over seeds; band: lowest to highest seed. One thing is changed at a time.",
        x=Axis("changed to", "number"),
        y=Axis("capacity, req/s" if metric == CAPACITY else metric, AXES[sensitivity.ranked.form]),
        views={axis.name: _view(sensitivity, axis) for axis in sensitivity.axes},
        picker="local",
        options=[[axis.name, axis.label] for axis in sensitivity.axes],
    )


def _view(sensitivity: Sensitivity, axis: Perturbation) -> View:
    points = sensitivity.along(axis)
    curves: list[View] = []
    for place, system in enumerate(sensitivity.systems):
        low, high = ([end(point.outcomes[system]) for point in points] for end in (min, max))
        means = [point.mean(system) for point in points]
        curves.append(curve(place, [point.value for point in points], means, lo=low, hi=high))
    line = {"axis": "x", "value": axis.neutral, "label": "as simulated"}
    return {"series": curves, "lines": [line]}


def write_sensitivity(sensitivity: Sensitivity, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    drawn = figure(sensitivity)
    text = page(
        "sensitivity.html",
        page_data(sensitivity.systems, "simulated", [drawn]),
        heading=f"{' or '.join(sensitivity.systems)}: how certain is the ranking?",
        answer=headline(sensitivity),
        figures=[drawn],
        flips=[flip_text(sensitivity, flip) for flip in sensitivity.flips]
        or ["Nowhere in the range tried."],
        notes=sensitivity.notes,
        points=_points(sensitivity),
        footer=_note(sensitivity),
    )
    return write_page(text, out)
