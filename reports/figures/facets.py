"""Series and facets: the columns of `cells.csv` that make curves, and those that make figures.

Systems and their setups (parameters, parallelism, routers, GPUs) are series: curves of one figure.
The conditions of a comparison (workload, model, lengths, SLO) are facets: a figure shows the series
of one facet. There are no facets if each would hold a single series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.experiments.config.setting import declared
from ...harness.results.run_columns import LEAD_COLUMNS
from .labels import is_letter, labels

IDENTITY = ("backend", "workload", "model", "gpu", "gpus")
"""Columns besides the system and the sweep axes in which rows may differ."""

SETUP = frozenset(
    {
        "variant",
        *(p for p, setting in declared(ExperimentSchema).items() if setting.role == "deployment"),
    }
)
"""Axes that describe the deployment of a system; parameters (`system.parameter`) count as such.
"""

MOST_SERIES = 8
"""Of a facet, as many as there are colours; where there are more, setups become facets as well."""

_BARE = ("backend", "workload", "model", "gpu", "variant")  # values that speak for themselves


@dataclass(frozen=True)
class Division:
    """The columns in which rows differ: those that make facets, and those that make series."""

    facets: tuple[str, ...]
    series: tuple[str, ...]


def axes_of(cells: pd.DataFrame) -> tuple[str, ...]:
    """The sweep axes of a cells frame: the columns before `requests` that are not always there."""
    names = list(cells.columns)
    before = names[: names.index("requests")]
    return tuple(c for c in before if c not in LEAD_COLUMNS)


def division(cells: pd.DataFrame) -> Division:
    """Which columns of a cells frame make facets, and which series."""
    columns = [c for c in (*IDENTITY, *axes_of(cells)) if c in cells.columns]
    varying = [c for c in columns if cells[c].nunique(dropna=False) > 1]
    if _follows("gpus", ["system", *(c for c in varying if c != "gpus")], cells):
        varying = [c for c in varying if c != "gpus"]
    series = [c for c in varying if c in SETUP or _is_parameter(c)]
    facets = [c for c in varying if c not in series]
    if facets and _series_in_a_facet(cells, facets, series) < 2:
        return Division((), tuple(varying))
    series = [c for c in series if c == "backend" or not _follows(c, facets, cells)]
    if "variant" in series:
        settled = [*facets, "variant"]
        series = [c for c in series if c in settled or not _follows(c, settled, cells)]
    for column in [c for c in series if c != "backend" and not _is_parameter(c)]:
        if _series_in_a_facet(cells, facets, series) <= MOST_SERIES:
            break
        fewer = [c for c in series if c != column]
        if _series_in_a_facet(cells, [*facets, column], fewer) > 1:
            facets, series = [*facets, column], fewer
    return Division(tuple(facets), tuple(series))


def _is_parameter(column: str) -> bool:
    return "." in column


def _follows(column: str, others: Sequence[str], cells: pd.DataFrame) -> bool:
    """Whether the other columns settle this one."""
    if not others:
        return False
    settled = cells.groupby(list(others), dropna=False)[column].nunique(dropna=False)
    return bool((settled == 1).all())


def _series_in_a_facet(cells: pd.DataFrame, facets: Sequence[str], series: Sequence[str]) -> int:
    """Largest number of series in one facet."""
    distinct = cells[["system", *facets, *series]].drop_duplicates()
    if not facets:
        return len(distinct)
    return int(distinct.groupby(list(facets), dropna=False).size().max())


def with_facets(cells: pd.DataFrame) -> pd.DataFrame:
    """`cells` with their `facet` (empty where there is one only) and their `series` in it, facets
    in the order of their settings, the first setting outermost.
    """
    split = division(cells)
    if split.facets:
        ranks = pd.DataFrame({c: pd.factorize(cells[c])[0] for c in split.facets})
        cells = cells.iloc[ranks.sort_values(list(split.facets), kind="stable").index]
    cells = cells.reset_index(drop=True)
    facet = pd.Series("", index=cells.index, dtype="str")
    for column in split.facets:
        part = cells[column].map(_texts(column, cells))
        facet = facet + part.where(facet == "", " · " + part)
    series = cells["system"].astype("str")
    if "variant" in split.series and _follows("system", ["variant"], cells):
        series = pd.Series("", index=cells.index, dtype="str")
    for column in split.series:
        owner = column.rpartition(".")[0]
        part = cells[column].map(_texts(column, cells)).astype("str")
        if _is_parameter(column):
            part = part.where(cells["system"] == owner, "")
        shown = ~_blank(cells[column]) & (part != "")
        series += (" · " + part).where(shown & (series != ""), part).where(shown, "")
    if "run" in cells.columns and (cells["run"].groupby([facet, series]).nunique() > 1).any():
        series = series + " · " + cells["run"]
    return cells.assign(facet=facet, series=series)


def _blank(values: pd.Series) -> pd.Series[bool]:
    return values.isna() | (values == "")


def _texts(column: str, cells: pd.DataFrame) -> Callable[[object], str]:
    """A function from a value of a column to its text in the names of facets and series."""
    label_of = _labels(column, cells)

    def text(value: object) -> str:
        if value is None or value == "" or value != value:
            return f"no {column}"
        label = label_of[_full(value)]
        if column in _BARE and not is_letter(label):
            return label
        return f"{column.rpartition('.')[2]} {label}"

    return text


def _labels(column: str, cells: pd.DataFrame) -> dict[str, str]:
    values = cells.loc[~_blank(cells[column]), column].unique()
    return labels([_full(value) for value in values])


def _full(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def abbreviated(cells: pd.DataFrame) -> dict[str, str]:
    """Abbreviations in the names of facets and series: part of the name → whole setting."""
    split = division(cells)
    abbreviations = {}
    for column in (*split.facets, *split.series):
        name = _texts(column, cells)
        for value in cells.loc[~_blank(cells[column]), column].unique():
            if _labels(column, cells)[_full(value)] != _full(value):
                abbreviations[name(value)] = _full(value)
    return abbreviations


def facet_noun(cells: pd.DataFrame) -> str:
    """Noun for a facet: `workload`, `model`, else `case`."""
    facets = division(cells).facets
    return facets[0] if facets in (("workload",), ("model",)) else "case"


def facets_of(cells: pd.DataFrame) -> list[str]:
    """Names of the facets, in the order of the cells."""
    return list(dict.fromkeys(cells["facet"]))


def full_names(cells: pd.DataFrame) -> pd.Series[str]:
    """Facet and series in one, for where all stand together."""
    return cells["series"].where(cells["facet"] == "", cells["facet"] + " · " + cells["series"])


def by_series(rows: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[int, str, pd.DataFrame]]:
    """Place, name and rows of each of the named series that has rows."""
    for place, name in enumerate(names):
        series_rows = rows[rows["series"] == name]
        if len(series_rows):
            yield place, name, series_rows


def by_facet(rows: pd.DataFrame, facets: Sequence[str]) -> Mapping[str, pd.DataFrame]:
    """Level rows or cells of each facet, by its name."""
    return {facet: rows[rows["facet"] == facet] for facet in facets}
