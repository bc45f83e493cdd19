"""The report: one HTML page made from one or more run folders."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from ...harness.results.read_run import RunResults, read_runs
from ...workloads.errors import SloBenchError
from ...workloads.shown_paths import without_folders
from ..figures import figures, mechanism
from ..figures.details import LevelDetail, SloRange, level_details
from ..figures.drawing import page_data
from ..figures.facets import abbreviated, facet_noun, facets_of
from ..figures.figure import Figure, rate_key, rate_keys, rate_text
from ..figures.labels import labels, stand_alone
from ..figures.levels import (
    combine,
    has_slo,
    knee_rps,
    levels,
    measures,
    offered,
    origin,
    series_names,
)
from . import (
    all_figures_page,
    allowed,
    answers_page,
    bands_page,
    capacity_page,
    decisions_page,
    mechanisms_page,
    published,
    recovered,
    validation,
    verdicts,
    why,
    winners,
)
from .answer import answer
from .document import PlotlyJs, asset, page, write_page
from .slo_text import slo_of_runs, slo_text
from .summary_page import (
    CUT,
    FEW,
    OVERLOADED_NOTE,
    STARTED_TOGETHER,
    best_table,
    cut_answers_text,
    few_requests_text,
    invalid_reason,
    level_table,
    overloaded_levels_text,
    oversize_text,
    shared_cores_text,
    started_together_text,
    truncated_text,
    unfitted_pairs,
    unplaced_text,
)

MANY = 4
"""Largest number of values listed in the page's title; more are counted."""


def write_report(run_dirs: Sequence[Path], out: Path, *, plotly: PlotlyJs = "inline") -> Path:
    """Write the report of `run_dirs` to `out`, whole or not at all, and return `out`.

    Args:
        run_dirs: the run folders.
        out: where it is written.
        plotly: where the page has plotly.js from: itself (no network is needed), a content
            delivery network (a smaller file), or a file beside it.

    Raises:
        SloBenchError: a run folder is incomplete or malformed, or `out` cannot be written.
    """
    return write_page(_document(read_runs(run_dirs), plotly), Path(out))


def _document(runs: Sequence[RunResults], plotly: PlotlyJs) -> str:
    cells = combine(runs)
    if not cells["valid"].any():
        folders = ", ".join(str(run.path) for run in runs)
        raise SloBenchError(f"no cell of {folders} is valid; there is nothing to report")
    rows, names = levels(cells), series_names(cells)
    details = list(level_details(runs, cells))
    bounds = shared_bounds(details)
    searched = capacity_page.found_in(runs)
    measured_facets = [facet for facet in facets_of(cells) if (rows["facet"] == facet).any()]
    facets = [drawn(facet, cells, rows, details, names, searched) for facet in measured_facets]
    validated = validation.found_in(runs, cells)
    scatters = validation.scatters(validated, names)
    swept = figures.sweeps(cells, rows)
    badge = _badge(cells)
    data = {
        **page_data(names, origin(cells), *facets, always=[*scatters, *swept]),
        "facets": [{"rates": f.rates, "rate": f.rate, "series": f.series} for f in facets],
    }
    parts: dict[str, Any] = {
        part: _once(facets, part) for part in ("capacity", "load", "detail", "worth")
    }
    return page(
        "run.html",
        data,
        plotly=plotly,
        heading=_title(cells),
        facts=_facts(cells, bounds, runs),
        notices=_notices(cells, rows, runs),
        answer=_headline(
            capacity_page.answer(searched, cells) or answer(cells, rows, names), cells
        ),
        summary=None
        if capacity_page.only_searches(searched, runs)
        else best_table(cells, rows, details, names, badge),
        why=why.shown([reason for reason in why.reasons(runs, cells) if not reason.is_tie]),
        names=abbreviated(cells),
        badge=badge,
        noun=facet_noun(cells),
        several=offered(cells) == "several rates",
        published=published.tables_of(runs, cells, rows),
        verdict_rules=verdicts.RULES,
        capacities=capacity_page.table(searched, cells),
        swept=swept,
        facets=facets,
        choices=[(str(place), facet.label) for place, facet in enumerate(facets)],
        **parts,
        validation=validation.shown(validated),
        scatters=scatters,
        allowed=allowed.table_of(runs),
        level_table=level_table(cells, rows, names, badge),
        all_figures=all_figures_page.table(cells, rows, names, badge),
        meanings=all_figures_page.meanings(rows),
        best=winners.table(cells, names, badge),
        bands=bands_page.table(cells, names, badge),
        recovered=recovered.table(cells, badge),
        mechanisms=mechanisms_page.table(cells, rows, names, badge),
        decisions=decisions_page.table(cells, names, badge),
        decisions_beside=decisions_page.beside_table(decisions_page.simulated_in(runs), badge),
        setup=[_setup(run, f" of {run.name}" if len(runs) > 1 else "") for run in runs],
        terms=asset("definitions.html"),
        footer=_footer(cells, runs),
    )


