"""An evaluation of a predictor of answer lengths: text, plain values, and a page of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...predictors.lengths.config import PredictorConfig
from ...predictors.lengths.distribution import COVERAGE
from ...predictors.lengths.evaluate import ALL, LORA, PredictorEvaluation, Score
from ...predictors.lengths.stream import StreamEvaluation, StreamWindow
from ..figures.figure import ONLY, Axis, Figure, View, as_json
from . import sections
from .document import page, write_page

CLAIMED = (
    "UELLM (thesis, §3.3.1) reports 99.51 % exact on its own test set (Alpaca, ChatGLM3-6B) and "
    "over 80 % on Natural Questions and Alpaca-GPT4, which it was not trained on."
)
_MEASURED = pd.DataFrame({"backend": ["real"], "step_time": ["measured"]})  # for the badge
_CURVES = ("as trained", "online", "baseline")
_LEARNT = "learnt after it"
_HEADS = ("exact", "± 1", "MAE", "τ", "ECE", "in 90 %", "width")


def headline(found: PredictorEvaluation) -> str:
    """How often the right bucket is told, against the best of the others."""
    first = found.scores[0].corpus
    here = [score for score in found.scores if score.corpus == first]
    best = max((s for s in here if s.predictor != LORA), key=lambda s: s.exact)
    ours = next(s for s in here if s.predictor == LORA)
    return (
        f"{ours.exact:.1%} of {ours.rows:,} answers in the predicted bucket, "
        f"{ours.within_one:.1%} within one; {best.predictor} {best.exact:.1%} and "
        f"{best.within_one:.1%}."
    )


def notes(found: PredictorEvaluation, config: PredictorConfig) -> list[str]:
    """What a reader must know beside the table."""
    lines = [
        f"Base {config.base.name}, {config.shape.head} over {len(config.shape.edges)} buckets; "
        f"lengths: {config.labels}.",
        "exact, ± 1: in the named bucket, or in a neighbour of it. Named is the likeliest where a "
        "neighbour counts as a share of the true one: for each predictor the share with most exact "
        f"and ± 1 together on rows of its own ({LORA}: {config.neighbours:g}).",
        "MAE: tokens; τ: Kendall's; ECE: calibration error.",
        "Interval (in 90 %): 90 % after conformal correction of "
        f"{config.conformal_offset:+.3f} on log(1 + tokens), on rows of its own; width: upper end "
        "/ lower end.",
    ]
    for taken in found.latencies:
        lines.append(
            f"Latency, batch {taken.batch}, one thread, text to distribution: median "
            f"{1e3 * taken.median_s:.1f} ms, p99 {1e3 * taken.p99_s:.1f} ms; of CPU "
            f"{1e3 * taken.cpu_median_s:.1f} ms."
        )
    for corpus, accuracy in found.leak.items():
        lines.append(
            f"Leak check, {corpus}: counts taken from the answer's text would give "
            f"{accuracy:.1%} exact; no prediction, for the answer is not there yet."
        )
    for corpus, count in found.left_out.items():
        if count:
            lines.append(
                f"{corpus}: {count:,} rows left out whose prompt was learnt or calibrated from."
            )
    moved = sorted({s.corpus for s in found.scores} - found.trained_on - {ALL})
    if moved:
        lines.append(f"Not trained on: {', '.join(moved)} (transfer). {CLAIMED}")
    else:
        lines.append(CLAIMED)
    if found.unknown_models:
        lines.append(f"Models that it never saw: {', '.join(found.unknown_models)}.")
    return lines


def evaluation_text(found: PredictorEvaluation, config: PredictorConfig) -> RenderableType:
    """Headline, table, notes."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("predictor")
    for name in ("rows", *_HEADS):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for score in found.scores:
        if last and score.corpus != last:
            table.add_section()
        if score.corpus != last:
            table.add_row(Text(_corpus(found, score), style="underline"))
        style = "bold" if score.predictor == LORA else ""
        cells = (score.predictor, f"{score.rows:,}", *_cells(score))
        table.add_row(*(Text(cell, style=style) for cell in cells))
        last = score.corpus
    lines = [Text(line, style="dim") for line in notes(found, config)]
    return Group(Text(headline(found), style="bold"), table, *lines)


def _corpus(found: PredictorEvaluation, score: Score) -> str:
    new = score.corpus != ALL and score.corpus not in found.trained_on
    return f"{score.corpus} (transfer)" if new else score.corpus


def _cells(score: Score) -> list[str]:
    tau = f"{score.kendall_tau:.3f}" if math.isfinite(score.kendall_tau) else "–"
    return [
        f"{score.exact:.1%}",
        f"{score.within_one:.1%}",
        f"{score.mae_tokens:.1f}",
        tau,
        f"{score.calibration_error:.3f}",
        f"{score.coverage:.1%}",
        f"× {score.interval_ratio:.1f}",
    ]


