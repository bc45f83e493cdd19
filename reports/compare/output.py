"""A comparison on a terminal, as plain JSON values, in Markdown for a pull request, as a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ...harness.results.request_figures import RequestFigure
from ...workloads.parsing import finite
from ..figures.drawing import page_data
from ..figures.figure import ONLY, Axis, Figure, View, curve, form_text, rate_text
from ..figures.levels import GOODPUT_DIVISOR, window_text
from ..pages.document import page, write_page
from ..pages.table import Cell, Table
from ..terminal.screen import Screen
from .comparing import Comparison, Judgement, Row, Verdict
from .model_error import HOLDS, INSIDE, NOTE
from .rate_lead import TARGET

WORDS = {"better": "better", "worse": "worse", "none": "not distinguishable", "unknown": "–"}
_COUNTED: dict[Verdict, str] = {
    "worse": "worse",
    "better": "better",
    "none": "not distinguishable",
    "unknown": "nothing known",
}
_STYLES = {"better": "green", "worse": "red", "none": "dim", "unknown": "dim"}
_CSS = {"better": "good", "worse": "short"}


def failed_lines(comparison: Comparison) -> list[str]:
    """How many requests failed on each side; no line of a side where none did."""
    sides = (comparison.name_a, comparison.a), (comparison.name_b, comparison.b)
    return [f"{name}: {results.failed}." for name, results in sides if results.failed]


def headline(comparison: Comparison) -> str:
    """One sentence with the number of comparisons in which B is better, worse or neither."""
    counts = [
        f"{word} in {comparison.count(verdict)}"
        for verdict, word in _COUNTED.items()
        if comparison.count(verdict)
    ]
    level = f"{1 - comparison.confidence:.2g}"
    return (
        f"{comparison.name_b} against {comparison.name_a}: {', '.join(counts) or 'nothing to say'}"
        f" of {len(comparison.rows)} comparisons (Holm-corrected, level {level})."
    )


def lead_lines(comparison: Comparison) -> Iterable[str]:
    """For each label with several rates, the highest rates in SLO, and what is certain of them."""
    for label, lead in comparison.leads.items():
        where = f"{label}: " if label else ""
        interval = f"{_signed(lead.bounds.low)} … {_signed(lead.bounds.high)}"
        words = WORDS[lead.verdict]
        if lead.verdict != "none" and lead.in_reality is not None:
            words += f", {HOLDS if lead.in_reality else INSIDE}"
        yield (
            f"{where}req/s with {TARGET:.0%} in SLO: {rate_text(lead.a_rps)} → "
            f"{rate_text(lead.b_rps)} ({interval}): {words}."
        )


def value_text(metric: RequestFigure, value: float) -> str:
    """A metric's value as text, with its unit."""
    if not math.isfinite(value):
        return "–"
    if metric.form == "share":
        return f"{100 * value:.1f} %"
    return "−" * (value < 0) + form_text(metric.form, abs(value))


def change_text(row: Row) -> str:
    """The change with its sign: points of a share, else percent of A's value."""
    if row.metric.form == "share":
        return _signed(100 * row.difference, " pts")
    return _signed(100 * row.relative, " %")


def change_bounds_text(row: Row) -> str:
    """Its interval in the same unit."""
    bounds = row.bounds if row.metric.form == "share" else row.relative_bounds
    if not math.isfinite(bounds.low):
        return "–"
    return f"{_signed(100 * bounds.low)} … {_signed(100 * bounds.high)}"


def _signed(value: float, unit: str = "") -> str:
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    text = f"{size:.1f}" if size < 99.95 else f"{size:,.0f}"
    sign = "" if float(text.replace(",", "")) == 0 else "+" if value > 0 else "−"
    return f"{sign}{text}{unit}"


def comparison_text(comparison: Comparison) -> RenderableType:
    """What was tested, a table for each pair of systems, notes, what differs, and the headline."""
    parts: list[RenderableType] = [Screen(comparison.a.tested)]
    for label in labels_of(comparison):
        parts.append(rows_table(comparison, [label], holm=False).rich(label))
    parts += [Text(line, style="dim") for line in note_lines(comparison)]
    parts += [Text(line) for line in (*differing_lines(comparison), *lead_lines(comparison))]
    return Group(*parts, Text(headline(comparison), style="bold"))


def rows_table(comparison: Comparison, labels: Iterable[str], *, holm: bool) -> Table:
    """The rows of some labels; `holm` says whether with their corrected p."""
    groups = [
        (label, [_cells(row, holm) for row in comparison.rows if row.label == label])
        for label in labels
    ]
    names = comparison.name_a, comparison.name_b
    more = ("p (Holm)", "verdict") if holm else ("",)
    interval = f"{comparison.confidence:.0%} interval"
    heads = ("metric", "req/s", *names, "change", interval, *more)
    return Table("All comparisons", heads, groups, (0, len(heads) - 1), names)


