"""The report's figures as objects of plotly, to go on with in a notebook or to save as images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...harness.results.read_run import read_runs
from . import figures
from .drawing import plots
from .facets import full_names
from .figure import Figure
from .levels import combine, levels, origin, series_names

if TYPE_CHECKING:
    import plotly.graph_objects as go


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

    views = plots(figure, names, how)
    plot = views.get("p99") or next(iter(views.values()))
    return go.Figure(data=plot["data"], layout=plot["layout"])
