"""What every page on real against simulated latencies has: scatters, and errors in few letters."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ...harness.validation.log_replay import ErrorRow
from .figure import Axis, Figure, View

TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e": "End-to-end latency",
}
_MOST_POINTS = 2000


def short_error(row: ErrorRow) -> str:
    """`+1.2 %`, for a table of many; `× 12` where it is far off."""
    if not math.isfinite(row.error):
        return "–"
    if abs(row.error) >= 10:
        return f"× {1 + row.error:,.0f}"
    return f"{100 * row.error:.1f} %" if row.statistic == "mape" else f"{100 * row.error:+.1f} %"


def spread_text(share: float) -> str:
    """`3.1 %`; nothing where it is not known."""
    if not math.isfinite(share):
        return ""
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # no minus before a zero


def scatter_view(real: NDArray[np.float64], simulated: NDArray[np.float64], place: int) -> View:
    """Points of requests that have both times; `place` is the series whose colour they have."""
    points = np.flatnonzero(np.isfinite(real) & np.isfinite(simulated))
    points = points[:: max(1, -(-len(points) // _MOST_POINTS))]
    top = float(max(real[points].max(), simulated[points].max())) if len(points) else 0.0
    return {
        "series": [
            {
                "s": place,
                "x": real[points].tolist(),
                "y": simulated[points].tolist(),
                "labels": [f"request {point}" for point in points],
            }
        ],
        "lines": [{"axis": "diagonal", "value": top, "label": "equal"}],
        "scatter": True,
    }


def scatter_of(metric: str, views: dict[str, View], options: list[list[str]]) -> Figure:
    """The figure of one or more such views."""
    return Figure(
        id=f"scatter-{metric}",
        kind="lines",
        title=TITLES[metric],
        note=f"A point a request, {_MOST_POINTS:,} at most; on the line both agree.",
        x=Axis("real, s", "seconds"),
        y=Axis("simulated, s", "seconds"),
        views=views,
        picker="local" if options else "none",
        options=options,
        hover="point",
    )
