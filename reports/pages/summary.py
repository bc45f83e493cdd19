"""What a reader of the report sees first: one sentence, and a table of all series by facet."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd

from ..figures.details import LevelDetail
from ..figures.facets import abbreviated, by_facet, facet_noun, facets_of
from ..figures.levels import TARGETS, HighestRate, has_slo, highest_rate, offered
from ..figures.measures import FINISHED, IN_SLO, Measure, load_text, measures
from ..figures.numbers import highest_text, rate_text
from .sections import badge, named

IN_ROOM = 3
"""Columns of numbers that a narrow screen shows."""

MOST_NAMES = 3
"""So many are named in a sentence; more are counted."""

Values = Mapping[str, float]
"""Of a facet's series, what the page compares them by; without those of which nothing is known."""


def answer(cells: pd.DataFrame, rows: pd.DataFrame, names: Sequence[str]) -> str:
    """The page's one sentence: who carries the most, finishes most, or meets the most SLOs."""
    facets = facets_of(cells)
    if offered(cells) == "several rates":
        if len(facets) == 1:
            return _capacity(cells, names)
        rated = {f: of for f, of in by_facet(cells, facets).items() if offered(of) != "at once"}
        of_facets = {f: _carried(of, names) for f, of in rated.items()}
        told = _most(of_facets, names, _CARRIES, facet_noun(cells), rate_text)
        if len(rated) < len(facets):
            told += f" In {len(facets) - len(rated)} all requests arrive at once."
        if not _all_alike(of_facets, names):
            return told
        best = {f: _best_goodput(of, names) for f, of in by_facet(rows, list(rated)).items()}
        more = _most(best, names, _CLAIMS["goodput_rps"], facet_noun(cells), rate_text, brief=True)
        return f"{told} {more}"
    first = measures(cells)[0]
    of_facets = {f: _means(of, first, names) for f, of in by_facet(rows, facets).items()}
    if len(facets) == 1:
        at = f" {load_text(cells)}" if offered(cells) == "one rate" else ""
        return _ahead(of_facets[facets[0]], first, names, at)
    return _most(of_facets, names, _CLAIMS[first.column], facet_noun(cells), first.text)


@dataclass(frozen=True)
class _Claim:
    """What is said of the best, in singular and plural, and what they are the best by."""

    one: str
    many: str
    what: str
    metric: str

    def of(self, names: Sequence[str]) -> str:
        return f"{self.one} {self.what}" if len(names) == 1 else f"each {self.many} {self.what}"


_CARRIES = _Claim(
    "carries",
    "carry",
    "the most load with at least 90&nbsp;% of requests in their SLO",
    "highest rate with at least 90&nbsp;% of requests in their SLO",
)
_CLAIMS = {
    "throughput_rps": _Claim(
        "finishes", "finish", "the most requests per second", "finished requests per second"
    ),
    "attainment": _Claim("keeps", "keep", "the most requests in their SLO", "requests in SLO"),
    "goodput_rps": _Claim("has", "have", "the highest goodput", "goodput"),
}


def _capacity(cells: pd.DataFrame, names: Sequence[str]) -> str:
    """Of one facet: who carries the most load at 90 %."""
    found = {n: highest_rate(cells[cells["series"] == n], TARGETS[0]) for n in names}
    carried = {n: h.rate_rps for n, h in found.items() if h.rate_rps is not None}
    if not carried:
        low = min(h.lowest_rps for h in found.values())
        return (
            "No system kept 90&nbsp;% of requests in their SLO at any tested rate; the lowest was "
            f"<strong>{rate_text(low)} req/s</strong>."
        )
    best = max(carried.values())
    winners = [n for n, rate in carried.items() if rate == best]
    verb = "carries" if len(winners) == 1 else "carry"
    text = (
        f"<strong>{_who(winners)}</strong> {verb} <strong>{rate_text(best)} req/s</strong> with at "
        "least 90&nbsp;% of requests in their SLO"
    )
    if any(found[n].at_end for n in winners):
        return f"{text}, the highest rate tested; the limit may lie above it."
    rest = [rate for n, rate in carried.items() if n not in winners]
    if rest:
        return f"{text}; the next best {rate_text(max(rest))} req/s."
    if len(winners) < len(names):
        return f"{text}; no other system did so at any tested rate."
    return f"{text}."


