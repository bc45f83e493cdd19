"""The report's text and tables as HTML. Whatever comes from a run goes through `escape`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from ...harness.results.read import RunResults
from ..figures.details import SloRange
from ..figures.facets import by_facet, facet_noun, facets_of
from ..figures.figure import Figure
from ..figures.labels import labels, stand_alone
from ..figures.levels import TARGETS, has_slo, offered
from ..figures.numbers import origin, percent_text, rate_text, seconds_text

MANY = 4
"""Up to so many values are listed in the page's title; more are counted."""


def listed(values: Iterable[object], plural: str) -> str:
    """`a, b` or `12 models`, as plain text."""
    distinct = list(dict.fromkeys(str(v) for v in values if str(v)))
    return ", ".join(distinct) if len(distinct) <= MANY else f"{len(distinct)} {plural}"


def badge(cells: pd.DataFrame) -> str:
    """Where the numbers come from, for every figure and table."""
    text = origin(cells)
    if text == "measured":
        return '<span class="badge measured">measured</span>'
    if (cells["step_time"] == "unfitted").any():
        text += " · unfitted"
    return f'<span class="badge">{text}</span>'


def title(cells: pd.DataFrame) -> str:
    """Model, GPU and workload, as plain text."""
    where = f"{listed(cells['model'], 'models')} on {listed(cells['gpu'], 'GPUs')}"
    workloads = list(dict.fromkeys(cells["workload"]))
    if not stand_alone(workloads):
        return f"{where}, {len(workloads)} workloads"
    return f"{where}, {listed(labels(workloads).values(), 'workloads')}"


def facts(cells: pd.DataFrame, bounds: Mapping[str, SloRange]) -> str:
    """One line: how much was run, under which SLO."""
    series, systems = cells["series"].nunique(), cells["system"].nunique()
    facets = cells["facet"].nunique()
    items = [
        _counted(systems, "system"),
        *([_counted(series, "configuration")] if series > systems else []),
        *([_counted(facets, facet_noun(cells))] if facets > 1 else []),
        _rates(cells),
        _counted(cells["seed"].nunique(), "seed"),
        f"{int(cells['requests'].sum()):,} requests",
        *([] if set(cells["gpu"]) == {"cpu"} else [_gpus(cells)]),
        *([f"SLO: {slo_text(bounds)}"] if has_slo(cells) else ["no SLO"]),
    ]
    return f'<ul class="facts">{"".join(f"<li>{escape(i)}</li>" for i in items)}</ul>'


def _gpus(cells: pd.DataFrame) -> str:
    gpus = sorted(set(cells["gpus"].dropna()))
    count = f"{gpus[0]:g}" if len(gpus) == 1 else f"{gpus[0]:g}–{gpus[-1]:g}" if gpus else "?"
    return f"{count} GPU{'' if count == '1' else 's'}"


def _rates(cells: pd.DataFrame) -> str:
    if offered(cells) == "at once":
        return "all requests at once"
    in_facets = cells.groupby("facet")["level_rps"].nunique()
    low, high = int(in_facets.min()), int(in_facets.max())
    return _counted(high, "rate") if low == high else f"{low}–{high} rates"


def slo_text(bounds: Mapping[str, SloRange]) -> str:
    """`TTFT ≤ 1 s, TPOT ≤ 150 ms`, with a span where requests differ."""
    if not bounds:
        return "deadlines, or none"

    def one(bound: SloRange) -> str:
        low, high = seconds_text(bound.low_s), seconds_text(bound.high_s)
        return low if low == high else f"{low} to {high} by request"

    return ", ".join(f"{name.upper()} ≤ {one(bound)}" for name, bound in bounds.items())


def notices(cells: pd.DataFrame, runs: Sequence[RunResults]) -> str:
    """What a reader must know before any number: simulated, unfitted, invalid."""
    lines = []
    simulated = cells[cells["backend"] == "simulated"]
    if len(simulated):
        which = "All" if len(simulated) == len(cells) else "Some"
        lines.append(
            f"<strong>Simulated.</strong> {which} numbers on this page come from a simulator with "
            "a step-time model, not from a running server."
        )
    unfitted = cells[cells["step_time"] == "unfitted"]
    if len(unfitted):
        pairs = sorted(set(unfitted["model"] + " on " + unfitted["gpu"]))
        lines.append(
            f"<strong>Unfitted step times.</strong> {escape(', '.join(pairs))}: an analytic "
            "estimate, not fitted to measurements. Compare systems with it; do not size a "
            "deployment by it."
        )
    lines += [
        f"<strong>Unfinished.</strong> {escape(run.unfinished)}." for run in runs if run.unfinished
    ]
    invalid = cells[~cells["valid"]]
    if len(invalid):
        lines.append(
            f"<strong>Invalid cells.</strong> {len(invalid)} of {len(cells)} are left out of every "
            f"figure and mean: {escape(listed(invalid['cell'], 'cells'))}."
        )
    if "overlong" in cells and (overlong := int(cells["overlong"].fillna(0).sum())):
        lines.append(
            f"<strong>Too long.</strong> {overlong:,} of {int(cells['requests'].sum()):,} requests "
            "exceed the context or the KV cache; they count as missed."
        )
    without = [run.name for run in runs if not run.keeps_requests]
    if without:
        lines.append(
            f"<strong>No per-request records</strong> were kept by {escape(', '.join(without))}: "
            "distributions, causes and cost are missing."
        )
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        lines.append(f"<strong>{len(runs)} runs together:</strong> {escape(names)}.")
    return f'<div class="notice">{"".join(f"<p>{t}</p>" for t in lines)}</div>' if lines else ""


