"""A figure as plain data, which `assets/chart.js` draws.

A figure holds one or more views: of a percentile, of a rate, or a single one. Its series are
indices into the page's list of series, so that colours agree over all figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast

import pandas as pd

Format = Literal["rate", "percent", "seconds", "duration", "number", "dollars"]
"""`seconds` is for latencies (ms, s), `duration` for how long something went on (s, min, h)."""

View = dict[str, Any]

ONLY = "only"


@dataclass(frozen=True)
class Axis:
    """`scale` is `linear` or `log`; `top` fixes the end of a linear axis."""

    label: str
    format: Format
    scale: Literal["linear", "log"] = "linear"
    top: float | None = None


@dataclass(frozen=True)
class Figure:
    """One figure. `hover` says what a pointer finds: the nearest x, or the nearest point."""

    id: str
    kind: Literal["lines", "bars", "spread"]
    title: str
    note: str
    x: Axis
    y: Axis
    views: dict[str, View]
    picker: Literal["none", "rate", "local"] = "none"
    options: list[list[str]] = field(default_factory=list)  # [view, label] of a local picker
    hover: Literal["x", "interpolate", "point"] = "x"
    markers: bool = True
    categories: list[str] = field(default_factory=list)
    palette: Literal["", "cause", "phase"] = ""  # colours of the categories, else of the series


_SHARED = ("x", "y", "lo", "hi")


def as_json(*facets: Iterable[Figure], always: Iterable[Figure] = ()) -> dict[str, Any]:
    """`figures` by id, as plain JSON values, and the `arrays` they share.

    Args:
        facets: the figures of each facet of the page; a figure's `views` become a list, with its
            views in each facet ({} in one that has no such figure).
        always: figures that are the same in every facet; their list has one place.

    Numbers have four significant digits; what is not finite becomes null. A curve's x, y, lo and
    hi are places in `arrays`, since many curves have the same.
    """
    arrays: dict[tuple[Any, ...], int] = {}
    plain: dict[str, dict[str, Any]] = {}
    for place, drawn in enumerate(facets):
        for figure in drawn:
            views = _views(figure, arrays)
            frame = plain.setdefault(figure.id, _frame(figure, [{} for _ in facets]))
            frame["views"][place] = views
    for figure in always:
        plain[figure.id] = _frame(figure, [_views(figure, arrays)])
    return {"figures": plain, "arrays": [list(array) for array in arrays]}


def _frame(figure: Figure, views: list[Any]) -> dict[str, Any]:
    return {**cast("dict[str, Any]", _plain(asdict(replace(figure, views={})))), "views": views}


def _views(figure: Figure, arrays: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    views = cast("dict[str, Any]", _plain(figure.views))
    if figure.kind == "lines":
        for view in views.values():
            for curve in view["series"]:
                for key in [key for key in _SHARED if key in curve]:
                    curve[key] = arrays.setdefault(tuple(curve[key]), len(arrays))
    return views


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def rate_keys(cells: pd.DataFrame) -> pd.Series[str]:
    """Name of the rate's view for every row of a cells frame."""
    return cells["level_rps"].map(rate_key)


def rate_key(rate_rps: float) -> str:
    """The name of a rate's view."""
    return f"{rate_rps:.4g}"


def rate_text(rate_rps: float) -> str:
    """A rate with three significant digits and no exponent."""
    if not math.isfinite(rate_rps):
        return "–"
    digits = max(0, 2 - math.floor(math.log10(abs(rate_rps)))) if rate_rps else 0
    text = f"{rate_rps:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent_text(share: float) -> str:
    """One decimal, cut off rather than rounded, so that 89.99 % never reads as 90 %."""
    if math.isnan(share):
        return "–"
    return f"{math.floor(share * 1000 + 1e-9) / 10:.1f} %"


def seconds_text(seconds: float) -> str:
    """`350 ms`, `1.25 s`, `210 s`."""
    if math.isnan(seconds):
        return "–"
    if math.isinf(seconds):
        return "∞"
    if seconds < 0.9995:
        return f"{rate_text(seconds * 1000)} ms"
    return f"{rate_text(seconds)} s"
