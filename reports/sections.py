"""The report's text and tables as HTML. Whatever comes from a run goes through `escape`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from .details import Bound, LevelDetail
from .figure import Figure
from .levels import TARGETS, HighestRate, highest_rate
from .read import RunFolder
from .tables import highest_text, origin, percent_text, rate_text, seconds_text

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
    return f"{where}, {listed(cells['workload'], 'workloads')}"


def facts(cells: pd.DataFrame, bounds: Mapping[str, Bound]) -> str:
    """One line: how much was run, under which SLO."""
    series = cells["series"].nunique()
    gpus = sorted(set(cells["gpus"].dropna()))
    count = f"{gpus[0]:g}" if len(gpus) == 1 else f"{gpus[0]:g}–{gpus[-1]:g}" if gpus else "?"
    items = [
        _counted(cells["system"].nunique(), "system"),
        *([_counted(series, "configuration")] if series > cells["system"].nunique() else []),
        _counted(cells["level_rps"].nunique(), "rate"),
        _counted(cells["seed"].nunique(), "seed"),
        f"{int(cells['requests'].sum()):,} requests",
        f"{count} GPU{'' if count == '1' else 's'}",
        f"SLO: {slo_text(bounds)}",
    ]
    return f'<ul class="facts">{"".join(f"<li>{escape(i)}</li>" for i in items)}</ul>'


def slo_text(bounds: Mapping[str, Bound]) -> str:
    """`TTFT ≤ 1 s, TPOT ≤ 150 ms`, with a span where requests differ."""
    if not bounds:
        return "deadlines, or none"

    def one(bound: Bound) -> str:
        low, high = seconds_text(bound.low_s), seconds_text(bound.high_s)
        return low if low == high else f"{low} to {high} by request"

    return ", ".join(f"{name.upper()} ≤ {one(bound)}" for name, bound in bounds.items())


def notices(cells: pd.DataFrame, runs: Sequence[RunFolder]) -> str:
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
    invalid = cells[~cells["valid"]]
    if len(invalid):
        lines.append(
            f"<strong>Invalid cells.</strong> {len(invalid)} of {len(cells)} are left out of every "
            f"figure and mean: {escape(listed(invalid['cell'], 'cells'))}."
        )
    if "oversize" in cells and (oversize := int(cells["oversize"].fillna(0).sum())):
        lines.append(
            f"<strong>Too long.</strong> {oversize:,} of {int(cells['requests'].sum()):,} requests "
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


def answer(cells: pd.DataFrame, names: Sequence[str]) -> str:
    """The page's one sentence: who carries the most load at 90 %."""
    found = {n: highest_rate(cells[cells["series"] == n], TARGETS[0]) for n in names}
    carried = {n: h.rate_rps for n, h in found.items() if h.rate_rps is not None}
    if not carried:
        low = min(h.lowest_rps for h in found.values())
        return (
            "No system kept 90&nbsp;% of requests in their SLO at any tested rate; the lowest was "
            f"<strong>{rate_text(low)} req/s</strong>."
        )
    best = max(carried.values())
    winners = [n for n, rate in carried.items() if rate == best]
    who = escape(" and ".join(winners)) if len(winners) <= 3 else f"{len(winners)} systems"
    verb = "carries" if len(winners) == 1 else "carry"
    text = (
        f"<strong>{who}</strong> {verb} <strong>{rate_text(best)} req/s</strong> with at least "
        "90&nbsp;% of requests in their SLO"
    )
    if any(found[n].at_end for n in winners):
        return f"{text}, the highest rate tested; the limit may lie above it."
    rest = [rate for n, rate in carried.items() if n not in winners]
    if rest:
        return f"{text}; the next best {rate_text(max(rest))} req/s."
    if len(winners) < len(names):
        return f"{text}; no other system did so at any tested rate."
    return f"{text}."


def summary(
    cells: pd.DataFrame,
    rows: pd.DataFrame,
    details: Sequence[LevelDetail],
    names: Sequence[str],
) -> str:
    """A row per system: highest rates, best goodput, cost there."""
    top = float(cells["rate_rps"].max())
    body = []
    for place, name in enumerate(names):
        of = cells[cells["series"] == name]
        at_90, at_99 = (highest_rate(of, target) for target in TARGETS)
        goodput = rows.loc[rows["series"] == name, "goodput_rps"]
        best = rate_text(float(goodput.max())) if len(goodput) else "–"
        body.append(
            f'<tr><th scope="row">{_named(name, place)}</th><td>{_highest(at_90, place, top)}</td>'
            f"<td>{_highest(at_99, place, top)}</td><td>{best}</td>"
            f'<td class="wide">{_cost_at(details, name, at_90)}</td></tr>'
        )
    return (
        '<div class="card summary scroll"><table>'
        "<caption>Highest tested rate and best goodput, req/s, mean over seeds "
        f"{badge(cells)}</caption>"
        '<thead><tr><th scope="col">System</th><th scope="col">≥ 90&nbsp;% in SLO</th>'
        '<th scope="col">≥ 99&nbsp;% in SLO</th><th scope="col">Best goodput</th>'
        '<th scope="col" class="wide">US$ per million tokens in SLO, at 90&nbsp;%</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _named(name: str, place: int) -> str:
    swatch = f'<span class="swatch" data-series="{place}"></span>'
    return f'<span class="named">{swatch}<span>{escape(name)}</span></span>'


def _highest(found: HighestRate, place: int, top: float) -> str:
    share = 100 * (found.rate_rps or 0.0) / top if top else 0.0
    text = escape(highest_text(found))
    shown = text if found.rate_rps is not None else f'<span class="dim">{text}</span>'
    return f'{shown}<span class="bar" data-bar="{share:.1f}" data-of="{place}"></span>'


def _cost_at(details: Sequence[LevelDetail], name: str, found: HighestRate) -> str:
    costs = [d.cost for d in details if d.series == name and d.rate_rps == found.rate_rps]
    return f"${rate_text(costs[0])}" if costs and math.isfinite(costs[0]) else "–"


def level_table(cells: pd.DataFrame, rows: pd.DataFrame, names: Sequence[str]) -> str:
    """Every system at every rate."""
    body = []
    for place, name in enumerate(names):
        body.append(
            f'<tr class="group"><th scope="rowgroup" colspan="{len(LEVEL_HEADS)}">'
            f"{_named(name, place)}</th></tr>"
        )
        body += [_level_row(row) for _, row in rows[rows["series"] == name].iterrows()]
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
        percent_text(float(row.get("kv_peak", math.nan))),
        rate_text(preempted),
    ]
    return f"<tr>{''.join(f'<td>{value}</td>' for value in values)}</tr>"


def figure(drawn: Figure, cells: pd.DataFrame) -> str:
    """The frame that `chart.js` fills."""
    return (
        f'<figure class="figure" id="figure-{drawn.id}" data-figure="{drawn.id}">'
        f"<figcaption><h3>{escape(drawn.title)}</h3>{badge(cells)}</figcaption>"
        f'<div class="choices" role="group" aria-label="Percentile"></div>'
        '<div class="legend" role="group" aria-label="Legend"></div><div class="plot"></div>'
        f'<p class="note">{escape(drawn.note)}</p>'
        "<details><summary>Numbers</summary></details>"
        '<span class="hidden-text" role="status" aria-live="polite"></span></figure>'
    )


def setup(runs: Sequence[RunFolder]) -> str:
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
