"""The answer of one or more runs on a terminal: a row for each system, and which leads are real."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import pandas as pd

from ...harness.experiments.execution.cell_bands import HIGH, LOW
from ...harness.results.read_run import RunResults
from ..figures.facets import by_facet, facets_of
from ..figures.figure import rate_text
from ..figures.levels import (
    TARGETS,
    Measure,
    crossing_back,
    drifting,
    highest_rate,
    highest_text,
    load_text,
    measures,
    offered,
    series_names,
)
from ..pages.summary_page import careful_lines
from .experiment_lines import deciding_settings, experiment_lines, settings_note
from .leads import (
    Lead,
    LeadJudge,
    error_is_known,
    groups_of_leads,
    lead_over_seeds,
    listed,
    reality_text,
    values_by_seed,
)
from .screen import Column, Group, Screen

OVERLOADED = "overloaded (the queue grows for as long as load lasts)"
_LIKELY = "likely in reality"
LIKELY_NOTE = (
    "by how far off 90\xa0% of earlier predictions were from measurements (docs/accuracy.md)."
)
_COST = "US$\xa0per\xa01,000 in\xa0SLO"


def run_screen(runs: Sequence[RunResults], cells: pd.DataFrame) -> Screen:
    """What was tested, the answer, and a row for each system.

    Args:
        runs: the runs.
        cells: theirs, as `levels.combine` gives them.
    """
    settings = deciding_settings(runs, cells)
    groups, leads_by_facet = [], {}
    several, facets = offered(cells) == "several rates", facets_of(cells)
    shown = () if several else measures(cells)
    measure = shown[0] if shown else None
    judge = LeadJudge(runs, cells, measure)
    for facet, facet_cells in by_facet(cells, facets).items():
        leads = _Leads.of(facet, facet_cells, measure, judge)
        leads_by_facet[facet] = leads
        head = facet if len(facets) > 1 else ""
        for names in leads.shown_apart:
            rows = [
                _row(facet_cells[facet_cells["series"] == name], name, settings, shown)
                for name in names
            ]
            groups.append(Group(rows, head))
            head = ""
    heads = (
        [Column(f"req/s at\xa0{100 * target:g}\xa0%") for target in TARGETS]
        + [Column(_LIKELY, optional=True), Column(_COST, optional=True)]
        if several
        else [Column(measure.head) for measure in shown]
    )
    return Screen(
        tested=experiment_lines(runs, cells),
        columns=[Column("system", words=True), *heads],
        groups=groups,
        notes=_notes(cells, settings, several),
        answer=[*careful_lines(cells), *_answers(leads_by_facet, cells, shown)],
    )


@dataclass(frozen=True)
class _Leads:
    """The series of one facet in groups whose members are not distinguishable, best first.

    `in_reality` says of the series of other groups whether the lead of the best over them is larger
    than the model's error (None: not known).
    """

    groups: list[list[str]]
    error_is_known: bool
    in_reality: Mapping[str, bool | None]

    @property
    def alone(self) -> bool:
        """Whether there is one series, which leads nobody."""
        return len([*chain(*self.groups)]) == 1

    @property
    def shown_apart(self) -> list[list[str]]:
        """The groups of the table: one where nothing is known of the error."""
        return self.groups if self.error_is_known else [[*chain(*self.groups)]]

    @classmethod
    def of(
        cls, facet: str, cells: pd.DataFrame, measure: Measure | None, judge: LeadJudge
    ) -> _Leads:
        names = series_names(cells)
        values = values_by_seed(cells, measure)
        order = {name: values[name] for name in names if name in values}
        is_known = error_is_known(order)

        @cache
        def lead(a: str, b: str) -> Lead:
            judged = judge.lead(facet, a, b) if is_known else None
            return judged or lead_over_seeds(order[a], order[b])

        groups = groups_of_leads(order, lambda a, b: lead(a, b).is_level)
        others = [*chain(*groups[1:])] if is_known else []
        in_reality = {name: lead(groups[0][0], name).in_reality for name in others}
        without = [name for name in names if name not in values]  # no valid cell
        return cls([*groups, without] if without else groups, is_known, in_reality)


def _row(
    cells: pd.DataFrame,
    name: str,
    settings: Mapping[tuple[int, str], str],
    shown: Sequence[Measure],
) -> list[str]:
    first = cells.iloc[0]
    setting = settings.get((int(first["folder"]), str(first["system"])))
    label = f"{name} ({setting})" if setting else name
    if shown:
        valid = cells[cells["valid"]]
        means = [float(valid[measure.column].mean()) for measure in shown]
        return [label, *(m.text(mean) for m, mean in zip(shown, means, strict=True))]
    highest = [highest_rate(cells, target) for target in TARGETS]
    return [label, *map(highest_text, highest), _likely(cells), _cost(cells, highest[0].rate_rps)]


def _likely(cells: pd.DataFrame) -> str:
    """The highest rates at 90 % by the ends of the prediction bands; empty where none are known."""
    ends = []
    for end in (LOW, HIGH):
        column = f"{end}attainment"
        if column not in cells or cells.loc[cells["valid"], column].isna().any():
            return ""
        ends.append(highest_text(highest_rate(cells.assign(attainment=cells[column]), TARGETS[0])))
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _cost(cells: pd.DataFrame, rate_rps: float | None) -> str:
    """Of the highest rate at 90 %."""
    column = "usd_per_slo_request"
    if rate_rps is None or column not in cells:
        return ""
    dollars = float(cells.loc[cells["valid"] & (cells["level_rps"] == rate_rps), column].mean())
    return f"${rate_text(1000 * dollars)}" if math.isfinite(dollars) else ""


def _answers(
    leads_by_facet: Mapping[str, _Leads], cells: pd.DataFrame, shown: Sequence[Measure]
) -> Iterator[str]:
    """Sentences on what is overloaded and how sure leads are, then who leads in each facet."""
    yield from (f"{text}." for target in TARGETS for text in crossing_back(cells, target))
    if text := overloaded_text(cells):
        yield f"{OVERLOADED}: {text}."
    if not all(leads.error_is_known or leads.alone for leads in leads_by_facet.values()):
        yield "Whether a lead is chance is not known: it takes --seeds 3."
    for facet, leads in leads_by_facet.items():
        where = f"{facet}: " if len(leads_by_facet) > 1 else ""
        facet_cells = cells[cells["facet"] == facet]
        yield where + _leader(facet_cells, leads, shown)


def _leader(cells: pd.DataFrame, leads: _Leads, shown: Sequence[Measure]) -> str:
    """A sentence on the best of one facet, and what is not distinguishable from it."""
    first, *rest = leads.groups
    best = cells[cells["series"] == first[0]]
    if not best["valid"].any():
        return "No cell is valid: nothing was measured."
    if shown:
        value = float(best.loc[best["valid"], shown[0].column].mean())
        claim = f"has {shown[0].text(value)} {shown[0].head}, {load_text(cells)}"
    else:
        rate = highest_rate(best, TARGETS[0])
        if rate.rate_rps is None:
            low = rate_text(rate.lowest_rps)
            return f"No system keeps 90\xa0% of requests in SLO at {low}\xa0req/s."
        more = " or more" * rate.at_end
        claim = f"carries {rate_text(rate.rate_rps)}\xa0req/s{more} with 90\xa0% in SLO"
    reality = reality_text(leads.in_reality, len([*chain(*leads.groups)]) - 1)
    if first[1:]:
        level = f"not distinguishable from it: {listed(first[1:])}"
        return f"{first[0]} {claim}; {level}.{reality}"
    ahead = ", ahead of all others" if rest and leads.error_is_known else ""
    if ahead and not shown:
        second = highest_rate(cells[cells["series"] == rest[0][0]], TARGETS[0])
        if second.rate_rps == rate.rate_rps:
            ahead += " between tested rates"
    return f"{first[0]} {claim}{ahead}.{reality}"


def overloaded_text(cells: pd.DataFrame) -> str:
    """`from 4 req/s vllm, orca`: the lowest rates at which systems are overloaded."""
    late = cells[drifting(cells) & cells["valid"] & (cells["attainment"] < TARGETS[0])]
    names: dict[str, list[str]] = {}
    lowest = {
        ", ".join(filter(None, (str(facet), str(series)))): float(rows["level_rps"].min())
        for (facet, series), rows in late[late["level_rps"] > 0].groupby(
            ["facet", "series"], sort=False
        )
    }
    for name, rate in sorted(lowest.items(), key=lambda item: item[1]):
        names.setdefault(f"from {rate_text(rate)}\xa0req/s", []).append(name)
    return "; ".join(f"{rate} {listed(of_rate)}" for rate, of_rate in names.items())


def _notes(
    cells: pd.DataFrame, settings: Mapping[tuple[int, str], str], several: bool
) -> list[str]:
    notes = []
    if several:
        notes.append("at 90\xa0%: with 90\xa0% of requests in SLO.")
    if several and f"{LOW}attainment" in cells:
        notes.append(f"{_LIKELY}: the rate at 90\xa0%, {LIKELY_NOTE}")
    if text := settings_note(settings):
        notes.append(f"In brackets: {text}.")
    return [" ".join(notes)] if notes else []
