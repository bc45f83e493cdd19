"""A comparison as an HTML page of its own: shell, figures, palette and security of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ..figures.drawing import page_data
from ..figures.figure import ONLY, Axis, Figure, View
from ..pages.document import page, write_page
from .comparing import Comparison, Row
from .results import Metric
from .text import differing_lines, headline, labels_of, note_lines, rows_table


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    return write_page(comparison_page(comparison), out)


def comparison_page(comparison: Comparison) -> str:
    """HTML text of the comparison's page."""
    names = series(comparison)
    drawn = figures(comparison, names)
    badge = "simulated" if comparison.a.simulated else "measured"
    if comparison.a.simulated != comparison.b.simulated:
        badge = "simulated and measured"
    return page(
        "comparison.html",
        page_data(names, badge, drawn),
        heading=f"{comparison.name_b} against {comparison.name_a}",
        answer=headline(comparison),
        differing=list(differing_lines(comparison)),
        of=comparison,
        figures=drawn,
        badge=badge,
        rows=rows_table(comparison, labels_of(comparison), holm=True),
        notes=note_lines(comparison),
        footer=f"{comparison.a.name}, {comparison.b.name}",
    )


def series(comparison: Comparison) -> list[str]:
    """The names of curves: what tells levels apart, or the pair where there is one."""
    alone = f"{comparison.name_b} against {comparison.name_a}"
    return list(dict.fromkeys(row.label or alone for row in comparison.rows))


def figures(comparison: Comparison, names: Sequence[str]) -> list[Figure]:
    """For each metric its change against offered rate, where there is more than one rate."""
    metrics = list(dict.fromkeys(row.metric for row in comparison.rows))
    rates = {row.rate_rps for row in comparison.rows}
    if len(rates) < 2 or None in rates:
        return []
    return [_figure(comparison, metric, names) for metric in metrics]


def _figure(comparison: Comparison, metric: Metric, names: Sequence[str]) -> Figure:
    curves: list[View] = []
    for place, name in enumerate(names):
        rows = [
            row
            for row in comparison.rows
            if row.metric == metric and row.label in (name, "") and math.isfinite(_change(row)[0])
        ]
        rows.sort(key=lambda row: row.rate_rps or 0.0)
        if rows:
            changes = [_change(row) for row in rows]
            curves.append(
                {
                    "s": place,
                    "x": [row.rate_rps for row in rows],
                    "y": [change for change, _, _ in changes],
                    "lo": [low for _, low, _ in changes],
                    "hi": [high for _, _, high in changes],
                    "hollow": [not row.significant for row in rows],
                }
            )
    better = "up is better" if metric.higher_is_better else "down is better"
    unit = "in points" if metric.unit == "share" else "in percent"
    line = {"axis": "y", "value": 0.0, "label": "no change"}
    return Figure(
        id=f"change-{metric.name}",
        kind="lines",
        title=f"Change of {metric.name}",
        note=f"{better.capitalize()}. Hollow marks: not significant among all rows.",
        x=Axis("offered rate, req/s", "rate"),
        y=Axis(f"change {unit}", "number" if metric.unit == "share" else "percent"),
        views={ONLY: {"series": curves, "lines": [line]}},
    )


def _change(row: Row) -> tuple[float, float, float]:
    if row.metric.unit == "share":
        return 100 * row.difference, 100 * row.bounds.low, 100 * row.bounds.high
    return row.relative, row.relative_bounds.low, row.relative_bounds.high
