"""The report: one HTML page made from one or more run folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

import pandas as pd

from ...harness.results.read import RunResults, read_runs
from ...workloads.errors import SloBenchError
from ..figures import sweeps
from ..figures.details import LevelDetail, level_details
from ..figures.facet_figures import Drawn, drawn, shared_bounds
from ..figures.facets import facet_noun, facets_of
from ..figures.figure import Figure, as_json
from ..figures.levels import combine, levels, offered, series_names
from ..figures.numbers import origin
from . import capacity, levels_validated, published, sections, summary
from .document import asset, page, write_page


@dataclass(frozen=True)
class _Shown:
    """All that the page shows, aggregated."""

    runs: Sequence[RunResults]
    cells: pd.DataFrame
    rows: pd.DataFrame
    details: Sequence[LevelDetail]
    names: Sequence[str]


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the report of `run_dirs` to `out`, whole or not at all, and return `out`.

    Raises SloBenchError where a run folder is incomplete or malformed or `out` cannot be written.
    """
    return write_page(_document(_gather(read_runs(run_dirs))), Path(out))


def _gather(runs: Sequence[RunResults]) -> _Shown:
    cells = combine(runs)
    if not cells["valid"].any():
        folders = ", ".join(str(run.path) for run in runs)
        raise SloBenchError(f"no cell of {folders} is valid; there is nothing to report")
    details = list(level_details(runs, cells))
    return _Shown(runs, cells, levels(cells), details, series_names(cells))


def _document(shown: _Shown) -> str:
    cells, rows, names = shown.cells, shown.rows, shown.names
    searched = capacity.found_in(shown.runs)
    known = [facet for facet in facets_of(cells) if (rows["facet"] == facet).any()]
    facets = [drawn(facet, cells, rows, shown.details, names, searched) for facet in known]
    validated = levels_validated.found_in(shown.runs, cells)
    scatters = levels_validated.scatters(validated, names)
    swept = sweeps.figures(cells, rows)
    heading = sections.title(cells)
    first = capacity.answer(searched, cells)
    bounds = shared_bounds(shown.details)
    beside = published.section(shown.runs, cells, rows)
    body = f"""
<a class="skip" href="#load">Skip to the figures</a>
<header class="top">
<p class="eyebrow">SLO report by slo-bench</p>
<h1>{escape(heading)}</h1>
{sections.facts(cells, bounds)}
{sections.notices(cells, shown.runs)}
</header>
<main>
<p class="answer">{first or summary.answer(cells, rows, names)}</p>
{summary.summary(cells, rows, shown.details, names)}
{summary.legend(cells)}
{_contents(shown, beside, facets, swept)}
{beside}
<noscript><div class="notice">The figures need JavaScript; the tables do not.</div></noscript>
{capacity.table(searched, cells)}
{_swept(cells, swept)}
{_figures(shown, facets)}
{levels_validated.section(validated, levels_validated.grid(scatters))}
<section id="setup"><h2>Numbers and setup</h2>
{sections.level_table(cells, rows, names)}{sections.setup(shown.runs)}
<details class="fold"><summary>What the terms mean</summary>\
<div class="body">{asset("definitions.html")}</div></details></section>
</main>
<footer>{escape(_footer(shown))}</footer>"""
    data = {
        "series": list(names),
        "origin": origin(cells),
        "facets": [{"rates": f.rates, "rate": f.rate, "series": f.series} for f in facets],
        **as_json(*facets, always=[*scatters, *swept]),
    }
    return page(f"{heading} – SLO report", body, data)


def _swept(cells: pd.DataFrame, swept: Sequence[Figure]) -> str:
    """What does not belong to one facet; empty where nothing of the kind was swept."""
    if not swept:
        return ""
    return (
        '<section id="sweeps"><h2>Across the sweep</h2><p class="lead">All settings together.</p>'
        f"{_grid(cells, [swept])}</section>"
    )


def _contents(shown: _Shown, beside: str, facets: Sequence[Drawn], swept: Sequence[Figure]) -> str:
    several = offered(shown.cells) == "several rates"
    links = [
        *([("published", "Published and ours")] if beside else []),
        *([("sweeps", "Across the sweep")] if swept else []),
        *([("facets", f"Every {facet_noun(shown.cells)}")] if len(facets) > 1 else []),
        ("load", "Against load" if several else "Side by side"),
        ("rate-section", "At one rate" if several else "In detail"),
        ("worth", "Efficiency and cost"),
        ("setup", "Numbers and setup"),
    ]
    listed = "".join(f'<a href="#{place}">{escape(text)}</a>' for place, text in links)
    return f'<nav class="contents" aria-label="Contents">{listed}</nav>'


