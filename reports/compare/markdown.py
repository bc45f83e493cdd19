"""The judgement of a gate in Markdown, for a pull request."""

from __future__ import annotations

from ..figures.figure import rate_text
from .comparing import Comparison, Judgement, Row
from .text import change_bounds_text, change_text, headline, note_lines, p_text, value_text

_WORDS = {
    "better": "better",
    "worse": "worse",
    "none": "not distinguishable",
    "unknown": "not known",
}
_ESCAPED = {c: f"\\{c}" for c in "\\`*_{}[]<>()#+!|~@"}


def judgement_markdown(compared: Comparison, judgement: Judgement) -> str:
    """Verdict, a table of all figures with intervals, and notes."""
    limit = f"{100 * judgement.max_regression:g} %"
    failed = {id(one.row) for one in judgement.regressions}
    undecided = {id(one.row) for one in judgement.open_rows}
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
        lines.append(f"| {' | '.join((*_figures(row), verdict))} |")
    notes = (headline(compared), *note_lines(compared))
    lines += ["", *(f"- {escaped(line)}" for line in notes)]
    return "\n".join(lines) + "\n"


def not_comparable_markdown(why: str) -> str:
    """The same where the two cannot be compared."""
    return f"### slo-bench gate\n\n⚠️ Not comparable: {escaped(why)}\n"


def _figures(row: Row) -> tuple[str, ...]:
    return (
        escaped(row.label),
        "–" if row.rate_rps is None else rate_text(row.rate_rps),
        escaped(row.metric.name),
        value_text(row.metric, row.a),
        value_text(row.metric, row.b),
        change_text(row),
        change_bounds_text(row),
        p_text(row.p_holm),
    )


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: names may be those of strangers."""
    flat = " ".join(text.split())
    return "".join(_ESCAPED.get(c, c) for c in flat if c.isprintable())
