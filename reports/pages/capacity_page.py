"""Capacity searches: what `slo-bench capacity` prints, and their section of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from ...harness.results.read_run import RunResults
from ...tuner.capacity.capacity_checkpoint import read_capacity
from ...tuner.capacity.search_options import SearchOutcome
from ..figures.facets import facet_noun, facets_of
from ..figures.figure import ONLY, Axis, Figure, View, curve, rate_text
from .answer import strong
from .table import Cell, Table

Row = Mapping[str, Any]

UNDECIDED = SearchOutcome.UNDECIDED.value
HEADS = ("configuration", "in SLO", "req/s", "sampling, 95 % interval", "likely in reality")


def capacity_cells(row: Row, name: str) -> list[str | Cell]:
    """Texts of one result in the order of `HEADS`."""
    return [
        name,
        f"≥ {row['target']:g}",
        Cell(capacity_text(row), style="bold"),
        interval_text(row) + " (faults)" * bool(row.get("faults_decide")),
        band_text(row),
    ]


def capacity_text(row: Row) -> str:
    """`6.42`; `> 12` where no rate tried missed the target, `< 0.5` where all did; `undecided`."""
    if row.get("outcome") == UNDECIDED:
        return UNDECIDED
    if row["capacity_rps"] is None:
        return f"> {rate_text(row['low_rps'])}"
    if row["capacity_rps"] == 0:
        return f"< {rate_text(row['high_rps'])}"
    return rate_text(row["capacity_rps"])


def interval_text(row: Row) -> str:
    """`6.31 to 6.55`; of an undecided search `over 6.31`; a dash where there is none."""
    if row.get("outcome") == UNDECIDED and (row["low_rps"] or row["high_rps"]):
        over = f"over {rate_text(row['low_rps'])}" if row["low_rps"] else ""
        under = f"under {rate_text(row['high_rps'])}" if row["high_rps"] else ""
        return ", ".join(filter(None, (over, under)))
    if not row["capacity_rps"]:
        return "–"
    return f"{rate_text(row['low_rps'])} to {rate_text(row['high_rps'])}"


def band_text(row: Row) -> str:
    """`5.1 to 7.9`: the prediction band; an end that no rate tried reached is left out."""
    low, high = row.get("band_low_rps"), row.get("band_high_rps")
    if low is not None and high is not None:
        return f"{rate_text(low)} to {rate_text(high)}"
    if low is not None:
        return f"from {rate_text(low)}"
    return "–" if high is None else f"up to {rate_text(high)}"


def found_in(runs: Sequence[RunResults]) -> list[Row]:
    """The capacities of all searches in the runs; each row also says its `folder`."""
    return [
        {**row, "folder": position}
        for position, run in enumerate(runs)
        for row in read_capacity(run.path) or ()
    ]


def only_searches(rows: Sequence[Row], runs: Sequence[RunResults]) -> bool:
    """Whether all runs are searches, whose levels are too short, or too few, for their means."""
    return len({row["folder"] for row in rows}) == len(runs)


def figure(rows: Sequence[Row], cells: pd.DataFrame, names: Sequence[str]) -> Figure | None:
    """Attainment against rate, all runs of a rate together, with the capacities; None without."""
    searches: dict[tuple[int, str], Row] = {}
    for row in rows:
        searches.setdefault((row["folder"], row["search"]), row)
    curves: list[View] = []
    for row in searches.values():
        place = _place(row, cells)
        levels = [level for level in row["levels"] if level["attainment"] is not None]
        if place is not None:
            columns = ("rate_rps", "attainment", "attainment_low", "attainment_high")
            x, y, low, high = ([level[name] for level in levels] for name in columns)
            curves.append(curve(list(names).index(place[1]), x, y, lo=low, hi=high))
    if not curves:
        return None
    targets = sorted({row["target"] for row in rows})
    lines = [{"axis": "y", "value": t, "label": f"{t:.6g}"} for t in targets]
    if len(curves) == 1:
        lines += [
            {"axis": "x", "value": row["capacity_rps"], "label": f"{row['target']:g}"}
            for row in rows
            if row["capacity_rps"]
        ]
    return Figure(
        id="capacity",
        title="Capacity",
        note="Share of requests in SLO in the long run: all runs of a rate together, without their "
        "start and end. Band: 95 % interval, requests of a run taken as correlated.",
        x=Axis("offered rate, req/s", "rate"),
        y=Axis("requests in SLO", "percent", top=1.0),
        views={ONLY: {"series": curves, "lines": lines}},
    )


def _place(row: Row, cells: pd.DataFrame) -> tuple[str, str] | None:
    """The facet and the series of a search: what the page calls its cells."""
    searched = cells[search_cells(row, cells)]
    if searched.empty:
        return None
    return str(searched["facet"].iloc[0]), str(searched["series"].iloc[0])


def search_cells(row: Row, cells: pd.DataFrame) -> pd.Series[bool]:
    """Which cells are runs of the search of a row."""
    in_search = cells["cell"].str.startswith(f"{row['search']}_rate-")
    searched: pd.Series[bool] = in_search & (cells["folder"] == row.get("folder", 0))
    return searched


def answer(rows: Sequence[Row], cells: pd.DataFrame) -> Markup | None:
    """The page's one sentence, where every series was searched; None where the page must tell."""
    least = min((row["target"] for row in rows), default=None)
    placed = [(place, row) for row in rows if (place := _place(row, cells)) is not None]
    every = set(zip(cells["facet"], cells["series"], strict=True))
    if not rows or len(placed) < len(rows) or {place for place, _ in placed} != every:
        return None
    if any(row["target"] == least and row["capacity_rps"] is None for row in rows):
        return None
    best: dict[str, tuple[str, Row]] = {}
    for (facet, series), row in placed:
        if row["target"] == least and row["capacity_rps"]:
            ahead = best.setdefault(facet, (series, row))[1]
            if row["capacity_rps"] > ahead["capacity_rps"]:
                best[facet] = series, row
    if not best:
        return None
    percent = f"{least:.6%}".rstrip("%").rstrip("0").rstrip(".")
    share = f"with at least {percent}\xa0% of requests in their SLO"
    facets = facets_of(cells)
    if len(facets) == 1:
        name, only = best[facets[0]]
        return Markup(
            "<strong>{}</strong> carries <strong>{} req/s</strong> (95\xa0% interval {}) {}."
        ).format(name, rate_text(only["capacity_rps"]), interval_text(only), share)
    ahead_in = Counter(series for series, _ in best.values())
    leaders = [
        Markup("{} in {}").format(strong(name), strong(f"{count} of {len(facets)}"))
        for name, count in ahead_in.most_common()
    ]
    return Markup("The most load {} is carried by {} {}s.").format(
        share, Markup(", by ").join(leaders), facet_noun(cells)
    )


