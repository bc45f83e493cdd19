"""The answer of capacity searches on a terminal; for `--verbose`, the levels that were tried."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ...harness.results.read_run import RunResults
from ..compare.model_error import (
    ErrorDraws,
    difference_band,
    error_draws,
    holds,
    mean_draws,
    rate_draws,
)
from ..figures.facets import SETUP
from ..figures.figure import percent_text, rate_text, seconds_text
from ..pages.answers_page import surplus_text
from ..pages.capacity_page import (
    HEADS,
    UNDECIDED,
    capacity_cells,
    capacity_text,
    search_cells,
)
from .experiment_lines import experiment_lines
from .leads import reality_text
from .run_answer import LIKELY_NOTE
from .screen import Column, Group, Screen

Row = Mapping[str, Any]

_IDENTITY = ("search", "cell", "system", "rate_rps", "replay_speed", "load_factor", "seed")
_NOTES = "sampling: the 95\xa0% interval by the requests that were drawn."


def capacity_screen(rows: Sequence[Row], runs: Sequence[RunResults], cells: pd.DataFrame) -> Screen:
    """What was tested, the capacities, and which configuration carries the most.

    Args:
        rows: results, as `CapacityResult.rows` gives them.
        runs: the folders of the searches.
        cells: of these, as `levels.combine` gives them.
    """
    lines: list[list[str]] = []
    for row in rows:
        name, *texts = map(str, capacity_cells(row, row["search"]))
        again = bool(lines) and row["search"] == rows[len(lines) - 1]["search"]
        lines.append(["" if again else name, *texts])
    notes = [_NOTES]
    if any(row.get("band_low_rps") or row.get("band_high_rps") for row in rows):
        notes.append(f"{HEADS[-1]}: the rate, {LIKELY_NOTE}")
    name, *heads = HEADS
    return Screen(
        tested=experiment_lines(runs, cells, search=True),
        columns=[Column(name, words=True), *(Column(head) for head in heads)],
        groups=[Group(lines)],
        notes=[" ".join(notes)],
        answer=[*failed_lines(rows), *best_lines(rows, cells)],
    )


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


def best_lines(rows: Sequence[Row], cells: pd.DataFrame) -> list[str]:
    """For each target and each set of conditions, which configuration carries the most, and whether
    its lead is larger than the model's error.
    """
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        names = list(row)[: list(row).index("target")]
        conditions = [n for n in names if n not in (*_IDENTITY, *SETUP) and "." not in n]
        key = (row["target"], *((n, row[n]) for n in conditions))
        alike.setdefault(key, []).append(row)
    several_conditions = len({key[1:] for key in alike}) > 1
    lines = []
    for (target, *pairs), alternatives in alike.items():
        decided = [
            r for r in alternatives if r["capacity_rps"] != 0 and r.get("outcome") != UNDECIDED
        ]
        if not decided:
            continue
        best = max(decided, key=_ahead)
        gpus = f" on {best['gpus']:g} GPUs" if (best.get("gpus") or 1) > 1 else ""
        near = [r["search"] for r in decided if r is not best and _most_rps(r) >= best["low_rps"]]
        where = "".join(f", {name} {value}" for name, value in pairs) * several_conditions
        claim = " the most," * (len(alternatives) > 1)
        by_error = {r["search"]: _by_error(r, cells) for r in decided}
        in_reality = {
            name: holds(-1.0, difference_band(by_error[best["search"]], draws))
            for name, draws in by_error.items()
            if name not in (best["search"], *near)
        }
        level = f"; not distinguishable from it: {', '.join(near)}" if near else ""
        lines.append(
            f"At {100 * target:g}\xa0%{where}: {best['search']} carries{claim} "
            f"{capacity_text(best)}\xa0req/s{gpus}{level}."
            f"{reality_text(in_reality, len(decided) - 1)}"
        )
    return lines


def _by_error(row: Row, cells: pd.DataFrame) -> ErrorDraws | None:
    """The capacity by the model's error, from the runs of its search."""
    searched = cells[search_cells(row, cells)]
    by_rate = {
        float(str(rate)): mean_draws(
            [error_draws(dict(cell), "attainment") for _, cell in level.iterrows()]
        )
        for rate, level in searched.groupby("rate_rps")
    }
    return rate_draws(by_rate, row["target"])


def _ahead(row: Row) -> tuple[bool, float]:
    """Sort key; the greatest is that of a system that met the target at every tried rate."""
    endless = row["capacity_rps"] is None
    return endless, row["low_rps"] if endless else row["capacity_rps"]


def _most_rps(row: Row) -> float:
    """Upper bound of the capacity, in requests per second."""
    return math.inf if row["high_rps"] is None else float(row["high_rps"])


def capacity_details(rows: Sequence[Row]) -> list[Screen]:
    """For each search the levels tried, and why it ended."""
    first_rows = {str(row["search"]): row for row in reversed(rows)}
    return [_levels(first_rows[name]) for name in dict.fromkeys(str(r["search"]) for r in rows)]


def _levels(row: Row) -> Screen:
    lines = []
    for level in row["levels"]:
        has_attainment = level["attainment"] is not None
        low, high = level["attainment_low"], level["attainment_high"]
        late = level["runs"] - level["valid_runs"]
        may_pass = has_attainment and not level["backlog_grows"] and high >= row["target"]
        short = may_pass and not level.get("sustained", True)
        remarks = (
            ["overloaded: the queue grows"] * level["backlog_grows"]
            + ["too short to pass"] * short
            + [f"{late} invalid: {level['invalid_because']}"] * bool(late)
        )
        lines.append(
            (
                rate_text(level["rate_rps"]),
                str(level["runs"]),
                f"{level['requests']:,}",
                percent_text(level["attainment"]) if has_attainment else "–",
                f"{100 * low:.1f} to {100 * high:.1f} %" if has_attainment else "–",
                ", ".join(remarks),
            )
        )
    heads = ("req/s", "runs", "requests", "in SLO", "95\xa0% interval")
    spent = f"{row['requests_spent']:,} requests, {seconds_text(row['wall_s'])}"
    return Screen(
        tested=[f"Levels tried: {row['search']}"],
        columns=[*map(Column, heads), Column("", words=True)],
        groups=[Group(lines)],
        notes=[f"stopped after {spent}: {row['stopped']}"],
    )
