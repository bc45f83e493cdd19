"""Details of runs on a terminal, for `--verbose`: every system at every rate, and all notes."""

from __future__ import annotations

from itertools import chain

import pandas as pd

from ..figures.facets import abbreviated, by_facet, facets_of
from ..figures.figure import rate_text
from ..figures.labels import is_letter
from ..figures.levels import (
    AT_A_RATE,
    divisor_text,
    levels,
    load_text,
    measures,
    offered,
    origin,
    series_names,
    with_series,
)
from ..pages import bands_page, decisions_page, mechanisms_page, recovered
from ..pages.summary_page import (
    OVERLOADED,
    OVERLOADED_NOTE,
    each_level,
    energy_text,
    overload_heads,
    overloaded_levels_text,
    shared_cores_text,
)
from .screen import Column, Group, Screen

MOST_LINES = 60
"""Longest table of all rates (rows) on a terminal; longer ones are only in the report."""


def run_details(cells: pd.DataFrame) -> list[Screen]:
    """Each system at each rate, what components are worth, and notes.

    Facets stand one below the other. Means are over the valid seeds.
    """
    cells = cells if "series" in cells.columns else with_series(cells)
    rows = levels(cells)
    several = offered(cells) == "several rates"
    screens = []
    if not several or len(rows) <= MOST_LINES:
        screens.append(_levels(cells, rows, several=several))
    worth = recovered.table(cells)
    if worth.groups:
        screens.append(worth.rich(worth.label, notes=[worth.note]))
    return [*screens, Screen(tested=(), notes=_notes(cells, rows))]


def _levels(cells: pd.DataFrame, rows: pd.DataFrame, *, several: bool) -> Screen:
    names, facets, overloaded = series_names(cells), facets_of(cells), overload_heads(rows)
    shown = AT_A_RATE if several else measures(cells)
    columns = [Column("system", words=True), *[Column("req/s")] * several]
    columns += [Column(measure.head, optional=place > 0) for place, measure in enumerate(shown)]
    columns += [Column(head, optional=True) for head in overloaded]
    groups = []
    for facet, facet_rows in by_facet(rows, facets).items():
        lines: dict[str, list[list[str]]] = {}
        for name, rate, figures in each_level(facet_rows, names, shown, overloaded):
            series_lines = lines.setdefault(name, [])
            label = "" if series_lines else name
            series_lines.append([label, *[rate_text(rate)] * several, *map(str, figures)])
        in_groups = list(lines.values()) if several else [[*chain(*lines.values())]]
        for place, group_lines in enumerate(in_groups):
            groups.append(Group(group_lines, facet if len(facets) > 1 and not place else ""))
    load = "" if several else f", {load_text(cells)}"
    return Screen(
        tested=[f"Mean over seeds{load} ({origin(cells)})"],
        columns=columns,
        groups=groups,
    )


def _notes(cells: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    notes = [divisor_text(cells)]
    if offered(cells) == "several rates" and len(rows) > MOST_LINES:
        notes.append(f"Every system at every rate, {len(rows)} lines: cells.csv and report.")
    for name, text in abbreviated(cells).items():
        if is_letter(name.rpartition(" ")[2]):  # says nothing unless it is explained
            notes.append(f"{name}: {text}")
    facts = [
        (f"{OVERLOADED}: ", overloaded_levels_text(rows), f". {OVERLOADED_NOTE}"),
        ("J per output token, lowest and highest rate: ", energy_text(rows), "."),
        ("", shared_cores_text(cells), "."),
    ]
    return [
        *notes,
        *(f"{begin}{text}{end}" for begin, text, end in facts if text),
        *bands_page.notes(cells),
        *mechanisms_page.notes(cells),
        *decisions_page.sentences(cells),
    ]
