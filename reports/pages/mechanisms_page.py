"""What the mechanisms of each system did, which never acted, and systems with equal results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ...harness.core.counters import COUNT, OVERTAKES
from ..figures.facets import by_facet, by_series, facets_of
from ..figures.figure import rate_text
from .table import Cell, Table

MOST_SYSTEMS = 12
"""Systems whose counts a terminal shows; the report shows all."""

_OVERTAKES = COUNT + OVERTAKES
_NAMES = {"cell", "system", "facet", "series", "run"}


def mechanism_text(name: str) -> str:
    """`closed by threshold` for the counter or column `closed_by_threshold`."""
    return name.removeprefix(COUNT).replace("_", " ")


def counts_text(counts: Mapping[str, float]) -> str:
    """`tickets 133, offloads 27.5`, the largest first."""
    largest = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{mechanism_text(name)} {rate_text(count)}" for name, count in largest)


def _is_own(column: str) -> bool:
    """Whether a column names a cell, or belongs to one system: its counters and parameters."""
    return column in _NAMES or column.startswith(COUNT) or "." in column


def _counts(row: pd.Series[Any]) -> dict[str, float]:
    """Counters of a row that its system has."""
    return {
        str(name): float(count)
        for name, count in row.items()
        if str(name).startswith(COUNT) and not str(name).endswith(("_lo", "_hi")) and count == count
    }


def _by_system(cells: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Mean count per cell of each counter, by system."""
    columns = [c for c in cells.columns if c.startswith(COUNT)]
    means = cells.groupby("system", sort=False)[columns].mean()
    return {str(name): counts for name, row in means.iterrows() if (counts := _counts(row))}


def notes(cells: pd.DataFrame) -> list[str]:
    """Lines for a terminal: counts of each system, then what the headline says."""
    acted = {
        name: {counter: mean for counter, mean in counts.items() if mean}
        for name, counts in _by_system(cells).items()
    }
    acting = [(name, counts) for name, counts in acted.items() if counts]
    lines = [f"{name}, per cell: {counts_text(counts)}." for name, counts in acting[:MOST_SYSTEMS]]
    if len(acting) > MOST_SYSTEMS:
        lines.append(f"Counts of {len(acting) - MOST_SYSTEMS} more systems: cells.csv and report.")
    return [*lines, *silent(cells), *equal_results(cells)]


def silent(cells: pd.DataFrame) -> list[str]:
    """A sentence for each system with a mechanism that acted in none of its cells."""
    lines = []
    for name, counts in _by_system(cells).items():
        never = [counter for counter, mean in counts.items() if not mean]
        if _OVERTAKES in never:
            lines.append(f"{name} never reordered the queue here.")
        others = ", ".join(mechanism_text(counter) for counter in never if counter != _OVERTAKES)
        if others:
            lines.append(f"{name} never did here: {others}.")
    return lines


def equal_results(cells: pd.DataFrame) -> list[str]:
    """A sentence for each group of series with the same results in every cell, value by value."""
    columns = ["facet", *(c for c in cells.columns if not _is_own(c))]
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name, series_cells in cells.groupby("series", sort=False):
        values = tuple(sorted(map(tuple, series_cells[columns].astype(str).to_numpy().tolist())))
        alike.setdefault(values, []).append(str(name))
    return [
        f"{', '.join(names[:-1])} and {names[-1]} gave equal results in every cell "
        f"({len(values)} each): the same experiment under {len(names)} names."
        for values, names in alike.items()
        if len(names) > 1
    ]


def table(cells: pd.DataFrame, rows: pd.DataFrame, names: Sequence[str], badge: str) -> Table:
    """Counts of every system at every rate, by facet; without rows where no system has any."""
    groups = []
    for facet, of_facet in by_facet(rows, facets_of(cells)).items():
        for place, name, series_rows in by_series(of_facet, names):
            lines = [
                [rate_text(float(row["rate_rps"])), counts_text(counts)]
                for _, row in series_rows.iterrows()
                if (counts := _counts(row))
            ]
            if lines:
                groups.append((Cell(name, series=place, before=facet), lines))
    return Table(
        "What the mechanisms did",
        ("Offered req/s", "Counts"),
        groups,
        (1,),
        caption="How often each mechanism acted, mean over seeds; whole run, warm-up included",
        badge=badge,
    )
