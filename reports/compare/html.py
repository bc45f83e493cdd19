"""A comparison as an HTML page of its own: shell, figures, palette and security of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import pandas as pd

from ..figures.figure import ONLY, Axis, Figure, View, as_json
from ..figures.numbers import rate_text
from ..pages import sections
from ..pages.document import page, write_page
from .comparing import Comparison, Row
from .metrics import Metric
from .text import (
    WORDS,
    change_bounds_text,
    change_text,
    differing_lines,
    headline,
    note_lines,
    p_text,
    value_text,
)

_STYLES = {"better": "color:var(--good)", "worse": "color:var(--bad)", "none": "", "unknown": ""}
_HEADS = ("Metric", "Offered req/s")


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    return write_page(comparison_page(comparison), out)


def comparison_page(comparison: Comparison) -> str:
    """The whole page."""
    heading = f"{comparison.name_b} against {comparison.name_a}"
    names = series(comparison)
    drawn = figures(comparison, names)
    differing = "".join(f"<p>{escape(line)}</p>" for line in differing_lines(comparison))
    notes = "".join(f"<p>{escape(line)}</p>" for line in note_lines(comparison))
    cells = _origin_frame(comparison)
    body = f"""
<a class="skip" href="#differences">Skip to the figures</a>
<header class="top">
<p class="eyebrow">Comparison by slo-bench</p>
<h1>{escape(heading)}</h1>
{f'<div class="notice">{differing}</div>' if differing else ""}
</header>
<main>
<p class="answer">{escape(headline(comparison))}</p>
<noscript><div class="notice">The figures need JavaScript; the table does not.</div></noscript>
{comparison_section(comparison, drawn, cells)}
<section id="notes"><h2>How it was done</h2>{notes}</section>
</main>
<footer>{escape(comparison.a.name)}, {escape(comparison.b.name)}</footer>"""
    data = {"series": names, "origin": _origin(comparison), **as_json(drawn)}
    return page(f"{heading} – comparison", body, data)


def comparison_section(comparison: Comparison, drawn: Sequence[Figure], cells: pd.DataFrame) -> str:
    """Figures and the table of all rows, to stand in a page that has the report's script."""
    shown = "".join(sections.figure(figure, cells) for figure in drawn)
    return (
        '<section id="differences"><h2>What changes</h2><p class="lead">Change from '
        f"{escape(comparison.name_a)} to {escape(comparison.name_b)} with its "
        f"{comparison.confidence:.0%} interval. An interval that touches zero may be noise.</p>"
        f'<div class="grid">{shown}</div></section>'
        f'<section id="numbers"><h2>Numbers</h2>{_table(comparison)}</section>'
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


def _origin(comparison: Comparison) -> str:
    if comparison.a.simulated != comparison.b.simulated:
        return "simulated and measured"
    return "simulated" if comparison.a.simulated else "measured"


def _origin_frame(comparison: Comparison) -> pd.DataFrame:
    """What the report's badge looks at."""
    kinds = ["simulated" if r.simulated else "measured" for r in (comparison.a, comparison.b)]
    return pd.DataFrame({"backend": kinds, "step_time": ["", ""]})


def _table(comparison: Comparison) -> str:
    heads = (
        *_HEADS,
        comparison.name_a,
        comparison.name_b,
        "Change",
        f"{comparison.confidence:.0%} interval",
        "p (Holm)",
        "Verdict",
    )
    body = []
    for label in dict.fromkeys(row.label for row in comparison.rows):
        if label:
            body.append(
                f'<tr class="group"><th scope="rowgroup" colspan="{len(heads)}">'
                f"{escape(label)}</th></tr>"
            )
        body += [_table_row(row) for row in comparison.rows if row.label == label]
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    return (
        '<div class="card scroll" tabindex="0" role="region" aria-label="All comparisons">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _table_row(row: Row) -> str:
    values = (
        "–" if row.rate_rps is None else rate_text(row.rate_rps),
        value_text(row.metric, row.a),
        value_text(row.metric, row.b),
        change_text(row),
        change_bounds_text(row),
        p_text(row.p_holm),
    )
    cells = "".join(f"<td>{escape(value)}</td>" for value in values)
    verdict = f'<td style="{_STYLES[row.verdict]}">{WORDS[row.verdict]}</td>'
    return f'<tr><th scope="row">{escape(row.metric.name)}</th>{cells}{verdict}</tr>'
