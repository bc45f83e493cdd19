"""What a figure shows, as plain data; `drawing` makes plotly's figure of it.

A figure holds one or more views: of a percentile, of a rate, or a single one. Its series are
indices into the page's list of series, so that colours agree over all figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from ...harness.results.request_figures import Form

if TYPE_CHECKING:  # progress of a load imports this: a fifth of a second of its client's time
    import pandas as pd

Format = Literal["rate", "percent", "seconds", "duration", "number", "dollars"]
"""`seconds` is for latencies (ms, s), `duration` for how long something went on (s, min, h)."""

AXES: Mapping[Form, Format] = {
    "share": "percent",
    "s": "seconds",
    "per_s": "rate",
    "number": "number",
}

View = dict[str, Any]

ONLY = "only"


@dataclass(frozen=True)
class Axis:
    """`scale` is `linear` or `log`; `top` fixes the end of a linear axis; `names`: texts of
    the places 0, 1, … of an axis without numbers.
    """

    label: str
    format: Format
    scale: Literal["linear", "log"] = "linear"
    top: float | None = None
    names: tuple[tuple[str, ...], ...] = ()  # the lines of each


@dataclass(frozen=True)
class Figure:
    """One figure. `hover` says what a pointer finds: the nearest x, or the nearest point."""

    id: str
    title: str
    note: str
    x: Axis
    y: Axis
    views: dict[str, View]
    kind: Literal["lines", "bars", "spread"] = "lines"
    picker: Literal["none", "rate", "local"] = "none"
    options: list[list[str]] = field(default_factory=list)  # [view, label] of a local picker
    hover: Literal["x", "interpolate", "point"] = "x"
    markers: bool = True
    categories: list[str] = field(default_factory=list)
    palette: Literal["", "cause", "phase"] = ""  # colours of the categories, else of the series


Values = ArrayLike | Sequence[float | None]


def curve(place: int, x: Values, y: Values, **more: Any) -> View:
    """The points of the series at `place`, and `more` of each: ends of a band, labels that a
    pointer shows, numbers (marks) that stand beside the points.
    """
    return {"s": place, "x": np.asarray(x).tolist(), "y": np.asarray(y).tolist(), **more}


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


def form_text(form: Form, value: float) -> str:
    """A number as text, with its unit where it is a share or a time."""
    if form == "share":
        return percent_text(value)
    return seconds_text(value) if form == "s" else rate_text(value)
