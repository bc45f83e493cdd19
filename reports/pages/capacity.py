"""Capacity searches: what `slo-bench capacity` prints, and their section of the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...harness.results.read import RunResults
from ...tuner.capacity.checkpoint import read_capacity
from ..figures.facets import SETUP, facet_noun, facets_of
from ..figures.figure import ONLY, Axis, Figure, View
from ..figures.numbers import percent_text, rate_text, seconds_text

Row = Mapping[str, Any]


def capacity_tables(rows: Sequence[Row]) -> RenderableType:
    """The capacities and the best of them, then for each search the levels tried and its end."""
    parts: list[RenderableType] = [_capacities(rows), *map(Text, best_lines(rows))]
    for name in dict.fromkeys(str(row["search"]) for row in rows):
        row = next(row for row in rows if row["search"] == name)
        parts += [Text(), _levels(row), Text(_ending(row), style="dim")]
    return Group(*parts)


def _capacities(rows: Sequence[Row]) -> Table:
    measured = "simulated" if all(r["backend"] == "simulated" for r in rows) else "measured"
    table = Table(
        title=Text(f"Capacity, req/s ({measured})"), title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("configuration", overflow="fold")
    for head in ("in SLO", "capacity", "95 % interval", "±"):
        table.add_column(head, justify="right", no_wrap=True)
    name = None
    for row in rows:
        table.add_row(
            Text("" if row["search"] == name else str(row["search"])),
            f"≥ {row['target']:g}",
            Text(capacity_text(row), style="bold"),
            interval_text(row),
            _half_width(row),
        )
        name = row["search"]
    return table


def best_lines(rows: Sequence[Row]) -> list[str]:
    """For each target and each set of conditions, which of several configurations carries most."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        names = list(row)[: list(row).index("target")]
        conditions = [n for n in names if n not in (*_IDENTITY, *SETUP) and "." not in n]
        key = (row["target"], *((n, row[n]) for n in conditions))
        alike.setdefault(key, []).append(row)
    told = []
    for settled, of in alike.items():
        target, pairs = settled[0], settled[1:]
        known = [r for r in of if r["capacity_rps"] != 0]
        if len(of) < 2 or not known:
            continue
        best = max(known, key=_ahead)
        gpus = f" on {best['gpus']:g} GPUs" if best.get("gpus") else ""
        near = [r["search"] for r in known if r is not best and _most_rps(r) >= best["low_rps"]]
        where = "".join(f", {n} {v}" for n, v in pairs) if len(alike) > 1 else ""
        told.append(
            f"best at ≥ {target:g}{where}: {best['search']} with {capacity_text(best)} req/s{gpus}"
            + (f"; not told apart from it: {', '.join(near)}" if near else "")
        )
    return told


def _ahead(row: Row) -> tuple[bool, float]:
    """For comparing: who missed the target at no rate tried is before all others."""
    endless = row["capacity_rps"] is None
    return endless, row["low_rps"] if endless else row["capacity_rps"]


def _most_rps(row: Row) -> float:
    """What it may carry at most."""
    return math.inf if row["high_rps"] is None else float(row["high_rps"])


_IDENTITY = ("search", "cell", "system", "rate_rps", "replay_speed", "load_factor", "seed")


def capacity_text(row: Row) -> str:
    """`6.42`, `> 12` where no rate tried missed the target, `< 0.5` where all did."""
    if row["capacity_rps"] is None:
        return f"> {rate_text(row['low_rps'])}"
    if row["capacity_rps"] == 0:
        return f"< {rate_text(row['high_rps'])}"
    return rate_text(row["capacity_rps"])


def interval_text(row: Row) -> str:
    """`6.31 to 6.55`; a dash where there is none."""
    if not row["capacity_rps"]:
        return "–"
    return f"{rate_text(row['low_rps'])} to {rate_text(row['high_rps'])}"


def _half_width(row: Row) -> str:
    if not row["capacity_rps"]:
        return "–"
    return f"{(row['high_rps'] - row['low_rps']) / 2 / row['capacity_rps']:.1%}"


