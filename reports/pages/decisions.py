"""What policies decided inside servers, and policies that were never asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from ...harness.core.decision_counts import DECISIONS
from ..figures.figure import rate_text
from .table import Cell, Table

_CHOICES = ("decisions_order", "decisions_victim", "decisions_release")
_PREEMPTIONS = ("preemptions_swap", "preemptions_recompute")
_HEADS = ("Chosen from the queue", "overtaking", "Victims chosen", "not the latest", "Sent away")
_PREEMPTED = ("Swaps", "Recomputations")


def _of_systems(cells: pd.DataFrame) -> Mapping[str, pd.DataFrame]:
    """Cells in which a policy decided inside a server, by series."""
    if "decisions_order" not in cells:
        return {}
    known = cells[cells["valid"] & cells["decisions_order"].notna()]
    return {str(name): of for name, of in known.groupby("series", sort=False)}


def never_asked(cells: pd.DataFrame) -> list[str]:
    """A sentence for each series whose policy had no choice in any cell."""
    return [
        f"The policy of {name} made no difference, for it was never asked: no request waited "
        "beside another, none was preempted, and none was sent away."
        for name, of in _of_systems(cells).items()
        if not of[list(_CHOICES)].to_numpy().any()
    ]


def kept_order_of_arrival(cells: pd.DataFrame) -> list[str]:
    """A sentence for each series whose policy had a choice, but always took what a queue in order
    of arrival takes.
    """
    own = ["decisions_overtaking", "decisions_other_victim", "decisions_release"]
    return [
        f"The policy of {name} never left the order of arrival: it chose the earliest request "
        f"{int(of['decisions_order'].sum())} times and the latest victim "
        f"{int(of['decisions_victim'].sum())} times."
        for name, of in _of_systems(cells).items()
        if of[list(_CHOICES)].to_numpy().any() and not of[own].to_numpy().any()
    ]


def sentences(cells: pd.DataFrame) -> list[str]:
    """For each series what its policy decided inside the server, in all cells together."""
    lines = []
    for name, of in _of_systems(cells).items():
        sums = {column: int(of[column].sum()) for column in DECISIONS}
        if any(sums[column] for column in _CHOICES):
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
    for name, of in _of_systems(cells).items():
        sums = of.groupby("rate_rps", dropna=False)[columns].sum()
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