def _cells(row: Row, holm: bool) -> list[str | Cell]:
    verdict = WORDS[row.verdict]
    if row.stationary is False:
        verdict += f", {overloaded_text(row)}"
    if _inside(row):
        verdict += f", {INSIDE}"
    more = [p_text(row.p_holm)] if holm else []
    style = _STYLES[row.verdict], _CSS.get(row.verdict, "")
    return [row.metric.short, _rate_text(row), *_figures(row), *more, Cell(verdict, *style)]


def _inside(row: Row) -> bool:
    """Whether a difference is more than noise, and no more than the model's error."""
    return row.significant and row.in_reality is False


def _rate_text(row: Row) -> str:
    return "–" if row.rate_rps is None else rate_text(row.rate_rps)


def _figures(row: Row) -> tuple[str, ...]:
    """Both values, the change and its interval."""
    values = (value_text(row.metric, value) for value in (row.a, row.b))
    return (*values, change_text(row), change_bounds_text(row))


def overloaded_text(row: Row) -> str:
    """`overloaded after 540 s`."""
    return f"overloaded {window_text(row.drifting_after_s)}".rstrip()


def labels_of(comparison: Comparison) -> list[str]:
    """The pairs of systems that are compared."""
    return list(dict.fromkeys(row.label for row in comparison.rows))


def p_text(p: float) -> str:
    """Two digits, or that it is below a thousandth."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.2g}"


def differing_lines(comparison: Comparison) -> Iterable[str]:
    """Lines on the settings in which A and B differ, and on obstacles to the comparison."""
    for column, (a, b) in comparison.matched.differs.items():
        yield f"{column}: {a} → {b}"
    for obstacle in comparison.obstacles:
        yield f"careful: {obstacle}."


def note_lines(comparison: Comparison) -> Iterable[str]:
    """What rates divide by, refused figures, how it was done, and what the files say."""
    if any(row.metric.form == "per_s" for row in comparison.rows):
        yield f"{GOODPUT_DIVISOR}, output tokens by the makespan, which includes the drain."
    for name, why in comparison.refused.items():
        yield f"{name} is left out: {why}."
    first = comparison.rows[0]
    paired = all(row.paired for row in comparison.rows)
    pairing = "pairs of the same requests, " if paired else ""
    yield (
        f"{first.seeds_a} and {first.seeds_b} seeds; intervals from {pairing}"
        "seeds and then blocks of consecutive requests drawn again (bootstrap); figures are means "
        "over seeds, shares change in points and all else in percent of the first."
    )
    if any(row.stationary is False for row in comparison.rows):
        yield (
            "overloaded: a queue grows for as long as load lasts, or attainment drifts, so that "
            "the size of the difference depends on the time of arrivals that the row names."
        )
    leads = comparison.leads.values()
    if any(map(_inside, comparison.rows)) or any(lead.in_reality is False for lead in leads):
        yield NOTE
    yield from comparison.notes


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """All of it as plain values; what is not known is None."""
    return {
        "a": comparison.name_a,
        "b": comparison.name_b,
        "differs": {c: list(pair) for c, pair in comparison.matched.differs.items()},
        "confidence": comparison.confidence,
        "clock": comparison.clock,
        "better": comparison.count("better"),
        "worse": comparison.count("worse"),
        "no_difference_shown": comparison.count("none"),
        "unlike": {c: list(pair) for c, pair in comparison.matched.unlike.items()},
        "obstacles": list(comparison.obstacles),
        "refused": dict(comparison.refused),
        "notes": list(comparison.notes),
        "rates_in_slo": [
            {
                "label": label,
                "a_rps": lead.a_rps,
                "b_rps": lead.b_rps,
                "difference_low": lead.bounds.low,
                "difference_high": lead.bounds.high,
                "verdict": lead.verdict,
                "in_reality": lead.in_reality,
            }
            for label, lead in comparison.leads.items()
        ],
        "rows": [row_json(row) for row in comparison.rows],
    }


def row_json(row: Row) -> dict[str, Any]:
    """One row as a JSON object; unknown numbers are None."""
    plain: dict[str, Any] = {
        "label": row.label,
        "rate_rps": row.rate_rps,
        "metric": row.metric.short,
        "unit": row.metric.form,
        "higher_is_better": row.metric.higher_is_better,
    }
    for name in ("a", "b", "difference", "relative", "p", "p_holm", "drifting_after_s"):
        plain[name] = finite(getattr(row, name))
    for name, bounds in (("difference", row.bounds), ("relative", row.relative_bounds)):
        plain |= {f"{name}_low": finite(bounds.low), f"{name}_high": finite(bounds.high)}
    for name in (
        "significant",
        "verdict",
        "in_reality",
        "stationary",
        "paired",
        "seeds_a",
        "seeds_b",
        "requests",
    ):
        plain[name] = getattr(row, name)
    return plain


_WORDS = {**WORDS, "unknown": "not known"}
_ESCAPED = {c: f"\\{c}" for c in "\\`*_{}[]<>()#+!|~@"}


def judgement_markdown(compared: Comparison, judgement: Judgement) -> str:
    """Verdict, a table of all figures with intervals, and notes."""
    limit = f"{100 * judgement.max_regression:g} %"
    failed = {id(regression.row) for regression in judgement.regressions}
    undecided = {id(regression.row) for regression in judgement.open_rows}
    first = (
        f"✅ Passed: nothing is significantly worse by more than {limit}."
        if judgement.passed
        else f"❌ Failed: {len(failed)} of {len(compared.rows)} figures are significantly worse by "
        f"more than {limit}."
    )
    heads = ("", "req/s", "metric", "baseline", "candidate", "change", "95 % interval", "p")
    lines = [
        "### slo-bench gate",
        "",
        first,
        "",
        f"| {' | '.join((*heads, 'verdict'))} |",
        "|---|---:|---|---:|---:|---:|---|---:|---|",
    ]
    for row in compared.rows:
        verdict = _WORDS[row.verdict]
        if id(row) in failed:
            verdict = f"**{verdict}, beyond {limit}**"
        elif id(row) in undecided:
            verdict += f", though the estimate is beyond {limit}"
        names = escaped(row.label), _rate_text(row), escaped(row.metric.short)
        lines.append(f"| {' | '.join((*names, *_figures(row), p_text(row.p_holm), verdict))} |")
    notes = (
        headline(compared),
        *lead_lines(compared),
        *differing_lines(compared),
        *note_lines(compared),
    )
    lines += ["", *(f"- {escaped(line)}" for line in notes)]
    return "\n".join(lines) + "\n"


def not_comparable_markdown(why: str) -> str:
    """The same where the two cannot be compared."""
    return f"### slo-bench gate\n\n⚠️ Not comparable: {escaped(why)}\n"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: names may be those of strangers."""
    flat = " ".join(text.split())
    return "".join(_ESCAPED.get(c, c) for c in flat if c.isprintable())


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    return write_page(comparison_page(comparison), out)


