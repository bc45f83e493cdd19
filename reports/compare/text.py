"""A comparison in words and numbers: for people, and as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...workloads.parsing import finite
from ..figures.numbers import rate_text, seconds_text
from .comparing import Comparison, Row, Verdict
from .metrics import Metric
from .verdict import Interval

WORDS = {"better": "better", "worse": "worse", "none": "not shown", "unknown": "–"}
_COUNTED: dict[Verdict, str] = {
    "worse": "worse",
    "better": "better",
    "none": "no difference shown",
    "unknown": "nothing known",
}
_STYLES = {"better": "green", "worse": "red", "none": "dim", "unknown": "dim"}


def headline(comparison: Comparison) -> str:
    """How often B is better, worse or neither, in one sentence."""
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


def value_text(metric: Metric, value: float) -> str:
    """A figure with its unit."""
    if not math.isfinite(value):
        return "–"
    if metric.unit == "share":
        return f"{100 * value:.1f} %"
    if metric.unit == "s":
        return seconds_text(value) if value >= 0 else f"−{seconds_text(-value)}"
    return rate_text(value) if value >= 0 else f"−{rate_text(-value)}"


def change_text(row: Row) -> str:
    """The change with its sign: points of a share, else percent of A's value."""
    if row.metric.unit == "share":
        return _signed(100 * row.difference, " pts")
    return _signed(100 * row.relative, " %")


def change_bounds_text(row: Row) -> str:
    """Its interval in the same unit."""
    bounds = row.bounds if row.metric.unit == "share" else row.relative_bounds
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
    """Headline, what differs, one table for each pair of systems, notes."""
    parts: list[RenderableType] = [Text(headline(comparison), style="bold")]
    parts += [Text(line) for line in differing_lines(comparison)]
    labels = list(dict.fromkeys(row.label for row in comparison.rows))
    for label in labels:
        rows = [row for row in comparison.rows if row.label == label]
        parts.append(_table(comparison, label, rows))
    parts += [Text(line, style="dim") for line in note_lines(comparison)]
    return Group(*parts)


def _table(comparison: Comparison, label: str, rows: Sequence[Row]) -> Table:
    table = Table(
        title=Text(label) if label else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("metric", no_wrap=True)
    table.add_column("req/s", justify="right", no_wrap=True)
    for name in (comparison.name_a, comparison.name_b):
        table.add_column(Text(name, overflow="fold"), justify="right")
    table.add_column("change", justify="right", no_wrap=True)
    table.add_column(f"{comparison.confidence:.0%} interval", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row.metric.name),
            Text("–" if row.rate_rps is None else rate_text(row.rate_rps)),
            Text(value_text(row.metric, row.a)),
            Text(value_text(row.metric, row.b)),
            Text(change_text(row)),
            Text(change_bounds_text(row)),
            Text(WORDS[row.verdict], style=_STYLES[row.verdict]),
        )
    return table


def p_text(p: float) -> str:
    """Two digits, or that it is below a thousandth."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.2g}"


def differing_lines(comparison: Comparison) -> Iterable[str]:
    """What A and B are where they are not alike, and what stands in the way."""
    for column, (a, b) in comparison.matched.differs.items():
        yield f"{column}: {a} → {b}"
    for obstacle in comparison.obstacles:
        yield f"careful: {obstacle}."


def note_lines(comparison: Comparison) -> Iterable[str]:
    """Refused figures, how it was done, and what the files say of themselves."""
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
        "obstacles": list(comparison.obstacles),
        "refused": dict(comparison.refused),
        "notes": list(comparison.notes),
        "rows": [row_json(row) for row in comparison.rows],
    }


def row_json(row: Row) -> dict[str, Any]:
    """One row as plain values."""
    return {
        "label": row.label,
        "rate_rps": row.rate_rps,
        "metric": row.metric.name,
        "unit": row.metric.unit,
        "higher_is_better": row.metric.higher_is_better,
        "a": finite(row.a),
        "b": finite(row.b),
        "difference": finite(row.difference),
        **_ends("difference", row.bounds),
        "relative": finite(row.relative),
        **_ends("relative", row.relative_bounds),
        "p": finite(row.p),
        "p_holm": finite(row.p_holm),
        "significant": row.significant,
        "verdict": row.verdict,
        "paired": row.paired,
        "seeds_a": row.seeds_a,
        "seeds_b": row.seeds_b,
        "requests": row.requests,
    }


def _ends(name: str, bounds: Interval) -> dict[str, float | None]:
    return {f"{name}_low": finite(bounds.low), f"{name}_high": finite(bounds.high)}
