"""The report: one HTML file that needs no network, made from one or more run folders.

The page forbids itself any request and any script but its own by a content security policy, so
that no name in a run, however written, can run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

import pandas as pd

from ..workloads.errors import SloBenchError
from . import capacity, figures, levels_validated, published, sections
from .details import Bound, LevelDetail, level_details
from .figure import Figure, as_json, rate_key, rate_keys
from .levels import combine, knee_rps, levels, series_names
from .read import RunFolder, read_runs
from .tables import origin, rate_text


@dataclass(frozen=True)
class _Shown:
    """All that the page shows, aggregated."""

    runs: Sequence[RunFolder]
    cells: pd.DataFrame
    rows: pd.DataFrame
    details: Sequence[LevelDetail]
    names: Sequence[str]
    bounds: Mapping[str, Bound]


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the report of `run_dirs` to `out`, whole or not at all, and return `out`.

    Raises SloBenchError where a run folder is incomplete or malformed or `out` cannot be written.
    """
    runs = read_runs(run_dirs)
    text = _document(_gather(runs))
    out = Path(out)
    partial = out.with_name(f".{out.name}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SloBenchError(f"cannot write the report to {out}: {error.strerror}") from error
    return out


def _gather(runs: Sequence[RunFolder]) -> _Shown:
    cells = combine(runs)
    if not cells["valid"].any():
        folders = ", ".join(str(run.path) for run in runs)
        raise SloBenchError(f"no cell of {folders} is valid; there is nothing to report")
    details = list(level_details(runs, cells))
    bounds: dict[str, Bound] = {}
    for detail in details:
        for name, bound in detail.bounds.items():
            old = bounds.get(name, bound)
            bounds[name] = Bound(min(old.low_s, bound.low_s), max(old.high_s, bound.high_s))
    return _Shown(runs, cells, levels(cells), details, series_names(cells), bounds)


def _document(shown: _Shown) -> str:
    cells, names = shown.cells, shown.names
    load = [figures.attainment(shown.rows, names), figures.goodput(shown.rows, names)]
    load += [
        figures.latency(shown.rows, names, metric, shown.bounds.get(metric))
        for metric in figures.METRICS
    ]
    at_rate = [
        *(figures.latency_distribution(shown.details, names, m) for m in figures.METRICS),
        figures.causes(shown.details, names),
        figures.phases(shown.details, names, until="first"),
        figures.phases(shown.details, names, until="last"),
        *(figures.over_time(shown.details, names, c) for c in figures.STATES),
        *_present(figures.classes(shown.rows, names)),
    ]
    worth = [
        figures.efficiency(shown.rows, names),
        *_present(figures.cost(shown.details, names)),
    ]
    searched = capacity.found_in(shown.runs)
    capacities = _present(capacity.figure(searched, cells, names))
    validated = levels_validated.found_in(shown.runs, cells)
    scatters = levels_validated.scatters(validated, names)
    heading = sections.title(cells)
    body = f"""
<a class="skip" href="#load">Skip to the figures</a>
<header class="top">
<p class="eyebrow">SLO report by slo-bench</p>
<h1>{escape(heading)}</h1>
{sections.facts(cells, shown.bounds)}
{sections.notices(cells, shown.runs)}
</header>
<main>
<p class="answer">{capacity.answer(searched, cells) or sections.answer(cells, names)}</p>
{sections.summary(cells, shown.rows, shown.details, names)}
<nav class="contents" aria-label="Contents"><a href="#load">Against load</a>\
<a href="#rate-section">At one rate</a><a href="#worth">Efficiency and cost</a>\
<a href="#setup">Numbers and setup</a></nav>
<noscript><div class="notice">The figures need JavaScript; the tables do not.</div></noscript>
{capacity.section(searched, cells, _grid(capacities, cells))}
<section id="load"><h2>Against load</h2>
<p class="lead">How each system holds up as the offered rate grows. Click a name in a legend to \
hide or show it in every figure.</p>{_grid(load, cells)}</section>
<section id="rate-section"><h2>At one rate</h2>{_rate_bar(shown)}{_grid(at_rate, cells)}</section>
<section id="worth"><h2>Efficiency and cost</h2>{_cost_lead(worth)}{_grid(worth, cells)}</section>
{published.section(shown.runs, cells, shown.rows)}
{levels_validated.section(validated, levels_validated.grid(scatters))}
<section id="setup"><h2>Numbers and setup</h2>
{sections.level_table(cells, shown.rows, names)}{sections.setup(shown.runs)}
<details class="fold"><summary>What the terms mean</summary>\
<div class="body">{_asset("definitions.html")}</div></details></section>
</main>
<footer>{escape(_footer(shown))}</footer>"""
    data = {
        "series": list(names),
        "origin": origin(cells),
        "rate": rate_key(knee_rps(shown.rows)),
        **as_json([*capacities, *load, *at_rate, *worth, *scatters]),
    }
    return _page(f"{heading} – SLO report", body, data)


def _page(title: str, body: str, data: Mapping[str, object]) -> str:
    script = _asset("chart.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_asset("report.css")}</style>
</head>
<body>{body}
<script type="application/json" id="report-data">{json_for_html(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def json_for_html(value: object) -> str:
    """JSON that no HTML parser reads as anything but text, also inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _rate_bar(shown: _Shown) -> str:
    knee = rate_key(knee_rps(shown.rows))
    options = []
    for rate in sorted(set(shown.rows["rate_rps"])):
        key = rate_key(rate)
        chosen = " selected" if key == knee else ""
        options.append(f'<option value="{key}"{chosen}>{_rate_label(shown.cells, rate)}</option>')
    return (
        '<div class="ratebar"><label for="rate">Offered rate</label>'
        '<button type="button" aria-label="Lower rate">←</button>'
        f'<select id="rate">{"".join(options)}</select>'
        '<button type="button" aria-label="Higher rate">→</button>'
        '<span class="why">first shown: the lowest rate at which the median system is under 90 % '
        "(else the highest)</span></div>"
    )


def _rate_label(cells: pd.DataFrame, rate: float) -> str:
    text = f"{rate_text(rate)} req/s"
    if "speed" not in cells.columns or cells["speed"].nunique() < 2:
        return text
    speeds = cells.loc[rate_keys(cells) == rate_key(rate), "speed"].dropna()
    return f"{text} ({speeds.iloc[0]:g}× speed)" if speeds.nunique() == 1 else text


def _grid(drawn: Sequence[Figure], cells: pd.DataFrame) -> str:
    return f'<div class="grid">{"".join(sections.figure(f, cells) for f in drawn)}</div>'


def _cost_lead(worth: Sequence[Figure]) -> str:
    if any(figure.id == "cost" for figure in worth):
        return '<p class="lead">What a GPU gives, and what a token that counts costs.</p>'
    return (
        '<p class="lead">No cost is shown: no price is known for these GPUs, or no request met '
        "its SLO.</p>"
    )


def _footer(shown: _Shown) -> str:
    made = [
        f"slo-bench {run.environment.get('slo_bench', '?')}, {run.environment.get('created', '?')}"
        for run in shown.runs
    ]
    return f"Made from {len(shown.cells):,} cells. {'; '.join(dict.fromkeys(made))}."


def _present(figure: Figure | None) -> list[Figure]:
    return [] if figure is None else [figure]


def _asset(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")
