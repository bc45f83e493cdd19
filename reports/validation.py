"""A validation as table, plain values and a page with scatters: a log beside its simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..harness.validate import METRICS, ErrorRow, Validation
from ..workloads.errors import SloBenchError
from . import html, sections
from .figure import ONLY, Axis, Figure, View, as_json
from .tables import seconds_text

_TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e": "End-to-end latency",
}
_MOST_POINTS = 2000


def headline(found: Validation) -> str:
    """The largest errors of all, in a sentence."""
    rows = [row for row in found.rows() if math.isfinite(row.error)]
    means = [abs(row.error) for row in rows if row.statistic == "mean"]
    shown = [abs(row.error) for row in rows if row.statistic != "mape"]
    if not shown:
        return "There is nothing to compare."
    return (
        f"{len(found.log):,} requests of {found.engine} replayed: means within "
        f"{max(means):.1%}, means and quantiles within {max(shown):.1%}."
    )


def error_text(row: ErrorRow) -> str:
    """`+1.23 %`; the mean of absolute errors has no sign."""
    if not math.isfinite(row.error):
        return "–"
    return f"{100 * row.error:.2f} %" if row.statistic == "mape" else f"{100 * row.error:+.2f} %"


def _cells(row: ErrorRow) -> list[str]:
    def time(seconds: float) -> str:
        return seconds_text(seconds) if math.isfinite(seconds) else ""

    return [row.statistic, time(row.real_s), time(row.simulated_s), error_text(row)]


def assumptions(found: Validation) -> list[str]:
    """What was simulated, and what was assumed, line by line."""
    settings, host = found.settings, found.host
    overhead = [f"{1e3 * host.launch_s:g} ms of host overhead for a step without a CUDA graph"]
    if host.step_s:
        overhead.append(f"{1e3 * host.step_s:g} ms for every step")
    blocks = f"{settings.kv_blocks:,}" if settings.kv_blocks else "?"
    return [
        f"{found.engine}: max_num_seqs {settings.max_num_seqs}, max_num_batched_tokens "
        f"{settings.max_num_batched_tokens}, {blocks} KV blocks of {settings.block_tokens} tokens, "
        f"prefix caching {'on' if settings.prefix_caching else 'off'}, "
        f"{'asynchronous' if settings.async_scheduling else 'synchronous'} scheduling, CUDA graphs "
        f"up to {host.graph_tokens} tokens; {found.preemptions} preemptions.",
        f"Step times: {found.step_time}; {' and '.join(overhead)}.",
        *(f"Note: {note}." for note in found.notes),
    ]


def validation_text(found: Validation) -> RenderableType:
    """Headline, error table, assumptions."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("metric", no_wrap=True)
    table.add_column("")
    for name in ("real", "simulated", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for row in found.rows():
        if last and row.metric != last:
            table.add_section()
        table.add_row(row.metric if row.metric != last else "", *_cells(row))
        last = row.metric
    lines = [Text(line, style="dim") for line in assumptions(found)]
    return Group(Text(headline(found), style="bold"), table, *lines)


def validation_json(found: Validation) -> list[dict[str, Any]]:
    """The rows of the error table as plain values; what does not exist is null."""

    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return [
        {
            "metric": row.metric,
            "statistic": row.statistic,
            "real_s": known(row.real_s),
            "simulated_s": known(row.simulated_s),
            "error": known(row.error),
        }
        for row in found.rows()
    ]


def scatter(found: Validation, metric: str) -> Figure:
    """A point a request: what the engine took against what the simulation says."""
    real, simulated = found.real[metric], found.simulated[metric]
    points = np.flatnonzero(np.isfinite(real) & np.isfinite(simulated))
    points = points[:: max(1, -(-len(points) // _MOST_POINTS))]
    top = float(max(real[points].max(), simulated[points].max())) if len(points) else 0.0
    view: View = {
        "series": [
            {
                "s": 0,
                "x": real[points].tolist(),
                "y": simulated[points].tolist(),
                "labels": [f"request {point}" for point in points],
            }
        ],
        "lines": [{"axis": "diagonal", "value": top, "label": "equal"}],
        "scatter": True,
    }
    return Figure(
        id=f"scatter-{metric}",
        kind="lines",
        title=_TITLES[metric],
        note=f"A point a request, {len(points):,} of {len(real):,} shown; on the line both agree.",
        x=Axis("real, s", "seconds"),
        y=Axis("simulated, s", "seconds"),
        views={ONLY: view},
        hover="point",
    )


def quantiles(found: Validation) -> Figure:
    """Both distributions of each latency."""
    shares = np.linspace(0, 1, 101)

    def curve(place: int, seconds: NDArray[np.float64]) -> View:
        known = seconds[np.isfinite(seconds)]
        values = np.quantile(known, shares) if len(known) else np.zeros(0)
        return {"s": place, "x": values.tolist(), "y": shares[: len(values)].tolist()}

    return Figure(
        id="distribution",
        kind="lines",
        title="Share of requests within a time",
        note="Real against simulated.",
        x=Axis("seconds", "seconds"),
        y=Axis("requests", "percent", top=1.0),
        views={
            metric: {
                "series": [curve(0, found.simulated[metric]), curve(1, found.real[metric])],
                "lines": [],
            }
            for metric in METRICS
        },
        picker="local",
        options=[[metric, _TITLES[metric]] for metric in METRICS],
        hover="interpolate",
        markers=False,
    )


def write_validation(found: Validation, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    drawn = [*(scatter(found, metric) for metric in METRICS), quantiles(found)]
    cells = pd.DataFrame({"backend": ["simulated"], "step_time": [""]})
    title = f"{found.engine}: a real log and its simulation"
    figures = "".join(sections.figure(figure, cells) for figure in drawn)
    told = "".join(f"<p>{escape(line)}</p>" for line in assumptions(found))
    body = f"""
<header class="top">
<p class="eyebrow">Validation by slo-bench</p>
<h1>{escape(title)}</h1>
</header>
<main>
<p class="answer">{escape(headline(found))}</p>
<noscript><div class="notice">The figures need JavaScript; the table does not.</div></noscript>
<section><h2>Errors</h2>{_table_html(found.rows())}</section>
<section><h2>Request by request</h2><div class="grid">{figures}</div></section>
<section><h2>What was assumed</h2>{told}</section>
</main>
<footer>{escape(found.log.name)}</footer>"""
    data = {
        "series": ["simulated", "real"],
        "origin": "simulated",
        "rate": "",
        **as_json(drawn),
    }
    out = Path(out)
    partial = out.with_name(f".{out.name}.part")
    try:
        partial.write_text(html._page(f"{title} – validation", body, data), encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SloBenchError(f"cannot write the page to {out}: {error.strerror}") from error
    return out


def _table_html(rows: Sequence[ErrorRow]) -> str:
    heads = ("Metric", "", "Real", "Simulated", "Error")
    head = "".join(f'<th scope="col">{h}</th>' for h in heads)
    body = "".join(
        f'<tr><th scope="row">{row.metric}</th>'
        + "".join(f"<td>{escape(value)}</td>" for value in _cells(row))
        + "</tr>"
        for row in rows
    )
    return (
        '<div class="card scroll" tabindex="0" role="region" aria-label="All errors">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
