"""Capacity searches: what `slo-bench capacity` prints, and their section of the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ...harness.results.read_run import RunResults
from ...tuner.capacity.capacity_checkpoint import read_capacity
from ...tuner.capacity.search_options import SearchOutcome
from ..figures.facets import SETUP, facet_noun, facets_of
from ..figures.figure import ONLY, Axis, Figure, View, curve, percent_text, rate_text, seconds_text
from .answer import strong
from .answers_page import surplus_text
from .table import Cell, Table, one_group

Row = Mapping[str, Any]

UNDECIDED = SearchOutcome.UNDECIDED.value
_HEADS = ("configuration", "in SLO", "req/s", "95 % interval", "±", "90 % band")


def capacity_tables(rows: Sequence[Row]) -> RenderableType:
    """The capacities and the best of them, then for each search the levels tried and its end."""
    measured = "simulated" if all(r["backend"] == "simulated" for r in rows) else "measured"
    summary = one_group("Capacity", _HEADS, [_cells(row, row["search"]) for row in rows])
    parts: list[RenderableType] = [Text(line, style="bold") for line in failed_lines(rows)]
    parts.append(summary.rich(f"Capacity, req/s ({measured})"))
    parts += map(Text, best_lines(rows))
    for name in dict.fromkeys(str(row["search"]) for row in rows):
        row = next(row for row in rows if row["search"] == name)
        spent = f"{row['requests_spent']:,} requests, {seconds_text(row['wall_s'])}"
        ending = f"stopped after {spent}: {row['stopped']}"
        parts += [Text(), _levels(row), Text(ending, style="dim")]
    return Group(*parts)


def failed_lines(rows: Sequence[Row]) -> list[str]:
    """For each search the requests that failed other than by overload, and which of its results
    they decide; then how many answers are longer than requested.
    """
    lines = {}
    for row in rows:
        if failed := row.get("failed"):
            decided = [
                f"≥ {other['target']:g}"
                for other in rows
                if other["search"] == row["search"] and other.get("faults_decide")
            ]
            line = (
                f"{row['search']}: {failed:,} of {row['requests_spent']:,} requests failed "
                f"({row['failed_because'] or 'no reason given'})"
            )
            if decided:
                line += (
                    f"; these faults, not latency, decide the interval of {', '.join(decided)}: "
                    "the server may carry more"
                )
            lines[row["search"]] = f"{line}."
    return [*lines.values(), *dict.fromkeys(filter(None, map(_surplus_line, rows)))]


def _surplus_line(row: Row) -> str:
    surplus = surplus_text(row.get("surplus_outputs", 0), row["requests_spent"])
    return f"{row['search']}: {surplus}." if surplus else ""


def _cells(row: Row, name: str) -> list[str | Cell]:
    width = "–"
    if row["capacity_rps"]:
        width = f"{(row['high_rps'] - row['low_rps']) / 2 / row['capacity_rps']:.1%}"
    return [
        name,
        f"≥ {row['target']:g}",
        Cell(capacity_text(row), style="bold"),
        interval_text(row) + " (faults)" * bool(row.get("faults_decide")),
        width,
        band_text(row),
    ]


def best_lines(rows: Sequence[Row]) -> list[str]:
    """For each target and each set of conditions, which of several configurations carries most."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        names = list(row)[: list(row).index("target")]
        conditions = [n for n in names if n not in (*_IDENTITY, *SETUP) and "." not in n]
        key = (row["target"], *((n, row[n]) for n in conditions))
        alike.setdefault(key, []).append(row)
    lines = []
    for settled, alternatives in alike.items():
        target, pairs = settled[0], settled[1:]
        with_capacity = [
            r for r in alternatives if r["capacity_rps"] != 0 and r.get("outcome") != UNDECIDED
        ]
        if len(alternatives) < 2 or not with_capacity:
            continue
        best = max(with_capacity, key=_ahead)
        gpus = f" on {best['gpus']:g} GPUs" if best.get("gpus") else ""
        near = [
            r["search"] for r in with_capacity if r is not best and _most_rps(r) >= best["low_rps"]
        ]
        where = "".join(f", {n} {v}" for n, v in pairs) if len(alike) > 1 else ""
        lines.append(
            f"best at ≥ {target:g}{where}: {best['search']} with {capacity_text(best)} req/s{gpus}"
            + (f"; not told apart from it: {', '.join(near)}" if near else "")
        )
    return lines


def _ahead(row: Row) -> tuple[bool, float]:
    """Sort key; the greatest is that of a system that met the target at every tried rate."""
    endless = row["capacity_rps"] is None
    return endless, row["low_rps"] if endless else row["capacity_rps"]


def _most_rps(row: Row) -> float:
    """Upper bound of the capacity, in requests per second."""
    return math.inf if row["high_rps"] is None else float(row["high_rps"])


_IDENTITY = ("search", "cell", "system", "rate_rps", "replay_speed", "load_factor", "seed")


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


def _levels(row: Row) -> RichTable:
    lines = []
    for level in row["levels"]:
        has_attainment = level["attainment"] is not None
        low, high = level["attainment_low"], level["attainment_high"]
        late = level["runs"] - level["valid_runs"]
        may_pass = has_attainment and not level["backlog_grows"] and high >= row["target"]
        short = may_pass and not level.get("sustained", True)
        notes = (
            ["backlog grows"] * level["backlog_grows"]
            + ["too short to pass"] * short
            + [f"{late} invalid: {level['invalid_because']}"] * bool(late)
        )
        lines.append(
            (
                rate_text(level["rate_rps"]),
                str(level["runs"]),
                f"{level['requests']:,}",
                percent_text(level["attainment"]) if has_attainment else "–",
                f"{low:.1%} to {high:.1%}" if has_attainment else "–",
                Cell(", ".join(notes), style="yellow"),
            )
        )
    heads = ("req/s", "runs", "requests", "in SLO", "95 % interval", "")
    title = f"Levels tried: {row['search']}"
    return one_group(title, heads, lines, texts=(5,)).rich(title)


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
    in_search = cells["cell"].str.startswith(f"{row['search']}_rate-")
    search_cells = cells[in_search & (cells["folder"] == row["folder"])]
    if search_cells.empty:
        return None
    return str(search_cells["facet"].iloc[0]), str(search_cells["series"].iloc[0])


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
        name, share, capacity, *others = _cells(row, series)
        more = (f"{row['requests_spent']:,}", str(row["stopped"]))
        barred = replace(capacity, **_bar(row, top)) if isinstance(capacity, Cell) else capacity
        groups.setdefault(facet, []).append([name, share, barred, *others, *more])
    heads = (*_HEADS, "requests spent", "stopped because")
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