def _figures(shown: _Shown, facets: Sequence[Drawn]) -> str:
    """The figures by section, those of all facets first, and what chooses facet and rate."""
    grid = partial(_grid, shown.cells)
    if offered(shown.cells) == "several rates":
        load = (
            "Against load",
            "How each system holds up as the offered rate grows. Click a name in a legend to hide "
            "or show it in every figure.",
        )
        detail = ("At one rate", "")
    else:
        load = ("Side by side", "Every system under the same load.")
        detail = (
            "In detail",
            '<p class="lead">How latencies spread, and what filled the time.</p>',
        )
    found = grid([of.capacity for of in facets])
    parts = [
        _all_facets(shown, facets),
        '<div class="faceted">' if len(facets) > 1 else "<div>",
        _facet_bar(shown, facets),
        f'<section id="capacity-figure">{found}</section>' if found else "",
        f'<section id="load"><h2>{load[0]}</h2><p class="lead">{load[1]}</p>'
        f"{grid([of.load for of in facets])}</section>",
        f'<section id="rate-section"><h2>{detail[0]}</h2>{detail[1]}'
        f"{_rate_bar(facets[0])}{grid([of.detail for of in facets])}</section>",
        f'<section id="worth"><h2>Efficiency and cost</h2>{_cost_lead(facets)}'
        f"{grid([of.worth for of in facets])}</section></div>",
    ]
    return "".join(parts)


def _all_facets(shown: _Shown, facets: Sequence[Drawn]) -> str:
    """The first figure of every facet, small, side by side."""
    if len(facets) == 1:
        return ""
    noun = facet_noun(shown.cells)
    panels = "".join(sections.panel(of.load[0], place, of.label) for place, of in enumerate(facets))
    shared = facets[0].load[0]
    legend = '<div class="legend" data-legend></div>' if shared.kind == "lines" else ""
    return (
        f'<section id="facets"><h2>Every {noun}</h2><p class="lead">{escape(shared.title)}. Choose '
        f'a {noun} for the figures below.</p>{legend}<div class="panels">{panels}</div></section>'
    )


def _facet_bar(shown: _Shown, facets: Sequence[Drawn]) -> str:
    if len(facets) == 1:
        return ""
    noun = facet_noun(shown.cells)
    options = [(str(place), of.label) for place, of in enumerate(facets)]
    return _bar("facet", noun.capitalize(), f"Previous {noun}", f"Next {noun}", options, "0")


def _rate_bar(of: Drawn) -> str:
    """What chooses the rate; nothing where every series has one level."""
    if not of.rates:
        return ""
    why = (
        '<span class="why">first shown: the lowest rate at which the median system is under 90 % '
        "(else the highest)</span>"
    )
    return _bar("rate", "Rate", "Lower rate", "Higher rate", of.rates, of.rate, why)


def _bar(
    name: str,
    label: str,
    back: str,
    on: str,
    options: Sequence[tuple[str, str]],
    chosen: str,
    why: str = "",
) -> str:
    """A selector with steps to both sides, which stays in sight."""
    listed = "".join(
        f'<option value="{escape(key)}"{" selected" if key == chosen else ""}>{escape(text)}'
        "</option>"
        for key, text in options
    )
    return (
        f'<div class="choicebar {name}bar"><label for="{name}">{escape(label)}</label>'
        f'<button type="button" aria-label="{escape(back)}">←</button>'
        f'<select id="{name}" aria-label="{escape(label)}">{listed}</select>'
        f'<button type="button" aria-label="{escape(on)}">→</button>{why}</div>'
    )


def _grid(cells: pd.DataFrame, in_facets: Sequence[Sequence[Figure]]) -> str:
    """The frames of figures, each once; a facet that lacks one leaves it empty."""
    once = {figure.id: figure for of_facet in in_facets for figure in of_facet}
    if not once:
        return ""
    return f'<div class="grid">{"".join(sections.figure(f, cells) for f in once.values())}</div>'


def _cost_lead(facets: Sequence[Drawn]) -> str:
    if any(figure.id == "cost" for of in facets for figure in of.worth):
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
