"""Prediction bands of simulated cells: lines for the terminal, a table for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from ...harness.results.run_folder import BAND_BASIS as _BASIS
from ..figures.facets import by_facet, by_series, facets_of
from ..figures.figure import percent_text, rate_text, seconds_text
from ..figures.levels import TARGETS, highest_rate
from .table import Row, Table

_MOST_SYSTEMS = 6  # of which a terminal shows the bands
_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("ttft_p99_s", "TTFT p99", seconds_text),
    ("tpot_p99_s", "TPOT p99", seconds_text),
    ("e2e_p99_s", "E2E p99", seconds_text),
    ("attainment", "in SLO", percent_text),
    ("goodput_rps", "goodput, req/s", rate_text),
)
_NOTE = (
    "Range of 90 % of measurements whose predictions were like this one (docs/accuracy.md); seen: "
    "the same engine, GPU and model was measured."
)


def _levels(cells: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds of the banded cells, by facet, series and rate."""
    if _BASIS not in cells.columns:
        return pd.DataFrame()
    banded = cells[cells["valid"].astype(bool) & cells[_BASIS].notna() & (cells[_BASIS] != "")]
    keys = ["facet", "series", "level_rps", _BASIS]
    return banded.groupby(keys, sort=False).mean(numeric_only=True).reset_index()


def _text(row: pd.Series[Any], column: str, text: Callable[[float], str]) -> str:
    low, high = row.get(f"band_low_{column}"), row.get(f"band_high_{column}")
    if low is None or high is None or low != low or high != high:
        return "–"
    return f"{text(float(low))} to {text(float(high))}"


def notes(cells: pd.DataFrame) -> list[str]:
    """For each system a line of the highest rate that it carries, else of the lowest one."""
    rows, lines = _levels(cells), []
    for (facet, name), levels in rows.groupby(["facet", "series"], sort=False) if len(rows) else ():
        series = cells[(cells["facet"] == facet) & (cells["series"] == name)]
        carried_rps = highest_rate(series, TARGETS[0]).rate_rps
        chosen = levels[levels["level_rps"] == carried_rps]
        row = (chosen if len(chosen) else levels.sort_values("level_rps")).iloc[0]
        figures = (
            f"{head} {text(float(row[column]))}, 90 % band {_text(row, column, text)}"
            for column, head, text in (_SHOWN[0], _SHOWN[3])
        )
        rate = f" at {rate_text(float(row['level_rps']))} req/s" if row["level_rps"] else ""
        lines.append(f"{name}{rate}: {'; '.join(figures)} ({row[_BASIS]}).")
    return lines[:_MOST_SYSTEMS]


def table(cells: pd.DataFrame, names: Sequence[str], badge: str) -> Table:
    """The bands of every system at every rate; without groups where nothing was simulated."""
    rows = _levels(cells)
    groups: list[tuple[str, list[Row]]] = []
    for facet, of_facet in by_facet(rows, facets_of(cells)).items() if len(rows) else ():
        for _, name, series_rows in by_series(of_facet, names):
            lines: list[Row] = [
                [
                    rate_text(float(row["level_rps"])),
                    *(_text(row, column, text) for column, _, text in _SHOWN),
                    str(row[_BASIS]),
                ]
                for _, row in series_rows.sort_values("level_rps").iterrows()
            ]
            groups.append((f"{facet}: {name}" if facet else name, lines))
    heads = ("req/s", *(head for _, head, _ in _SHOWN), "step times")
    return Table(
        "Prediction bands (90 %)",
        heads,
        groups,
        texts=(len(heads) - 1,),
        caption="90 % bands of the simulated figures; means over seeds",
        css="long brief",
        note=_NOTE,
        badge=badge,
    )
