"""What policies decided inside servers, and policies that were never asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ...harness.core.records.decision_counts import DECISIONS
from ...harness.results.compared_decisions import COUNTS, read_decisions
from ...harness.results.read_run import RunResults
from ..figures.figure import rate_text
from .table import Cell, Table

_CHOICES = ("decisions_order", "decisions_victim", "decisions_release")
_DEPARTURES = ("decisions_overtaking", "decisions_other_victim", "decisions_release")
_PREEMPTIONS = ("preemptions_swap", "preemptions_recompute")
_HEADS = ("Chosen from the queue", "overtaking", "Victims chosen", "not the latest", "Sent away")
_PREEMPTED = ("Swaps", "Recomputations")


def _of_systems(cells: pd.DataFrame) -> Mapping[str, pd.DataFrame]:
    """Cells in which a policy decided inside a server, by series."""
    if "decisions_order" not in cells:
        return {}
    decided = cells[cells["valid"] & cells["decisions_order"].notna()]
    return {str(name): series_cells for name, series_cells in decided.groupby("series", sort=False)}


def _any(cells: pd.DataFrame, columns: Sequence[str]) -> bool:
    """Whether a cell counted anything in one of the columns."""
    return bool(cells[list(columns)].to_numpy().any())


def never_asked(cells: pd.DataFrame) -> list[str]:
    """A sentence for each series whose policy had no choice in any cell."""
    return [
        f"The policy of {name} made no difference, for it was never asked: no request waited "
        "beside another, none was preempted, and none was sent away."
        for name, series_cells in _of_systems(cells).items()
        if not _any(series_cells, _CHOICES)
    ]


def kept_order_of_arrival(cells: pd.DataFrame) -> list[str]:
    """A sentence for each series whose policy had a choice, but always took what a queue in order
    of arrival takes.
    """
    return [
        f"The policy of {name} never left the order of arrival: it chose the earliest request "
        f"{int(series_cells['decisions_order'].sum())} times and the latest victim "
        f"{int(series_cells['decisions_victim'].sum())} times."
        for name, series_cells in _of_systems(cells).items()
        if _any(series_cells, _CHOICES) and not _any(series_cells, _DEPARTURES)
    ]


def sentences(cells: pd.DataFrame) -> list[str]:
    """For each series what its policy decided inside the server, in all cells together."""
    lines = []
    for name, series_cells in _of_systems(cells).items():
        sums = {column: int(series_cells[column].sum()) for column in DECISIONS}
        if _any(series_cells, _CHOICES):
            lines.append(
                f"Inside the server, the policy of {name} took {sums['decisions_order']} requests "
                f"from a queue with others ({sums['decisions_overtaking']} before an earlier one), "
                f"chose {sums['decisions_victim']} victims ({sums['decisions_other_victim']} not "
                f"the latest) and sent {sums['decisions_release']} requests away."
            )
    return [*lines, *never_asked(cells), *kept_order_of_arrival(cells)]


def table(cells: pd.DataFrame, names: Sequence[str], badge: str) -> Table:
    """Decisions by series and rate, summed over seeds; without rows where no policy decided."""
    groups = []
    columns = [*DECISIONS, *_PREEMPTIONS]
    for name, series_cells in _of_systems(cells).items():
        sums = series_cells.groupby("rate_rps", dropna=False)[columns].sum()
        lines = [
            [rate_text(float(rate)), *(f"{int(count):,}" for count in row)]
            for rate, row in zip(sums.index, sums.to_numpy().tolist(), strict=True)
        ]
        groups.append((Cell(name, series=list(names).index(name)), lines))
    return Table(
        "What policies decided inside the servers",
        ("Offered req/s", *_HEADS, *_PREEMPTED),
        groups,
        (),
        caption="Counted by the plugin in the server's process, all seeds together",
        badge=badge,
    )


_MOST_NAMED = 8  # requests in a sentence
_SIDES = (("server", "inside the server"), ("simulated", "simulated"))


def simulated_in(runs: Sequence[RunResults]) -> list[dict[str, Any]]:
    """Levels of all runs whose decisions were compared with a simulation, invalid ones left out.

    Raises:
        FileFormatError: what is there cannot be read.
    """
    return [
        level
        for run in runs
        for level in read_decisions(run.path)
        if level["cell"] in set(run.cells.loc[run.cells["valid"], "cell"])
    ]


def beside_sentences(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each level the decisions inside the server and simulated, and where they differ."""
    return [_beside(level) for level in levels]


def _beside(level: Mapping[str, Any]) -> str:
    inside = f"{level['cell']}: inside the server {_counts_text(level['server'])}"
    if level["simulated"] is None:
        return f"{inside}; {level['note']}."
    both = f"{inside}; in a simulation of the same requests {_counts_text(level['simulated'])}"
    if level["alike"] is None:
        return f"{both}. By request: unknown, {level['note']}."
    alike = f"{level['alike']} of {level['requests']} requests were treated alike"
    differing = [
        f"{name.replace('away', 'sending away')} of {len(rows)} ({_named(rows)})"
        for name, rows in level["differing"].items()
        if rows
    ]
    different = f"; different: {', '.join(differing)}" if differing else ""
    return f"{both}. {alike}{different}."


def _named(rows: Sequence[int]) -> str:
    more = ", …" if len(rows) > _MOST_NAMED else ""
    return ", ".join(map(str, rows[:_MOST_NAMED])) + more


def _counts_text(counts: Mapping[str, int]) -> str:
    return (
        f"{counts['decisions_order']} chosen from a queue ({counts['decisions_overtaking']} before "
        f"an earlier one), {counts['decisions_victim']} victims chosen "
        f"({counts['decisions_other_victim']} not the latest), {counts['preemptions_swap']} "
        f"swapped, {counts['preemptions_recompute']} recomputed, {counts['decisions_release']} "
        "sent away"
    )


def beside_table(levels: Sequence[Mapping[str, Any]], badge: str) -> Table:
    """Decisions of each level, inside the server and simulated."""
    groups = []
    for level in levels:
        lines = [
            [text, *(f"{level[side][name]:,}" for name in COUNTS)]
            for side, text in _SIDES
            if level[side] is not None
        ]
        groups.append((Cell(level["cell"]), lines))
    return Table(
        "Decisions inside the servers and in a simulation of the same requests",
        ("", *_HEADS, *_PREEMPTED),
        groups,
        caption="Simulated with step times of the server's step log; arrivals are times of sending",
        note=" ".join(beside_sentences(levels)),
        badge=badge,
    )
