"""The report's curves as plotly figures, to go on with in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...harness.results.read import read_runs
from . import figures
from .facets import full_names
from .figure import Figure, View
from .levels import combine, levels, origin, series_names

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Okabe and Ito's colours, which stay apart for colour-blind eyes.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_TICKS = {"percent": ".0%", "dollars": "$,.2~f", "seconds": ".3~s", "rate": "~g", "number": "~g"}


def plotly_figures(run_dirs: Sequence[Path | str]) -> dict[str, go.Figure]:
    """Figures of one or more run folders by name: `attainment`, `goodput`, `ttft`, `tpot`,
    `efficiency`. Curves are means over seeds; bands reach from the lowest to the highest seed.
    Of latencies the 99th percentile is drawn.

    Raises:
        SloBenchError: a folder is incomplete or malformed.
    """
    cells = combine(read_runs([Path(folder) for folder in run_dirs]))
    cells = cells.assign(series=full_names(cells), facet="")
    rows, names = levels(cells), series_names(cells)
    drawn: dict[str, Figure] = {
        "attainment": figures.against_rate(rows, names, "attainment"),
        "goodput": figures.against_rate(rows, names, "goodput_rps"),
    }
    for metric in figures.METRICS:
        drawn[metric] = figures.latency(rows, names, metric, None)
    drawn["efficiency"] = figures.efficiency(rows, names)
    return {name: _plotly(figure, names, origin(cells)) for name, figure in drawn.items()}


def _plotly(figure: Figure, names: Sequence[str], how: str) -> go.Figure:
    import plotly.graph_objects as go

    view: View = figure.views.get("p99") or next(iter(figure.views.values()))
    made = go.Figure()
    for curve in view["series"]:
        _add(made, curve, names[curve["s"]], _COLOURS[curve["s"] % len(_COLOURS)])
    made.update_layout(
        title={"text": figure.title, "subtitle": {"text": how}},
        template="plotly_white",
        xaxis={"title": figure.x.label, "tickformat": _TICKS[figure.x.format]},
        yaxis={
            "title": figure.y.label,
            "tickformat": _TICKS[figure.y.format],
            "type": figure.y.scale,
        },
    )
    return made


def _add(made: go.Figure, curve: View, name: str, colour: str) -> None:
    import plotly.graph_objects as go

    common: dict[str, Any] = {"legendgroup": name, "name": name}
    if "lo" in curve:
        made.add_trace(
            go.Scatter(
                x=[*curve["x"], *reversed(curve["x"])],
                y=[*curve["hi"], *reversed(curve["lo"])],
                fill="toself",
                fillcolor=colour,
                opacity=0.15,
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
                **common,
            )
        )
    made.add_trace(
        go.Scatter(
            x=curve["x"], y=curve["y"], mode="lines+markers", line={"color": colour}, **common
        )
    )
