"""Every figure of every level, for the report: what stands in `cells.csv`, as means over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from ...harness.results.metrics import figure_of
from ..figures.facets import by_facet, facets_of
from ..figures.figure import form_text, rate_text
from .table import Row, Table

_OF_OTHER_TABLES = ("band_", "seeds")  # beginnings of columns


def shown(rows: pd.DataFrame) -> list[str]:
    """The columns of the levels that the table has: those with a value other than 0."""
    return [
        column
        for column in rows.select_dtypes("number").columns
        if column != "rate_rps"
        and not column.startswith(_OF_OTHER_TABLES)
        and not column.endswith(("_lo", "_hi"))
        and rows[column].fillna(0).any()
    ]


def table(cells: pd.DataFrame, rows: pd.DataFrame, names: Sequence[str], badge: str) -> Table:
    """Every system at every rate, by facet."""
    columns = shown(rows)
    forms = [figure.form if (figure := figure_of(c)) else "number" for c in columns]
    groups: list[tuple[str, list[Row]]] = []
    for facet, of_facet in by_facet(rows, facets_of(cells)).items():
        for name in names:
            lines: list[Row] = [
                [
                    rate_text(float(level["rate_rps"])),
                    *(
                        form_text(form, float(level[column]))
                        if math.isfinite(level[column])
                        else "–"
                        for column, form in zip(columns, forms, strict=True)
                    ),
                ]
                for _, level in of_facet[of_facet["series"] == name].iterrows()
            ]
            if lines:
                groups.append((f"{facet}: {name}" if facet else name, lines))
    return Table(
        "All figures",
        ("req/s", *columns),
        groups,
        names=columns,
        caption="Columns of cells.csv with a value other than 0, means over seeds",
        badge=badge,
    )


def meanings(rows: pd.DataFrame) -> dict[str, str]:
    """Unit and meaning of the figures in the table, by column."""
    declared = {column: figure for column in shown(rows) if (figure := figure_of(column))}
    return {c: f"{figure.help} ({figure.unit or 'no unit'})" for c, figure in declared.items()}
