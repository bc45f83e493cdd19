"""Published results beside ours, row by row, with the reason where they differ.

An experiment names its table: `published = "uellm"` is `uellm.toml` in the folder `published`
here, `published = "mine.toml"` a file. A table is

    title = "UELLM, Fig. 3-5"
    note = "One paragraph."
    [[row]]
    what = "Requests within SLO, S³"
    published = 51.8                     # a number, or text such as "1.92–4.98"
    unit = "%"
    column = "attainment"                # of cells.csv; without it the row was not run
    scale = 100                          # ours is the mean of the column times this
    where = { system = "s3", rate_rps = "knee" }   # columns that choose the rows averaged;
                                         # "" chooses those without a value, as of another's
                                         # parameter
    than = { system = "fifo" }           # compare with these instead (the rest as in `where`) …
    by = "ratio"                         # … as a `ratio`, `reduction` (1 - ratio) or `difference`
    reason = "Why they differ."

From five seeds on our figure has its 95 % interval: what is compared is compared seed by seed.
The knee is the lowest rate at which the median system is under 90 %.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...harness.experiments.config.experiment_file import read_toml
from ...harness.results.read import RunResults
from ...tuner.capacity.curve import student_t
from ...workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from ...workloads.parsing import parse_toml
from ..figures.levels import knee_rps, level_rates

SHIPPED = Path(__file__).parent / "published"
_COMPARISONS = ("ratio", "reduction", "difference")
_LEAST_SEEDS = 5  # for an interval

MANY_ROWS = 20
"""A longer table scrolls in a window of its own, so that what follows stays near."""

Choice = Mapping[str, str | float | bool]


@dataclass(frozen=True)
class PublishedRow:
    """One published figure, and which of ours stands beside it."""

    what: str
    published: float | str
    unit: str = ""
    column: str | None = None
    scale: float = 1.0
    where: Choice = dataclasses.field(default_factory=dict)
    than: Choice | None = None
    by: str = "ratio"
    reason: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """Published values of one paper."""

    title: str
    rows: tuple[PublishedRow, ...]
    note: str = ""


def load_published(name: str) -> PublishedTable:
    """The shipped table of that name, or the one in a file.

    Raises:
        UnknownNameError: no table of that name is shipped.
        FileFormatError: the file cannot be read or holds no such table.
    """
    path = Path(name) if name.endswith(".toml") else SHIPPED / f"{name}.toml"
    known = {found.stem for found in SHIPPED.glob("*.toml")}
    if not name.endswith(".toml") and name not in known:
        raise UnknownNameError("table of published results", name, known)
    table, _ = read_toml(path)
    raw = table.get("row")
    if not isinstance(table.get("title"), str) or not isinstance(raw, list) or not raw:
        raise FileFormatError(path, None, "a published table needs a title and [[row]]s")
    rows = tuple(_row(path, number, fields) for number, fields in enumerate(raw, start=1))
    return PublishedTable(str(table["title"]), rows, str(table.get("note", "")))


def _row(path: Path, number: int, fields: object) -> PublishedRow:
    known = {f.name for f in dataclasses.fields(PublishedRow)}
    if not isinstance(fields, dict) or not {"what", "published"} <= set(fields):
        raise FileFormatError(path, None, f"row {number} needs `what` and `published`")
    strangers = set(fields) - known
    if strangers:
        problem = UnknownNameError(f"key of row {number}", min(strangers), known)
        raise FileFormatError(path, None, str(problem))
    row = PublishedRow(**fields)
    if row.by not in _COMPARISONS:
        options = ", ".join(_COMPARISONS)
        raise FileFormatError(path, None, f"row {number}: by must be {options} but is {row.by!r}")
    return row


def ours(row: PublishedRow, cells: pd.DataFrame, knee: float) -> float | None:
    """Our figure for a row; None where no valid cell of `cells` is what it asks for.

    Args:
        row: what was published.
        cells: rows of cells.csv of one or more systems.
        knee: the rate that `rate_rps = "knee"` stands for.
    """
    found = _mean(row, cells, row.where, knee)
    if found is None or row.than is None:
        return None if found is None else found * row.scale
    other = _mean(row, cells, {**row.where, **row.than}, knee)
    if other is None:
        return None
    if row.by == "difference":
        return (found - other) * row.scale
    if not other:
        return None
    ratio = found / other
    return (ratio if row.by == "ratio" else 1 - ratio) * row.scale


def half_interval(row: PublishedRow, cells: pd.DataFrame, knee: float) -> float | None:
    """Half of the 95 % interval of `ours` over seeds, by Student's t; None with fewer than five."""
    by_seed = [ours(row, of_seed, knee) for _, of_seed in cells.groupby("seed")]
    known = [value for value in by_seed if value is not None and math.isfinite(value)]
    if len(known) < _LEAST_SEEDS:
        return None
    return student_t(0.975, len(known) - 1) * float(np.std(known, ddof=1)) / math.sqrt(len(known))


