"""The headline of a report: one sentence that names the best system."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from markupsafe import Markup

from ..figures.facets import by_facet, facet_noun, facets_of
from ..figures.figure import rate_text
from ..figures.levels import (
    IN_SLO,
    TARGETS,
    Measure,
    crossing_back,
    highest_rate,
    load_text,
    measures,
    offered,
)

MOST_NAMES = 3
"""Largest number of series named in a sentence; more are counted."""

Values = Mapping[str, float]
"""Values by series in one facet that the page compares; series without a value are left out."""

# Of a column: what one does, what several do, what it is that they do, what they are compared by.
_CARRIES = (
    "carries",
    "carry",
    "the most load with at least 90\xa0% of requests in their SLO",
    "highest rate with at least 90\xa0% of requests in their SLO",
)
_CLAIMS = {
    "throughput_rps": (
        "finishes", "finish", "the most requests per second", "finished requests per second"
    ),
    "attainment": ("keeps", "keep", "the most requests in their SLO", "requests in SLO"),
    "goodput_rps": ("has", "have", "the highest goodput", "goodput"),
}  # fmt: skip


def strong(text: object) -> Markup:
    """The text in bold, with HTML characters escaped."""
    return Markup("<strong>{}</strong>").format(text)


def answer(cells: pd.DataFrame, rows: pd.DataFrame, names: Sequence[str]) -> Markup:
    """The headline: the system with the highest rate, throughput or SLO attainment."""
    facets, noun = facets_of(cells), facet_noun(cells)
    if offered(cells) == "several rates":
        if len(facets) == 1:
            back = "".join(f" {text}." for text in crossing_back(cells, TARGETS[0]))
            return Markup("{}{}").format(_capacity(cells, names), back)
        rated = {
            f: facet_cells
            for f, facet_cells in by_facet(cells, facets).items()
            if offered(facet_cells) != "at once"
        }
        values_by_facet = {f: _carried(facet_cells, names) for f, facet_cells in rated.items()}
        headline = _most(values_by_facet, names, _CARRIES, noun, rate_text)
        if len(rated) < len(facets):
            headline += f" In {len(facets) - len(rated)} all requests arrive at once."
        wins = Counter(n for v in values_by_facet.values() for n in winners(v, names, rate_text))
        if not wins or list(wins.values()).count(max(wins.values())) < 2:
            return headline
        # Several systems tie: the steps between rates were too wide to separate them.
        best = {
            f: best_goodput(facet_rows, names)
            for f, facet_rows in by_facet(rows, list(rated)).items()
        }
        more = _most(best, names, _CLAIMS["goodput_rps"], noun, rate_text, brief=True)
        return Markup("{} {}").format(headline, more)
    first = measures(cells)[0]
    values_by_facet = {
        f: _means(facet_rows, first, names) for f, facet_rows in by_facet(rows, facets).items()
    }
    if len(facets) == 1:
        load = f" {load_text(cells)}" if offered(cells) == "one rate" else ""
        return _ahead(values_by_facet[facets[0]], first, names, load)
    return _most(values_by_facet, names, _CLAIMS[first.column], noun, first.text)


def _capacity(cells: pd.DataFrame, names: Sequence[str]) -> Markup:
    """Headline of one facet: the system with the highest rate at 90 % attainment."""
    highest = {n: highest_rate(cells[cells["series"] == n], TARGETS[0]) for n in names}
    carried = {n: h.rate_rps for n, h in highest.items() if h.rate_rps is not None}
    if not carried:
        low = min((h.lowest_rps for h in highest.values() if h.top_rps), default=None)
        if low is None:
            return Markup("No cell is valid: nothing was measured.")
        return Markup(
            "No system kept 90\xa0% of requests in their SLO at the lowest tested rate, "
            "<strong>{} req/s</strong>."
        ).format(rate_text(low))
    best = max(carried.values())
    leaders = [n for n, rate in carried.items() if rate == best]
    rest = [rate for n, rate in carried.items() if n not in leaders]
    if any(highest[n].at_end for n in leaders):
        end = ", the highest rate tested; the limit may lie above it."
    elif rest:
        end = f"; the next best {rate_text(max(rest))} req/s."
    else:
        end = "; no other system did so at its lowest rate." * (len(leaders) < len(names)) or "."
    return Markup(
        "<strong>{}</strong> {} <strong>{} req/s</strong> with at least 90\xa0% of requests in "
        "their SLO{}"
    ).format(_who(leaders), _CARRIES[len(leaders) > 1], rate_text(best), end)


def _ahead(values: Values, by: Measure, names: Sequence[str], load: str) -> Markup:
    """Headline of one facet with one level for each series: the best system and the next."""
    if not values:
        return Markup("Nothing was measured.")
    leaders = winners(values, names, by.text)
    rest = [value for name, value in values.items() if name not in leaders]
    quantities = {"goodput_rps": " of goodput", "attainment": " of requests in their SLO"}
    return Markup("<strong>{}</strong> {} <strong>{}{}</strong>{}{}{}.").format(
        _who(leaders),
        _CLAIMS[by.column][len(leaders) > 1],
        by.text(values[leaders[0]]),
        "" if by is IN_SLO else " req/s",
        quantities.get(by.column, ""),
        load,
        f"; the next best {by.text(max(rest))}" if rest else "",
    )


def _most(
    values_by_facet: Mapping[str, Values],
    names: Sequence[str],
    claim: tuple[str, str, str, str],
    noun: str,
    text: Callable[[float], str],
    *,
    brief: bool = False,
) -> Markup:
    """Headline of several facets: the system best in most, and, unless `brief`, the next."""
    singular_verb, plural_verb, quantity, metric = claim
    best_in = [winners(values, names, text) for values in values_by_facet.values()]
    wins = Counter(name for leaders in best_in for name in leaders)
    if not wins:
        return Markup("No system kept 90\xa0% of requests in their SLO in any {}.").format(noun)
    most_wins = max(wins.values())
    leaders = [n for n in names if wins[n] == most_wins]
    nouns = f"{noun}{'s' * (len(best_in) > 1)}"
    in_so_many = Markup("{} {}").format(strong(f"{most_wins} of {len(best_in)}"), nouns)
    if len(leaders) == len(names) > 1 and all(len(w) in (0, len(names)) for w in best_in):
        all_of = "both" if len(names) == 2 else f"all {len(names)}"
        headline = Markup("By {} {} {} are level in ").format(metric, all_of, _kind(names))
    else:
        verb = singular_verb if len(leaders) == 1 else f"each {plural_verb}"
        headline = Markup("{} {} {} in ").format(strong(_who(leaders)), verb, quantity)
    headline += in_so_many
    level = sum(len(winners) > 1 for winners in best_in if set(winners) & set(leaders))
    if len(leaders) == 1 and level:
        headline += f", level with others in {level if level < most_wins else 'all'} of them"
    runners = [n for n in names if 0 < wins[n] < most_wins]
    if runners and not brief:
        second = max(wins[n] for n in runners)
        headline += f"; next {_who([n for n in runners if wins[n] == second])}, in {second}"
    if nowhere := sum(not leaders for leaders in best_in):
        headline += f"; in {nowhere} no system does at any tested rate"
    return headline + "."


def winners(values: Values, names: Sequence[str], text: Callable[[float], str]) -> list[str]:
    """Names of the series whose value has the same text as the best."""
    best = text(max(values.values())) if values else ""
    return [n for n in names if n in values and text(values[n]) == best]


def _who(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMES:
        return f"{len(names)} {_kind(names)}"
    *first_names, last = names
    return f"{', '.join(first_names)} and {last}" if first_names else last


def _kind(names: Sequence[str]) -> str:
    return "configurations" if any(" · " in name for name in names) else "systems"


def best_goodput(rows: pd.DataFrame, names: Sequence[str]) -> Values:
    """Best goodput of each series over all rates, in requests per second."""
    best_rps = rows.groupby("series")["goodput_rps"].max().dropna()
    return {n: float(best_rps[n]) for n in names if n in best_rps}


def _carried(cells: pd.DataFrame, names: Sequence[str]) -> Values:
    highest = {n: highest_rate(cells[cells["series"] == n], TARGETS[0]).rate_rps for n in names}
    return {n: rate for n, rate in highest.items() if rate is not None}


def _means(rows: pd.DataFrame, by: Measure, names: Sequence[str]) -> Values:
    values = {n: rows.loc[rows["series"] == n, by.column].mean() for n in names}
    return {n: float(value) for n, value in values.items() if math.isfinite(value)}