def table(rows: Sequence[Row], cells: pd.DataFrame) -> Table | None:
    """The report's table of the capacities by facet; nothing where no run was a search."""
    if not rows:
        return None
    groups: dict[str, list[list[str | Cell]]] = {facet: [] for facet in facets_of(cells)}
    ends = [row[name] or 0.0 for row in rows for name in ("capacity_rps", "high_rps")]
    top = max(*ends, *(row.get("band_high_rps") or 0.0 for row in rows))
    for row in rows:
        facet, series = _place(row, cells) or ("", str(row["search"]))
        name, share, capacity, *others = capacity_cells(row, series)
        more = (f"{row['requests_spent']:,}", str(row["stopped"]))
        barred = replace(capacity, **_bar(row, top)) if isinstance(capacity, Cell) else capacity
        groups.setdefault(facet, []).append([name, share, barred, *others, *more])
    heads = (*HEADS, "requests spent", "stopped because")
    filled = [(facet, of_facet) for facet, of_facet in groups.items() if of_facet]
    caption = "Highest rate at which at least a share of all requests meets its SLO for as long as "
    caption += "it is offered. Line over the bar: 90\xa0% prediction band, else 95\xa0% interval"
    return Table("Capacity", heads, filled, caption=caption)


def _bar(row: Row, top: float) -> dict[str, Any]:
    """Of a cell the bar of its capacity, where `top` is 100 %, with the band or the interval."""
    if not row["capacity_rps"] or not top:
        return {}
    ends = ("band_low_rps", "band_high_rps")
    if any(row.get(end) is None for end in ends):
        ends = ("low_rps", "high_rps")
    low, high = (row[end] for end in ends)
    on_bar = (100 * (low or 0.0) / top, 100 * (top if high is None else high) / top)
    return {"bar": 100 * row["capacity_rps"] / top, "bar_range": on_bar}