def _mean(row: PublishedRow, cells: pd.DataFrame, where: Choice, knee: float) -> float | None:
    if row.column not in cells.columns:
        return None
    chosen = cells["valid"].astype(bool)
    for column, wanted in where.items():
        if column not in cells.columns:
            return None
        if column == "rate_rps":
            chosen &= _equal(level_rates(cells), knee if wanted == "knee" else wanted)
        else:
            chosen &= _equal(cells[column], wanted)
    values = cells.loc[chosen, row.column].dropna()
    return float(values.mean()) if len(values) else None


def _equal(column: pd.Series, value: str | float | bool) -> pd.Series:
    """Sweep axes are words in a run folder: numbers there are compared as numbers."""
    if value == "":
        return column.isna() | (column.astype(str) == "")
    if isinstance(value, bool | str):
        return column.astype(str).str.lower() == str(value).lower()
    return (pd.to_numeric(column, errors="coerce") - value).abs() <= 1e-3 * abs(value)


def tables_of(
    runs: Sequence[RunResults], cells: pd.DataFrame, rows: pd.DataFrame
) -> list[dict[str, Any]]:
    """The tables that the runs' experiments name, as the page lays them out, or their problems.

    Args:
        runs: the run folders; `cells["folder"]` is a run's place among them.
        cells: all their cells.
        rows: the levels of those cells.
    """
    found: list[dict[str, Any]] = []
    for place, run in enumerate(runs):
        try:
            name = parse_toml(run.experiment_toml).get("published")
            if name is not None:
                table = load_published(str(name))
                found.append(_shown(table, cells[cells["folder"] == place], knee_rps(rows)))
        except tomllib.TOMLDecodeError:
            continue  # the report shows the file as it is
        except SloBenchError as error:
            found.append({"problem": str(error)})
    return found


def _shown(table: PublishedTable, cells: pd.DataFrame, knee: float) -> dict[str, Any]:
    """A reason that several rows after one another share stands once beside them."""
    at_knee = any(
        "knee" in (row.where.get("rate_rps"), (row.than or {}).get("rate_rps"))
        for row in table.rows
    )
    return {
        "title": table.title,
        "note": table.note,
        "knee": f"; the knee is at {knee:.3g} req/s" if at_knee else "",
        "long": len(table.rows) > MANY_ROWS,
        "groups": [
            (reason, [_shown_row(row, cells, knee) for row in rows])
            for reason, rows in itertools.groupby(table.rows, key=lambda row: row.reason)
        ],
    }


def _shown_row(row: PublishedRow, cells: pd.DataFrame, knee: float) -> dict[str, Any]:
    found = ours(row, cells, knee)
    text = "not run" if row.column is None else "–"
    if found is not None:
        sign = "+" if row.than is not None and row.by == "difference" and found > 0 else ""
        half = half_interval(row, cells, knee)
        text = sign + figure_text(found, row.unit)
        if half is not None:
            text = f"{sign}{figure_text(found, '')} ± {figure_text(half, row.unit)}"
    published = figure_text(row.published, row.unit)
    return {"what": row.what, "published": published, "ours": text, "known": found is not None}


def figure_text(value: float | str, unit: str) -> str:
    """A figure with its unit: three digits for a number, text as it is."""
    if isinstance(value, str):
        text = value
    else:
        digits = 1 if abs(value) >= 10 else 2
        text = f"{value:,.{digits}f}" if math.isfinite(value) else "–"
    return f"{text} {unit}".rstrip()