def comparison_page(comparison: Comparison) -> str:
    """HTML text of the comparison's page."""
    names = series(comparison)
    drawn = figures(comparison, names)
    badge = "simulated" if comparison.a.simulated else "measured"
    if comparison.a.simulated != comparison.b.simulated:
        badge = "simulated and measured"
    return page(
        "comparison.html",
        page_data(names, badge, drawn),
        heading=f"{comparison.name_b} against {comparison.name_a}",
        answer=" ".join((headline(comparison), *lead_lines(comparison))),
        differing=list(differing_lines(comparison)),
        of=comparison,
        figures=drawn,
        badge=badge,
        rows=rows_table(comparison, labels_of(comparison), holm=True),
        notes=note_lines(comparison),
        footer=f"{comparison.a.name}, {comparison.b.name}",
    )


def series(comparison: Comparison) -> list[str]:
    """The names of curves: what tells levels apart, or the pair where there is one."""
    alone = f"{comparison.name_b} against {comparison.name_a}"
    return list(dict.fromkeys(row.label or alone for row in comparison.rows))


def figures(comparison: Comparison, names: Sequence[str]) -> list[Figure]:
    """For each metric its change against offered rate, where there is more than one rate."""
    metrics = list(dict.fromkeys(row.metric for row in comparison.rows))
    rates = {row.rate_rps for row in comparison.rows}
    if len(rates) < 2 or None in rates:
        return []
    return [_figure(comparison, metric, names) for metric in metrics]


def _figure(comparison: Comparison, metric: RequestFigure, names: Sequence[str]) -> Figure:
    curves: list[View] = []
    for place, name in enumerate(names):
        rows = [
            row
            for row in comparison.rows
            if row.metric == metric and row.label in (name, "") and math.isfinite(_change(row)[0])
        ]
        rows.sort(key=lambda row: row.rate_rps or 0.0)
        if rows:
            rates, hollow = [row.rate_rps for row in rows], [not row.significant for row in rows]
            changes, low, high = map(list, zip(*map(_change, rows), strict=True))
            curves.append(curve(place, rates, changes, lo=low, hi=high, hollow=hollow))
    better = "up is better" if metric.higher_is_better else "down is better"
    unit = "in points" if metric.form == "share" else "in percent"
    line = {"axis": "y", "value": 0.0, "label": "no change"}
    return Figure(
        id=f"change-{metric.short}",
        title=f"Change of {metric.short}",
        note=f"{better.capitalize()}. Hollow marks: not significant among all rows.",
        x=Axis("offered rate, req/s", "rate"),
        y=Axis(f"change {unit}", "number" if metric.form == "share" else "percent"),
        views={ONLY: {"series": curves, "lines": [line]}},
    )


def _change(row: Row) -> tuple[float, float, float]:
    if row.metric.form == "share":
        return 100 * row.difference, 100 * row.bounds.low, 100 * row.bounds.high
    return row.relative, row.relative_bounds.low, row.relative_bounds.high