def _ahead(values: Values, by: Measure, names: Sequence[str], at: str) -> str:
    """Of one facet, where every series has one level: who is best, and who comes next."""
    if not values:
        return "Nothing was measured."
    winners = _winners(values, names, by.text)
    best = escape(by.text(values[winners[0]]))
    claim = _CLAIMS[by.column]
    verb = claim.one if len(winners) == 1 else claim.many
    what = {
        FINISHED.column: f"<strong>{best} req/s</strong>",
        IN_SLO.column: f"<strong>{best}</strong> of requests in their SLO",
    }.get(by.column, f"<strong>{best} req/s</strong> of goodput")
    text = f"<strong>{_who(winners)}</strong> {verb} {what}{at}"
    rest = [value for name, value in values.items() if name not in winners]
    return f"{text}; the next best {escape(by.text(max(rest)))}." if rest else f"{text}."


def _most(
    of_facets: Mapping[str, Values],
    names: Sequence[str],
    claim: _Claim,
    noun: str,
    text: Callable[[float], str],
    *,
    brief: bool = False,
) -> str:
    """Who is best, alone or with others, in how many of the facets; unless `brief`, who is next."""
    best_in = [_winners(values, names, text) for values in of_facets.values()]
    wins = Counter(name for winners in best_in for name in winners)
    nowhere = sum(not winners for winners in best_in)
    if not wins:
        return f"No system kept 90&nbsp;% of requests in their SLO in any {noun}."
    most = max(wins.values())
    leaders = [n for n in names if wins[n] == most]
    in_so_many = f"<strong>{most} of {len(best_in)}</strong> {noun}{'s' * (len(best_in) > 1)}"
    told = [f"<strong>{_who(leaders)}</strong> {claim.of(leaders)} in {in_so_many}"]
    if len(leaders) == len(names) > 1 and all(len(w) in (0, len(names)) for w in best_in):
        all_of = "both" if len(names) == 2 else f"all {len(names)}"
        told = [f"By {claim.metric} {all_of} {_kind(names)} are level in {in_so_many}"]
    level = sum(len(winners) > 1 for winners in best_in if set(winners) & set(leaders))
    if len(leaders) == 1 and level:
        told.append(f", level with others in {level if level < most else 'all'} of them")
    runners = [n for n in names if 0 < wins[n] < most]
    if runners and not brief:
        second = max(wins[n] for n in runners)
        next_best = [n for n in runners if wins[n] == second]
        told.append(f"; next {_who(next_best)}, in {second}")
    if nowhere:
        told.append(f"; in {nowhere} no system does at any tested rate")
    return f"{''.join(told)}."


def _winners(values: Values, names: Sequence[str], text: Callable[[float], str]) -> list[str]:
    """Those whose value reads as the best does."""
    best = text(max(values.values())) if values else ""
    return [n for n in names if n in values and text(values[n]) == best]