def _headline(answer: Markup, cells: pd.DataFrame) -> Markup:
    """The answer, and which policies were never asked."""
    return Markup(" ").join([answer, *decisions_page.never_asked(cells)])


def _once(facets: Iterable[Drawn], part: str) -> list[Figure]:
    """The figures of a section, each once; a facet that lacks one leaves its frame empty."""
    return list({figure.id: figure for facet in facets for figure in getattr(facet, part)}.values())


def _badge(cells: pd.DataFrame) -> str:
    """Return the badge with the source of the numbers, for every figure and table."""
    unfitted = (cells["step_time"] == "unfitted").any() and origin(cells) != "measured"
    return origin(cells) + " · unfitted" * bool(unfitted)


def _listed(values: Iterable[object], plural: str) -> str:
    """Return the values as `a, b`, or their number as `12 models`."""
    distinct = list(dict.fromkeys(str(v) for v in values if str(v)))
    return ", ".join(distinct) if len(distinct) <= MANY else f"{len(distinct)} {plural}"


def _title(cells: pd.DataFrame) -> str:
    """Return the page title: model, GPU and workload."""
    where = f"{_listed(cells['model'], 'models')} on {_listed(cells['gpu'], 'GPUs')}"
    workloads = list(dict.fromkeys(cells["workload"]))
    if not stand_alone(workloads):
        return f"{where}, {len(workloads)} workloads"
    return f"{where}, {_listed(labels(workloads).values(), 'workloads')}"


