"""All trials of a tuning run in parallel coordinates: an axis a dimension, a line a trial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...tuner.search.objectives import OBJECTIVES

_MOST_LINES = 400
_SHADES = 5


def parallel_coordinates(found: Mapping[str, Any]) -> dict[str, Any]:
    """What `parallel.html` draws; nothing without at least two trials that have a value."""
    rows = [row for row in found["trials"] if row["values"] and row["values"][0] is not None]
    names = [*found["space"]]
    if len(rows) < 2 or not names:
        return {}
    objective = OBJECTIVES[found["objectives"][0]]
    rows.sort(key=lambda row: row["values"][0], reverse=not objective.maximise)
    rows = rows[-_MOST_LINES:]  # the best are drawn last, on top
    columns: list[list[Any]] = [[row["configuration"].get(n) for row in rows] for n in names]
    columns.append([row["values"][0] for row in rows])
    logs = [text.endswith(":log") for text in found["space"].values()] + [False]
    places = [_places(values, log) for values, log in zip(columns, logs, strict=True)]
    return {
        "axes": [
            (_short(name), *_ends(values))
            for name, values in zip([*names, objective.label], columns, strict=True)
        ],
        "lines": [
            {
                "trial": row["number"],
                "best": row["number"] in found["best"],
                "at": [of[number] for of in places],
                "shade": math.ceil(_SHADES * (number + 1) / len(rows)) / 10,
            }
            for number, row in enumerate(rows)
        ],
    }


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


def _short(text: str) -> str:
    return text if len(text) <= 18 else text[:17] + "…"
