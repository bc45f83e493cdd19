"""All trials of a tuning run in parallel coordinates: an axis a dimension, a line a trial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ...tuner.search.objectives import OBJECTIVES

_WIDTH, _HEIGHT, _TOP, _SIDE = 132, 300, 34, 60
_MOST_LINES = 400
_SHADES = 5


def parallel_coordinates(found: Mapping[str, Any]) -> str:
    """An SVG of its own; empty without at least two trials that have a value."""
    rows = [row for row in found["trials"] if row["values"] and row["values"][0] is not None]
    names = [*found["space"]]
    if len(rows) < 2 or not names:
        return ""
    objective = OBJECTIVES[found["objectives"][0]]
    rows.sort(key=lambda row: row["values"][0], reverse=not objective.maximise)
    rows = rows[-_MOST_LINES:]  # the best are drawn last, on top
    columns: list[list[Any]] = [[row["configuration"].get(n) for row in rows] for n in names]
    columns.append([row["values"][0] for row in rows])
    logs = [text.endswith(":log") for text in found["space"].values()] + [False]
    places = [_places(values, log) for values, log in zip(columns, logs, strict=True)]
    width = _WIDTH * len(names) + 2 * _SIDE
    lines = []
    for number in range(len(rows)):
        points = " ".join(
            f"{_SIDE + _WIDTH * k:.0f},{_at(of[number]):.1f}" for k, of in enumerate(places)
        )
        shade = math.ceil(_SHADES * (number + 1) / len(rows))
        best = rows[number]["number"] in found["best"]
        colour = "var(--s1)" if best else "var(--s0)"
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" '
            f'stroke-width="{2.5 if best else 1}" opacity="{1 if best else shade / 10:.1f}">'
            f"<title>trial {rows[number]['number']}</title></polyline>"
        )
    axes = []
    for k, (name, values) in enumerate(zip([*names, objective.label], columns, strict=True)):
        x = _SIDE + _WIDTH * k
        low, high = _ends(values)
        axes.append(
            f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_TOP + _HEIGHT}" class="axis"/>'
            f'<text x="{x}" y="{_TOP - 18}" text-anchor="middle" class="strong">'
            f"{escape(_short(name))}</text>"
            f'<text x="{x}" y="{_TOP - 4}" text-anchor="middle">{escape(high)}</text>'
            f'<text x="{x}" y="{_TOP + _HEIGHT + 15}" text-anchor="middle">{escape(low)}</text>'
        )
    return (
        '<figure class="figure" id="parallel"><figcaption><h3>Parallel coordinates</h3>'
        f'</figcaption><div class="plot scroll"><svg viewBox="0 0 {width} {_HEIGHT + 60}" '
        f'style="width:{width}px" role="img" aria-label="Parallel coordinates">'
        f"{''.join(lines)}{''.join(axes)}</svg></div>"
        '<p class="note">A line a trial, the darker the better; the best stand out. '
        "Raced out trials have estimates.</p></figure>"
    )


def _places(values: Sequence[Any], log: bool) -> list[float]:
    """From 0 at the bottom of an axis to 1 at its top."""
    if not all(_is_number(value) for value in values):
        words = sorted({str(value) for value in values})
        return [(words.index(str(v)) + 0.5) / len(words) for v in values]
    numbers = [math.log(v) if log and v > 0 else float(v) for v in values]
    low, high = min(numbers), max(numbers)
    return [(n - low) / (high - low) if high > low else 0.5 for n in numbers]


def _ends(values: Sequence[Any]) -> tuple[str, str]:
    if not all(_is_number(value) for value in values):
        words = sorted({str(value) for value in values})
        return _short(words[0]), _short(words[-1])
    return _number(min(values)), _number(max(values))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at(share: float) -> float:
    return _TOP + _HEIGHT * (1 - share)


def _short(text: str) -> str:
    return text if len(text) <= 18 else text[:17] + "…"
