"""Which series is best where: a map over facets and offered rates.

Series are compared with the best one seed by seed. Where the 95 % interval of the difference
holds 0, they are level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ..figures.facets import by_facet, facets_of
from ..figures.figure import rate_text, seconds_text
from ..figures.levels import IN_SLO, LATENCY, TPOT, TTFT, Measure, drifting, has_slo, offered
from .table import Cell, Row, Table
from .verdicts import interval_over_seeds

E2E = Measure("mean E2E", LATENCY.column, seconds_text, False)
MEASURES = (IN_SLO, E2E, TTFT, TPOT)
_MOST_NAMED = 3  # series that are level; more are counted
NOTE = (
    "Best by the mean over seeds, and all that are level with it (≈): the 95 % interval over seeds "
    "of the difference holds 0. *: overloaded, so that the figure depends on the run's length."
)


@dataclass(frozen=True)
class Best:
    """The best series of one facet at one rate, those level with it, and its mean value."""

    series: tuple[str, ...]
    n_series: int  # series that were compared
    value: float
    next_value: float | None  # the best of those that are worse
    drifting: bool  # a cell of the best is not stationary

    def text(self, measure: Measure) -> str:
        """`tp8 ≈ tp4 (1.2 s; next 1.4 s)`."""
        if len(self.series) == self.n_series > 1:
            named = "all"
        elif len(self.series) > _MOST_NAMED:
            named = f"{len(self.series)} of {self.n_series}"
        else:
            named = " ≈ ".join(self.series)
        after = "" if self.next_value is None else f"; next {measure.text(self.next_value)}"
        return f"{named} ({measure.text(self.value)}{'*' * self.drifting}{after})"


def best_at(cells: pd.DataFrame, measure: Measure) -> Best | None:
    """The best series among the cells of one facet and rate; None where none has a value."""
    by_seed = cells[cells["valid"]].pivot_table(
        index="seed", columns="series", values=measure.column, sort=False
    )
    by_seed = by_seed.dropna(axis="columns")
    if by_seed.empty:
        return None
    means = by_seed.mean().sort_values(ascending=not measure.more_is_better, kind="stable")
    first = str(means.index[0])
    level: list[str] = [first]
    worse: list[str] = []
    for name in map(str, means.index[1:]):
        difference = interval_over_seeds(list(by_seed[name] - by_seed[first]))
        (level if difference.low <= 0 <= difference.high else worse).append(name)
    nearest = float(means[worse[0]]) if worse else None
    drifts = bool(drifting(cells[cells["series"] == first]).any())
    return Best(tuple(level), len(means), float(means.iloc[0]), nearest, drifts)


def best_map(cells: pd.DataFrame, measure: Measure) -> dict[str, dict[float, Best]]:
    """The best series by facet and rate."""
    return {
        facet: {
            rate: best
            for rate in sorted(set(facet_cells["level_rps"]))
            if (best := best_at(facet_cells[facet_cells["level_rps"] == rate], measure)) is not None
        }
        for facet, facet_cells in by_facet(cells, facets_of(cells)).items()
    }


def table(cells: pd.DataFrame, names: Sequence[str], badge: str) -> Table:
    """Maps of all measures; without groups unless there are several facets and rates."""
    shown_measures = [
        m for m in MEASURES if m.column in cells and (m is not IN_SLO or has_slo(cells))
    ]
    several = len(facets_of(cells)) > 1 and offered(cells) == "several rates"
    rates = sorted(set(cells["level_rps"]))
    groups: list[tuple[str | Cell, list[Row]]] = []
    for measure in shown_measures if several and len(names) > 1 else ():
        best_by_facet = best_map(cells, measure)
        rows: list[Row] = [
            [facet, *(by_rate[r].text(measure) if r in by_rate else "–" for r in rates)]
            for facet, by_rate in best_by_facet.items()
        ]
        groups.append((measure.head, rows))
    heads = ("", *(f"{rate_text(rate)} req/s" for rate in rates))
    return Table(
        "Which is best where",
        heads,
        groups,
        texts=range(len(heads)),
        caption="Best series by load",
        note=NOTE,
        badge=badge,
    )