def named(name: str, place: int) -> str:
    """A series' name with the mark that it has in figures."""
    swatch = f'<span class="swatch" data-series="{place}"></span>'
    return f'<span class="named">{swatch}<span>{escape(name)}</span></span>'


def level_table(cells: pd.DataFrame, rows: pd.DataFrame, names: Sequence[str]) -> str:
    """Every system at every rate, by facet."""
    body = []
    for facet, of_facet in by_facet(rows, facets_of(cells)).items():
        for name in names:
            of = of_facet[of_facet["series"] == name]
            if of.empty:
                continue
            where = f'<span class="dim">{escape(facet)}</span> ' if facet else ""
            body.append(
                f'<tr class="group"><th scope="rowgroup" colspan="{len(LEVEL_HEADS)}">'
                f"{where}{named(name, names.index(name))}</th></tr>"
            )
            body += [_level_row(row) for _, row in of.iterrows()]
    head = "".join(f'<th scope="col">{h}</th>' for h in LEVEL_HEADS)
    return (
        '<details class="fold"><summary>All systems at all rates</summary>'
        '<div class="scroll" tabindex="0" role="region" aria-label="All systems at all rates">'
        "<table><caption>Means over seeds, with the lowest and highest attainment of a seed "
        f"{badge(cells)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div></details>"
    )


LEVEL_HEADS = (
    "Offered req/s",
    "In SLO",
    "Lowest – highest",
    "Goodput req/s",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "Tokens/s",
    "KV peak",
    "Preemptions",
)


def _level_row(row: pd.Series[Any]) -> str:
    share, low, high = (float(row[f"attainment{end}"]) for end in ("", "_lo", "_hi"))
    mark = "" if share >= TARGETS[0] else ' class="short"'
    preempted = sum(float(row.get(f"preemptions_{way}", 0.0)) for way in ("swap", "recompute"))
    values = [
        rate_text(float(row["rate_rps"])),
        f"<span{mark}>{percent_text(share)}</span>",
        f'<span class="range">{percent_text(low)} – {percent_text(high)}</span>',
        rate_text(float(row["goodput_rps"])),
        *(seconds_text(float(row[f"{m}_{p}_s"])) for m in ("ttft", "tpot") for p in ("p50", "p99")),
        f"{float(row['output_tokens_per_s']):,.0f}",
        percent_text(float(row.get("kv_cache_usage_peak", math.nan))),
        rate_text(preempted),
    ]
    return f"<tr>{''.join(f'<td>{value}</td>' for value in values)}</tr>"


def panel(drawn: Figure, place: int, label: str) -> str:
    """The frame of a small figure of one facet; its name chooses the facet for all others."""
    return (
        f'<figure class="panel" data-figure="{drawn.id}" data-facet="{place}"><figcaption>'
        f'<button type="button">{escape(label)}</button></figcaption><div class="plot"></div>'
        '<span class="hidden-text" role="status" aria-live="polite"></span></figure>'
    )


def figure(drawn: Figure, cells: pd.DataFrame) -> str:
    """The frame that `chart.js` fills."""
    return (
        f'<figure class="figure" id="figure-{drawn.id}" data-figure="{drawn.id}">'
        f"<figcaption><h3>{escape(drawn.title)}</h3>{badge(cells)}</figcaption>"
        f'<div class="choices" role="group" aria-label="View"></div>'
        '<div class="legend" role="group" aria-label="Legend"></div><div class="plot"></div>'
        f'<p class="note">{escape(drawn.note)}</p>'
        "<details><summary>Numbers</summary></details>"
        '<span class="hidden-text" role="status" aria-live="polite"></span></figure>'
    )


def setup(runs: Sequence[RunResults]) -> str:
    """Per run: configuration verbatim, environment, step times."""
    parts = []
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        parts += [
            _fold(f"Configuration{of}", f"<pre>{escape(run.experiment_toml)}</pre>"),
            _fold(f"Environment{of}", _definitions(_without_step_time(run.environment))),
            _fold(f"Where the step times come from{of}", _step_times(run.environment)),
        ]
    return "".join(parts)


def _fold(summary_text: str, body: str) -> str:
    return (
        f'<details class="fold"><summary>{escape(summary_text)}</summary>'
        f'<div class="body">{body}</div></details>'
    )


def _without_step_time(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in environment.items() if k != "step_time"}


def _step_times(environment: Mapping[str, Any]) -> str:
    known = environment.get("step_time")
    if not isinstance(known, Mapping) or not known:
        return "<p>The run names none.</p>"
    told = {}
    for pair, about in known.items():
        about = about if isinstance(about, Mapping) else {"provenance": about}
        fitted = "Fitted" if about.get("fitted") is True else "Unfitted"
        told[str(pair)] = f"{fitted}. {about.get('provenance', '')}"
    return _definitions(told)


def _definitions(values: Mapping[str, Any]) -> str:
    def one(value: object) -> str:
        if isinstance(value, str):
            return escape(value)
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return escape(shlex.join(value))
        text = json.dumps(value, ensure_ascii=False, indent=1)
        return f"<pre>{escape(text)}</pre>"

    rows = "".join(f"<dt>{escape(str(k))}</dt><dd>{one(v)}</dd>" for k, v in values.items())
    return f"<dl>{rows}</dl>"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
