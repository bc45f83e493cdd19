"""Figures of a report, by facet and section."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ..pages import capacity
from . import figures, mechanism
from .details import LevelDetail, SloRange
from .figure import Figure, rate_key, rate_keys
from .levels import has_slo, knee_rps, offered
from .measures import measures
from .numbers import rate_text

_ANY_RATE = 0.0  # where every series has one level, all are shown together


@dataclass(frozen=True)
class Drawn:
    """The figures of one facet, and the rates that those of one rate can show."""

    label: str
    rates: Sequence[tuple[str, str]]  # the name of the views, and what a reader is offered
    rate: str  # the one shown first
    series: Sequence[int]  # places of those that it holds, best first
    capacity: Sequence[Figure]
    load: Sequence[Figure]
    detail: Sequence[Figure]
    worth: Sequence[Figure]

    def __iter__(self) -> Iterator[Figure]:
        return iter((*self.capacity, *self.load, *self.detail, *self.worth))


def drawn(
    facet: str,
    cells: pd.DataFrame,
    rows: pd.DataFrame,
    details: Sequence[LevelDetail],
    names: Sequence[str],
    searched: Sequence[capacity.Row],
) -> Drawn:
    """The figures of a facet.

    Args:
        facet: its name.
        cells: all cells of the page; what a figure is made of is the same in all facets.
        rows: the levels of all cells.
        details: the details of all levels.
        names: the series; figures speak of them by their place.
        searched: the capacities that were searched for.
    """
    rows = rows[rows["facet"] == facet]
    details = [d for d in details if d.facet == facet]
    own = cells[cells["facet"] == facet]
    bounds = shared_bounds(details)
    rates = [(rate_key(r), _rate_label(own, r)) for r in sorted(set(rows["rate_rps"]))]
    rate = rate_key(knee_rps(rows))
    found = _present(capacity.figure(searched, own, names))
    several, slo = offered(cells) == "several rates", has_slo(cells)
    cost = figures.cost(details, names, compared=not several)
    if several:
        load = [
            figures.against_rate(rows, names, "attainment"),
            figures.against_rate(rows, names, "goodput_rps"),
            *(figures.latency(rows, names, m, bounds.get(m)) for m in figures.METRICS),
        ]
    else:
        latencies: list[figures.Latency] = [*figures.METRICS]
        latencies += ["e2e"] if offered(cells) == "at once" else []
        columns = [m.column for m in measures(cells) if m.column in figures.COMPARED]
        load = [
            *(figures.compared(rows, names, column) for column in columns),
            *(figures.latency_compared(rows, names, m, bounds.get(m)) for m in latencies),
        ]
        rows = rows.assign(rate_rps=_ANY_RATE)
        details = [replace(d, rate_rps=_ANY_RATE) for d in details]
        rates, rate = [], rate_key(_ANY_RATE)
    missed = [
        figures.causes(details, names),
        figures.phases(details, names, until="first"),
        figures.phases(details, names, until="last"),
    ]
    detail = [
        *(figures.latency_distribution(details, names, m) for m in figures.METRICS),
        *(missed if slo else []),
        *(figures.over_time(details, names, c) for c in figures.STATES),
        *(_present(figures.classes(rows, names)) if slo else []),
        *mechanism.figures(details, names),
    ]
    worth = [figures.efficiency(rows, names), *_present(cost)]
    series = [place for place, name in enumerate(names) if (own["series"] == name).any()]
    return Drawn(facet, rates, rate, series, found, load, detail, worth)


def shared_bounds(details: Iterable[LevelDetail]) -> dict[str, SloRange]:
    """The least and the largest bound of each kind that requests carried."""
    bounds: dict[str, SloRange] = {}
    for detail in details:
        for name, bound in detail.bounds.items():
            old = bounds.get(name, bound)
            bounds[name] = SloRange(min(old.low_s, bound.low_s), max(old.high_s, bound.high_s))
    return bounds


def _rate_label(cells: pd.DataFrame, rate: float) -> str:
    """`4 req/s`, with the load or the speed that made it this rate."""
    text = f"{rate_text(rate)} req/s"
    of_rate = cells[rate_keys(cells) == rate_key(rate)]
    for column, word in (("load_factor", "load {:g}"), ("replay_speed", "{:g}× speed")):
        if column in cells.columns and cells[column].nunique() > 1:
            values = of_rate[column].dropna()
            if values.nunique() == 1:
                return f"{text} ({word.format(values.iloc[0])})"
    return text


def _present(figure: Figure | None) -> list[Figure]:
    return [] if figure is None else [figure]