def evaluation_json(found: PredictorEvaluation, config: PredictorConfig) -> dict[str, Any]:
    """Everything as plain values; what does not exist is null."""

    def known(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {
        "base": config.base.name,
        "head": config.shape.head,
        "bucket_edges": list(config.shape.edges),
        "labels": config.labels,
        "conformal_offset": config.conformal_offset,
        "interval": COVERAGE,
        "scores": [
            {
                **{name: known(value) for name, value in dataclasses.asdict(score).items()},
                "transfer": score.corpus not in found.trained_on | {ALL},
            }
            for score in found.scores
        ],
        "reliability": [dataclasses.asdict(bin_) for bin_ in found.reliability],
        "confusion": found.confusion.tolist(),
        "latencies": [dataclasses.asdict(latency) for latency in found.latencies],
        "leak_exact": dict(found.leak),
        "left_out": dict(found.left_out),
        "unknown_models": list(found.unknown_models),
    }


def write_evaluation(found: PredictorEvaluation, config: PredictorConfig, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    return _write(evaluation_page(found, config), out)


def _write(page: str, out: Path) -> Path:
    return write_page(page, out)


def evaluation_page(found: PredictorEvaluation, config: PredictorConfig) -> str:
    """The whole page."""
    drawn = [reliability_figure(found)]
    told = "".join(f"<p>{escape(line)}</p>" for line in notes(found, config))
    heading = "Predicted lengths of answers"
    body = f"""
<a class="skip" href="#prediction">Skip to the table</a>
<header class="top"><p class="eyebrow">Predictor evaluated by slo-bench</p>
<h1>{escape(heading)}</h1></header>
<main>
<p class="answer">{escape(headline(found))}</p>
<noscript><div class="notice">The figure needs JavaScript; the tables do not.</div></noscript>
{section(found, config, drawn)}
<section id="notes"><h2>How it was done</h2>{told}</section>
</main>
<footer>{escape(config.base.name)}</footer>"""
    data = {"series": [LORA], "origin": "measured", "rate": "", **as_json(drawn)}
    return page(f"{heading} – slo-bench", body, data)


def section(found: PredictorEvaluation, config: PredictorConfig, drawn: Sequence[Figure]) -> str:
    """Table, reliability and confusion, to stand in a page that has the report's script."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in ("Rows", *_HEADS))
    rows = []
    for at, score in enumerate(found.scores):
        if not at or found.scores[at - 1].corpus != score.corpus:
            rows.append(
                f'<tr class="group"><th scope="rowgroup" colspan="{len(_HEADS) + 2}">'
                f"{escape(_corpus(found, score))}</th></tr>"
            )
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(score))
        rows.append(
            f'<tr><th scope="row">{escape(score.predictor)}</th><td>{score.rows:,}</td>{cells}</tr>'
        )
    shown = "".join(sections.figure(figure, _MEASURED) for figure in drawn)
    return (
        '<section id="prediction"><h2>How good it is</h2>'
        '<div class="card scroll"><table><caption>Share of answers in the predicted bucket, and '
        f"beside it what must be beaten {sections.badge(_MEASURED)}</caption><thead><tr>"
        f'<th scope="col">Predictor</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
        f'</table></div></section><section id="calibration"><h2>How sure it is</h2>'
        f'<div class="grid">{shown}{_confusion(found, config)}</div></section>'
    )


def reliability_figure(found: PredictorEvaluation) -> Figure:
    """How often the likeliest bucket was right against how likely it was said to be."""
    bins = found.reliability
    curve: View = {
        "s": 0,
        "x": [bin_.said for bin_ in bins],
        "y": [bin_.true for bin_ in bins],
        "labels": [f"{bin_.rows:,} answers" for bin_ in bins],
    }
    diagonal = {"axis": "diagonal", "value": 1.0, "label": "as sure as right"}
    return Figure(
        id="reliability",
        kind="lines",
        title="Reliability",
        note="Predictions in ten bins by the probability of their likeliest bucket; below the line "
        "it is surer than it should be.",
        x=Axis("said probability", "percent", top=1.0),
        y=Axis("share that was right", "percent", top=1.0),
        views={ONLY: {"series": [curve], "lines": [diagonal]}},
        hover="point",
    )


def _confusion(found: PredictorEvaluation, config: PredictorConfig) -> str:
    """True against predicted buckets; the darker, the larger the share of the true bucket."""
    names = [str(edge) for edge in config.shape.edges]
    heads = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = []
    for name, counts in zip(names, found.confusion.tolist(), strict=True):
        whole = max(1, sum(counts))
        cells = "".join(
            f'<td style="background:color-mix(in srgb,var(--s0) {60 * count / whole:.0f}%,'
            f'transparent)">{count or ""}</td>'
            for count in counts
        )
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return (
        '<figure class="figure" id="figure-confusion"><figcaption><h3>Confusion</h3>'
        f'{sections.badge(_MEASURED)}</figcaption><div class="scroll"><table><thead><tr>'
        f'<th scope="col">true ↓ said →</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
        '</table></div><p class="note">Answers by their true bucket (rows) and the named one '
        "(columns), each named by its first length in tokens.</p></figure>"
    )


def stream_text(came: StreamEvaluation) -> RenderableType:
    """A line for each window, and what was forgotten."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="Answers in the predicted bucket"
    )
    for name in _stream_heads(came):
        table.add_column(name, justify="left" if name == _LEARNT else "right")
    for window in came.windows:
        table.add_row(*_stream_cells(window))
    return Group(table, *(Text(line, style="dim") for line in _stream_notes(came)))


def _compared(came: StreamEvaluation) -> bool:
    return any(window.baseline is not None for window in came.windows)


def _stream_heads(came: StreamEvaluation) -> list[str]:
    return ["answers", *_CURVES[: 3 if _compared(came) else 2], "online, within 1", _LEARNT]


def _stream_cells(window: StreamWindow) -> list[str]:
    shares = [window.as_trained, window.corrected]
    if window.baseline is not None:
        shares.append(window.baseline)
    learnt = "–"
    if window.update is not None:
        learnt = f"{window.update.rows} answers, {window.update.verdict}"
    return [
        f"{window.first + 1}–{window.first + window.rows}",
        *(f"{share:.1%}" for share in (*shares, window.within_one)),
        learnt,
    ]


def _stream_notes(came: StreamEvaluation) -> list[str]:
    if not came.old_rows:
        return []
    return [
        f"Of {came.old_rows:,} older answers kept back: {came.old_before:.1%} before, "
        f"{came.old_after:.1%} after."
    ]


def drift_figure(came: StreamEvaluation) -> Figure:
    """Shares in the named bucket, window after window."""
    shares = [
        [window.as_trained for window in came.windows],
        [window.corrected for window in came.windows],
        [window.baseline for window in came.windows],
    ]
    ends = [window.first + window.rows for window in came.windows]
    curves: list[View] = [
        {"s": place, "x": ends, "y": shares[place]} for place in range(3 if _compared(came) else 2)
    ]
    learnt = [
        {"axis": "x", "value": window.first + window.rows, "label": window.update.verdict}
        for window in came.windows
        if window.update is not None
    ]
    return Figure(
        id="drift",
        kind="lines",
        title="Answers in the predicted bucket",
        note="Every answer is predicted before it is learnt from. Vertical lines: the adapter was "
        "taught, and what was taken of it.",
        x=Axis("answers that came", "number"),
        y=Axis("share in the predicted bucket", "percent", top=1.0),
        views={ONLY: {"series": curves, "lines": learnt}},
    )


def stream_page(came: StreamEvaluation, config: PredictorConfig) -> str:
    """The whole page of a stream."""
    drawn = [drift_figure(came)]
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in _stream_heads(came))
    lines = [_stream_cells(window) for window in came.windows]
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines]
    rows = "".join(f"<tr>{line}</tr>" for line in cells)
    told = "".join(f"<p>{escape(line)}</p>" for line in _stream_notes(came))
    shown = "".join(sections.figure(figure, _MEASURED) for figure in drawn)
    heading = "Predicted lengths of answers, as they came"
    body = f"""
<a class="skip" href="#drift">Skip to the table</a>
<header class="top"><p class="eyebrow">Predictor at work, by slo-bench</p>
<h1>{escape(heading)}</h1></header>
<main>
<noscript><div class="notice">The figure needs JavaScript; the table does not.</div></noscript>
<section><div class="grid">{shown}</div></section>
<section id="drift"><h2>Window by window</h2><div class="card scroll"><table>
<caption>Share of answers in the predicted bucket {sections.badge(_MEASURED)}</caption>
<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{told}</section>
</main>
<footer>{escape(config.base.name)}</footer>"""
    data = {"series": list(_CURVES), "origin": "measured", "rate": "", **as_json(drawn)}
    return page(f"{heading} – slo-bench", body, data)


def write_stream(came: StreamEvaluation, config: PredictorConfig, out: Path) -> Path:
    """Write the page of a stream, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    return _write(stream_page(came, config), out)


def stream_json(came: StreamEvaluation) -> dict[str, Any]:
    """The same as plain values."""
    plain = dataclasses.asdict(came)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in plain.items()
    }