def _who(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMES:
        return f"{len(names)} {_kind(names)}"
    *most, last = names
    return escape(f"{', '.join(most)} and {last}" if most else last)


def _kind(names: Sequence[str]) -> str:
    return "configurations" if any(" · " in name for name in names) else "systems"


def _all_alike(of_facets: Mapping[str, Values], names: Sequence[str]) -> bool:
    """Whether the best are so many that the steps between rates were too wide to tell them."""
    wins = Counter(n for values in of_facets.values() for n in _winners(values, names, rate_text))
    return bool(wins) and list(wins.values()).count(max(wins.values())) > 1


def _best_goodput(rows: pd.DataFrame, names: Sequence[str]) -> Values:
    known = rows.groupby("series")["goodput_rps"].max().dropna()
    return {n: float(known[n]) for n in names if n in known}


def _carried(cells: pd.DataFrame, names: Sequence[str]) -> Values:
    found = {n: highest_rate(cells[cells["series"] == n], TARGETS[0]).rate_rps for n in names}
    return {n: rate for n, rate in found.items() if rate is not None}


def _means(rows: pd.DataFrame, by: Measure, names: Sequence[str]) -> Values:
    values = {n: rows.loc[rows["series"] == n, by.column].mean() for n in names}
    return {n: float(value) for n, value in values.items() if math.isfinite(value)}


def summary(
    cells: pd.DataFrame, rows: pd.DataFrame, details: Sequence[LevelDetail], names: Sequence[str]
) -> str:
    """A row per series, under its facet: what it carries, or did at its one level; its cost."""
    several = offered(cells) == "several rates"
    table = _rates_table if several else _measures_table
    heads, groups = table(cells, rows, details, names)
    caption = f"Means over seeds, {load_text(cells)}"
    if several:
        caption = "Highest tested rate and best goodput, req/s, mean over seeds"
    head = "".join(f'<th scope="col"{_wide(place)}>{text}</th>' for place, text in enumerate(heads))
    body = []
    for facet, lines in groups.items():
        if facet:
            body.append(
                f'<tr class="group"><th scope="rowgroup" colspan="{len(heads)}">{escape(facet)}'
                "</th></tr>"
            )
        body += [
            f'<tr><th scope="row">{named(name, names.index(name))}</th>'
            + "".join(f"<td{_wide(at)}>{cell}</td>" for at, cell in enumerate(line, start=1))
            + "</tr>"
            for name, line in lines.items()
        ]
    kind = "summary rates" if several else "summary"
    kind += " grouped" if len(groups) > 1 else ""
    return (
        f'<div class="card {kind} scroll" tabindex="0" role="region" aria-label="Summary"><table>'
        f"<caption>{escape(caption)} {badge(cells)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _wide(place: int) -> str:
    """The first columns stay where there is little room."""
    return ' class="wide"' if place > IN_ROOM else ""


_Table = tuple[list[str], dict[str, dict[str, list[str]]]]


def _rates_table(
    cells: pd.DataFrame, rows: pd.DataFrame, details: Sequence[LevelDetail], names: Sequence[str]
) -> _Table:
    heads = ["System", "≥ 90&nbsp;% in SLO", "≥ 99&nbsp;% in SLO", "Best goodput"]
    heads.append("US$ per million tokens in SLO, at 90&nbsp;%")
    groups: dict[str, dict[str, list[str]]] = {}
    for facet, of_facet in by_facet(cells, facets_of(cells)).items():
        top = float(of_facet["level_rps"].max())
        goodput = _best_goodput(rows[rows["facet"] == facet], names)
        best = set(_winners(goodput, names, rate_text))
        lines = groups.setdefault(facet, {})
        for name in names:
            of = of_facet[of_facet["series"] == name]
            if of.empty:
                continue
            at_90, at_99 = (highest_rate(of, target) for target in TARGETS)
            place = names.index(name)
            lines[name] = [
                _highest(at_90, place, top),
                _highest(at_99, place, top),
                _marked(rate_text(goodput.get(name, math.nan)), name in best < goodput.keys()),
                _cost(details, facet, name, at_90.rate_rps),
            ]
    return heads, groups


def _measures_table(
    cells: pd.DataFrame, rows: pd.DataFrame, details: Sequence[LevelDetail], names: Sequence[str]
) -> _Table:
    shown = measures(cells)
    price = "US$ per million tokens" + (" in SLO" if has_slo(cells) else "")
    heads = ["System", *(escape(m.head[0].upper() + m.head[1:]) for m in shown), price]
    groups: dict[str, dict[str, list[str]]] = {}
    for facet, of_facet in by_facet(rows, facets_of(cells)).items():
        lines = groups.setdefault(facet, {})
        best = {measure: measure.best(of_facet) for measure in shown}
        first = shown[0]
        top = 1.0 if first is IN_SLO else float(of_facet[first.column].max())
        for name in names:
            for _, row in of_facet[of_facet["series"] == name].iterrows():
                values = [(m, float(row[m.column])) for m in shown]
                texts = [_marked(escape(m.text(v)), m.text(v) == best[m]) for m, v in values]
                texts[0] += _bar(values[0][1], names.index(name), top)
                lines[name] = [*texts, _cost(details, facet, name, float(row["rate_rps"]))]
    return heads, groups


def _marked(text: str, is_best: bool) -> str:
    return f"<strong>{text}</strong>" if is_best else text


def _highest(found: HighestRate, place: int, top: float) -> str:
    text = escape(highest_text(found))
    shown = text if found.rate_rps is not None else f'<span class="dim">{text}</span>'
    return shown + _bar(found.rate_rps or 0.0, place, top)


def _bar(value: float, place: int, top: float) -> str:
    share = 100 * value / top if top and math.isfinite(value) else 0.0
    return f'<span class="bar" data-bar="{share:.1f}" data-of="{place}"></span>'


def _cost(details: Sequence[LevelDetail], facet: str, name: str, rate: float | None) -> str:
    costs = [d.cost for d in details if (d.facet, d.series, d.rate_rps) == (facet, name, rate)]
    return f"${rate_text(costs[0])}" if costs and math.isfinite(costs[0]) else "–"


def legend(cells: pd.DataFrame) -> str:
    """What the names of facets and series shorten, in full, once; nothing where nothing is."""
    known = abbreviated(cells)
    if not known:
        return ""
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in known.items())
    return (
        '<details class="fold"><summary>What the names stand for</summary>'
        f'<div class="body"><dl>{rows}</dl></div></details>'
    )