def _facts(
    cells: pd.DataFrame, bounds: Mapping[str, SloRange], runs: Sequence[RunResults]
) -> list[str]:
    """Return the size of the run and its SLO."""
    series, systems = cells["series"].nunique(), cells["system"].nunique()
    facets = cells["facet"].nunique()
    return [
        _counted(systems, "system"),
        *([_counted(series, "configuration")] if series > systems else []),
        *([_counted(facets, facet_noun(cells))] if facets > 1 else []),
        _rates(cells),
        _counted(cells["seed"].nunique(), "seed"),
        f"{int(cells['requests'].sum()):,} requests",
        *([] if set(cells["gpu"]) == {"cpu"} else [_gpus(cells)]),
        *([f"SLO: {slo_text(bounds) or slo_of_runs(runs)}"] if has_slo(cells) else ["no SLO"]),
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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


_ROOM, _MISSED = "the context or the KV cache", "they count as missed."


def _notices(
    cells: pd.DataFrame, rows: pd.DataFrame, runs: Sequence[RunResults]
) -> list[tuple[str, str]]:
    """Return the notices above the results: simulated, unfitted, invalid."""
    simulated = int((cells["backend"] == "simulated").sum())
    which = ("All" if simulated == len(cells) else "Some") if simulated else ""
    invalid = cells[~cells["valid"]]
    left_out = f"{len(invalid)} of {len(cells)}" if len(invalid) else ""
    without = ", ".join(run.name for run in runs if not run.keeps_requests)
    together = ", ".join(run.name for run in runs) if len(runs) > 1 else ""
    # Of each a title, what is empty where there is nothing to say, and the rest of the sentence.
    notices = [
        (
            "Simulated.",
            which,
            " numbers on this page come from a simulator with a step-time model, not from a "
            "running server.",
        ),
        (
            "Unfitted step times.",
            unfitted_pairs(cells),
            ": an analytic estimate, not fitted to measurements. Compare systems with it; do not "
            "size a deployment by it.",
        ),
        *(("Unfinished.", run.unfinished, ".") for run in runs),
        (
            "Invalid cells.",
            left_out,
            f" are left out of every figure and mean: {_listed(invalid['cell'], 'cells')}. "
            f"Reason of the first: {invalid_reason(invalid)}.",
        ),
        ("Few requests.", few_requests_text(cells), f": {FEW}."),
        ("Overloaded.", overloaded_levels_text(rows), f". {OVERLOADED_NOTE}"),
        ("Mechanisms that never acted.", " ".join(mechanisms_page.silent(cells)), ""),
        ("Decisions.", " ".join(decisions_page.sentences(cells)), ""),
        ("Equal results.", " ".join(mechanisms_page.equal_results(cells)), ""),
        ("One machine.", shared_cores_text(cells), "."),
        ("Truncated.", truncated_text(cells), f" were shortened to fit {_ROOM}."),
        ("Too long.", oversize_text(cells), f" exceed {_ROOM}; {_MISSED}"),
        ("Models on no GPU.", unplaced_text(cells), "; all their requests are missed."),
        ("Failed requests.", answers_page.failed_text(cells), f"; {_MISSED}"),
        ("Answers.", ". ".join(answers_page.sentences(cells)), "."),
        ("Closed loop:", started_together_text(cells), STARTED_TOGETHER),
        ("Cut answers.", cut_answers_text(cells), CUT),
        (
            "No per-request records",
            without and f"were kept by {without}",
            ": distributions, causes and cost are missing.",
        ),
        (f"{len(runs)} runs together:", together, "."),
    ]
    return [(title, f"{text}{end}") for title, text, end in notices if text]


def _setup(run: RunResults, suffix: str) -> dict[str, Any]:
    """Configuration, environment and origin of the step times of one run."""
    step_times = run.environment.get("step_time")
    descriptions = {}
    for pair, about in (step_times if isinstance(step_times, Mapping) else {}).items():
        about = about if isinstance(about, Mapping) else {"provenance": about}
        fitted = "Fitted" if about.get("fitted") is True else "Unfitted"
        description = f"{fitted}. {about.get('provenance', '')}"
        descriptions[without_folders(str(pair))] = without_folders(description)
    environment = {k: _definition(v) for k, v in run.environment.items() if k != "step_time"}
    return {
        "of": suffix,
        "toml": without_folders(run.experiment_toml),
        "environment": environment,
        "step_times": descriptions,
    }


def _definition(value: object) -> str | dict[str, str]:
    if isinstance(value, str):
        return without_folders(value)
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return without_folders(shlex.join(value))
    return {"verbatim": without_folders(json.dumps(value, ensure_ascii=False, indent=1))}


def _footer(cells: pd.DataFrame, runs: Sequence[RunResults]) -> str:
    origins = [
        f"slo-bench {run.environment.get('slo_bench', '?')}, {run.environment.get('created', '?')}"
        for run in runs
    ]
    return f"Made from {len(cells):,} cells. {'; '.join(dict.fromkeys(origins))}."


_ANY_RATE = 0.0  # where every series has one level, all are shown together


@dataclass(frozen=True)
class Drawn:
    """The figures of one facet, and the rates that those of one rate can show."""

    label: str
    rates: Sequence[tuple[str, str]]  # the name of the views, and what a reader is offered
    rate: str  # the one shown first
    series: Sequence[int]  # places of those that it holds, best first
    capacity: Sequence[Figure]
    load: Sequence[Figure]
    detail: Sequence[Figure]
    worth: Sequence[Figure]

    def __iter__(self) -> Iterator[Figure]:
        return iter((*self.capacity, *self.load, *self.detail, *self.worth))


def drawn(
    facet: str,
    cells: pd.DataFrame,
    rows: pd.DataFrame,
    details: Sequence[LevelDetail],
    names: Sequence[str],
    searched: Sequence[capacity_page.Row],
) -> Drawn:
    """The figures of a facet.

    Args:
        facet: its name.
        cells: all cells of the page; what a figure is made of is the same in all facets.
        rows: the levels of all cells.
        details: the details of all levels.
        names: the series; figures speak of them by their place.
        searched: the capacities that were searched for.
    """
    rows = rows[rows["facet"] == facet]
    details = [d for d in details if d.facet == facet]
    facet_cells = cells[cells["facet"] == facet]
    bounds = shared_bounds(details)
    rates = [(rate_key(r), _rate_label(facet_cells, r)) for r in sorted(set(rows["rate_rps"]))]
    rate = rate_key(knee_rps(rows))
    capacity_figures = _present(capacity_page.figure(searched, facet_cells, names))
    several, slo = offered(cells) == "several rates", has_slo(cells)
    cost = figures.cost(details, names, compared=not several)
    if several:
        load = [
            figures.against_rate(rows, names, "attainment"),
            figures.against_rate(rows, names, "goodput_rps"),
            *(figures.latency(rows, names, m, bounds.get(m)) for m in figures.METRICS),
        ]
    else:
        latencies: list[figures.Latency] = [*figures.METRICS]
        latencies += ["e2e"] if offered(cells) == "at once" else []
        columns = [m.column for m in measures(cells) if m.column in figures.COMPARED]
        load = [
            *(figures.compared(rows, names, column) for column in columns),
            *(figures.latency_compared(rows, names, m, bounds.get(m)) for m in latencies),
        ]
        rows = rows.assign(rate_rps=_ANY_RATE)
        details = [replace(d, rate_rps=_ANY_RATE) for d in details]
        rates, rate = [], rate_key(_ANY_RATE)
    missed = [
        figures.attainment_over_time(details, names),
        figures.causes(details, names),
        figures.phases(details, names, until="first"),
        figures.phases(details, names, until="last"),
    ]
    detail = [
        *(figures.latency_distribution(details, names, m) for m in figures.METRICS),
        *(missed if slo else []),
        *(figures.over_time(details, names, c) for c in figures.STATES),
        *figures.all_classes(rows, names, slo=slo),
        *mechanism.figures(details, names),
    ]
    worth = [figures.efficiency(rows, names), *_present(cost)]
    series = [place for place, name in enumerate(names) if (facet_cells["series"] == name).any()]
    return Drawn(facet, rates, rate, series, capacity_figures, load, detail, worth)


def shared_bounds(details: Iterable[LevelDetail]) -> dict[str, SloRange]:
    """The least and the largest bound of each kind that requests carried."""
    bounds: dict[str, SloRange] = {}
    for detail in details:
        for name, bound in detail.bounds.items():
            old = bounds.get(name, bound)
            bounds[name] = SloRange(min(old.low_s, bound.low_s), max(old.high_s, bound.high_s))
    return bounds


def _rate_label(cells: pd.DataFrame, rate: float) -> str:
    """`4 req/s`, with the load or the speed that made it this rate."""
    text = f"{rate_text(rate)} req/s"
    of_rate = cells[rate_keys(cells) == rate_key(rate)]
    for column, word in (("load_factor", "load {:g}"), ("replay_speed", "{:g}× speed")):
        if column in cells.columns and cells[column].nunique() > 1:
            values = of_rate[column].dropna()
            if values.nunique() == 1:
                return f"{text} ({word.format(values.iloc[0])})"
    return text


def _present(figure: Figure | None) -> list[Figure]:
    return [] if figure is None else [figure]