def _levels(row: Row) -> Table:
    table = Table(
        title=Text(f"Levels tried: {row['search']}"), title_justify="left", box=box.SIMPLE_HEAD
    )
    for head in ("req/s", "runs", "requests", "in SLO", "95 % interval"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for level in row["levels"]:
        known = level["attainment"] is not None
        late = level["runs"] - level["valid_runs"]
        notes = ["backlog grows"] * level["backlog_grows"] + [
            f"{late} invalid: {level['invalid_because']}"
        ] * bool(late)
        table.add_row(
            rate_text(level["rate_rps"]),
            str(level["runs"]),
            f"{level['requests']:,}",
            percent_text(level["attainment"]) if known else "–",
            f"{level['attainment_low']:.1%} to {level['attainment_high']:.1%}" if known else "–",
            Text(", ".join(notes), style="yellow"),
        )
    return table


def _ending(row: Row) -> str:
    spent = f"{row['requests_spent']:,} requests, {seconds_text(row['wall_s'])}"
    return f"stopped after {spent}: {row['stopped']}"


def found_in(runs: Sequence[RunResults]) -> list[Row]:
    """The capacities of all searches in the runs; each row also says its `folder`."""
    return [
        {**row, "folder": at}
        for at, run in enumerate(runs)
        for row in read_capacity(run.path) or ()
    ]


def figure(rows: Sequence[Row], cells: pd.DataFrame, names: Sequence[str]) -> Figure | None:
    """Attainment against rate, all runs of a rate together, with the capacities; None without."""
    searches: dict[tuple[int, str], Row] = {}
    for row in rows:
        searches.setdefault((row["folder"], row["search"]), row)
    curves: list[View] = []
    for row in searches.values():
        series = _series(row, cells)
        known = [level for level in row["levels"] if level["attainment"] is not None]
        if series is not None:
            curves.append(
                {
                    "s": list(names).index(series),
                    "x": [level["rate_rps"] for level in known],
                    "y": [level["attainment"] for level in known],
                    "lo": [level["attainment_low"] for level in known],
                    "hi": [level["attainment_high"] for level in known],
                }
            )
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
        kind="lines",
        title="Capacity",
        note="Share of requests in SLO in the long run: all runs of a rate together, without their "
        "start and end. Band: 95 % interval, requests of a run taken as correlated.",
        x=Axis("offered rate, req/s", "rate"),
        y=Axis("requests in SLO", "percent", top=1.0),
        views={ONLY: {"series": curves, "lines": lines}},
    )


def _series(row: Row, cells: pd.DataFrame) -> str | None:
    """What the page calls the configuration of a search: what it calls its cells."""
    of_run = cells[cells["folder"] == row["folder"]]
    own = of_run["cell"].str.startswith(f"{row['search']}_rate-")
    return str(of_run.loc[own, "series"].iloc[0]) if own.any() else None


def answer(rows: Sequence[Row], cells: pd.DataFrame) -> str | None:
    """The page's one sentence, where every series was searched; None where the page must tell."""
    least = min((row["target"] for row in rows), default=None)
    if not rows or {_place(row, cells) for row in rows} != _places(cells):
        return None
    if any(row["target"] == least and row["capacity_rps"] is None for row in rows):
        return None
    best: dict[str, Row] = {}
    for row in rows:
        facet = str((_place(row, cells) or ("", ""))[0])
        if row["target"] == least and row["capacity_rps"]:
            ahead = best.setdefault(facet, row)
            best[facet] = row if row["capacity_rps"] > ahead["capacity_rps"] else ahead
    if not best:
        return None
    share = f"with at least {least:.6%}".rstrip("%").rstrip("0").rstrip(".")
    share += "&nbsp;% of requests in their SLO"
    facets = facets_of(cells)
    if len(facets) == 1:
        only = best[facets[0]]
        return (
            f"<strong>{escape(str(_series(only, cells)))}</strong> carries "
            f"<strong>{rate_text(only['capacity_rps'])} req/s</strong> "
            f"(95&nbsp;% interval {escape(interval_text(only))}) {share}."
        )
    ahead_in = Counter(str(_series(row, cells)) for row in best.values())
    told = [
        f"<strong>{escape(name)}</strong> in <strong>{count} of {len(facets)}</strong>"
        for name, count in ahead_in.most_common()
    ]
    return f"The most load {share} is carried by {', by '.join(told)} {facet_noun(cells)}s."


def _place(row: Row, cells: pd.DataFrame) -> tuple[str, str] | None:
    """The facet and the series of a search."""
    series = _series(row, cells.assign(series=cells["facet"]))
    return None if series is None else (series, str(_series(row, cells)))


def _places(cells: pd.DataFrame) -> set[tuple[str, str] | None]:
    return set(zip(cells["facet"], cells["series"], strict=True))


_HEADS = (
    "System",
    "in SLO",
    "req/s",
    "95&nbsp;% interval",
    "±",
    "requests spent",
    "stopped because",
)


def table(rows: Sequence[Row], cells: pd.DataFrame) -> str:
    """The report's table of the capacities by facet; nothing where no run was a search."""
    if not rows:
        return ""
    groups: dict[str, list[Row]] = {facet: [] for facet in facets_of(cells)}
    for row in rows:
        place = _place(row, cells)
        groups.setdefault("" if place is None else place[0], []).append(row)
    body = []
    for facet, of_facet in groups.items():
        if facet and of_facet:
            body.append(
                f'<tr class="group"><th scope="rowgroup" colspan="{len(_HEADS)}">'
                f"{escape(facet)}</th></tr>"
            )
        body += [_table_row(row, cells) for row in of_facet]
    head = "".join(f'<th scope="col">{text}</th>' for text in _HEADS[:-1])
    head += f'<th scope="col" class="wide">{_HEADS[-1]}</th>'
    return (
        '<section id="capacity-section"><h2>Capacity</h2><p class="lead">The highest rate at which '
        "at least a share of all requests meets its SLO for as long as it is offered.</p>"
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></section>"
    )


def _table_row(row: Row, cells: pd.DataFrame) -> str:
    return (
        f'<tr><th scope="row">{escape(_series(row, cells) or str(row["search"]))}</th>'
        f"<td>{row['target']:g}</td><td>{escape(capacity_text(row))}</td>"
        f"<td>{escape(interval_text(row))}</td><td>{_half_width(row)}</td>"
        f"<td>{row['requests_spent']:,}</td>"
        f'<td class="wide">{escape(str(row["stopped"]))}</td></tr>'
    )
