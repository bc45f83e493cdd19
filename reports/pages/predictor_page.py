"""An evaluation of a predictor of answer lengths: text, plain values, and a page of its own."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from ...predictors.lengths.distribution import COVERAGE
from ...predictors.lengths.evaluate_predictor import ALL, LORA, MODEL, PredictorEvaluation, Score
from ...predictors.lengths.predictor_config import PredictorConfig
from ...workloads.parsing import plain_fields
from ..figures.drawing import page_data
from ..figures.figure import ONLY, Axis, Figure, curve
from .document import page, write_page
from .table import Cell, Table, one_group

if TYPE_CHECKING:
    from ...predictors.lengths.stream import StreamEvaluation, StreamWindow  # imports torch

CLAIMED = (
    "UELLM (thesis, §3.3.1) reports 99.51 % exact on its own test set (Alpaca, ChatGLM3-6B) and "
    "over 80 % on Natural Questions and Alpaca-GPT4, which it was not trained on."
)
_CURVES = ("as trained", "online", "baseline")
_HEADS = ("predictor", "rows", "exact", "± 1", "MAE", "τ", "ECE", "in 90 %", "width")


def _share(share: float, rows: int) -> str:
    """A share with half of its 95 % interval."""
    half = 1.96 * math.sqrt(share * (1 - share) / rows)
    return f"{100 * share:.1f} ± {100 * half:.1f} %"


def headline(evaluation: PredictorEvaluation) -> str:
    """One sentence: share of correct buckets, compared with the best baseline."""
    first = evaluation.scores[0].corpus
    here = [score for score in evaluation.scores if score.corpus == first]
    best = max((s for s in here if s.predictor != LORA), key=lambda s: s.exact)
    ours = next(s for s in here if s.predictor == LORA)
    return (
        f"{_share(ours.exact, ours.rows)} of {ours.rows:,} answers in the predicted bucket, "
        f"{_share(ours.within_one, ours.rows)} within one; {best.predictor} {best.exact:.1%} and "
        f"{best.within_one:.1%}."
    )


def notes(evaluation: PredictorEvaluation, config: PredictorConfig) -> list[str]:
    """Lines below the table: base model, data, and what the columns mean."""
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
    for latency in evaluation.latencies:
        lines.append(
            f"Latency, batch {latency.batch}, one thread, text to distribution: median "
            f"{1e3 * latency.median_s:.1f} ms, p99 {1e3 * latency.p99_s:.1f} ms; of CPU "
            f"{1e3 * latency.cpu_median_s:.1f} ms."
        )
    ours = next(score for score in evaluation.scores if score.predictor == LORA)
    lines.append(
        f"{ours.longest_coverage:.1%} of the answers are not above the 90 % quantile that policies "
        "are told."
    )
    if math.isfinite(ours.waiting_saved):
        lines.append(
            f"Serving in the predicted order saves {ours.waiting_saved:.1%} of the waiting that "
            "the order of true lengths saves over random order."
        )
    for corpus, accuracy in evaluation.leak.items():
        lines.append(
            f"Leak check, {corpus}: counts taken from the answer's text would give "
            f"{accuracy:.1%} exact; no prediction, for the answer is not there yet."
        )
    for corpus, count in evaluation.left_out.items():
        if count:
            lines.append(
                f"{corpus}: {count:,} rows left out whose prompt was learnt or calibrated from."
            )
    moved = sorted(
        s
        for s in {score.corpus for score in evaluation.scores} - evaluation.trained_on - {ALL}
        if not s.startswith(MODEL)
    )
    if moved:
        lines.append(f"Not trained on: {', '.join(moved)} (transfer). {CLAIMED}")
    else:
        lines.append(CLAIMED)
    if evaluation.unknown_models:
        lines.append(f"Models that it never saw: {', '.join(evaluation.unknown_models)}.")
    return lines


def evaluation_text(evaluation: PredictorEvaluation, config: PredictorConfig) -> RenderableType:
    """Terminal output: headline, table and notes."""
    lines = [Text(line, style="dim") for line in notes(evaluation, config)]
    return Group(Text(headline(evaluation), style="bold"), _scores(evaluation).rich(), *lines)


def _scores(evaluation: PredictorEvaluation) -> Table:
    groups = [
        (_corpus(evaluation, corpus_scores[0]), [_cells(score) for score in corpus_scores])
        for _, group in itertools.groupby(evaluation.scores, key=lambda score: score.corpus)
        for corpus_scores in [list(group)]
    ]
    caption = "Share of answers in the predicted bucket, and beside it what must be beaten"
    return Table("How good it is", _HEADS, groups, caption=caption, badge="measured")


def _corpus(evaluation: PredictorEvaluation, score: Score) -> str:
    new = not score.corpus.startswith((ALL, MODEL)) and score.corpus not in evaluation.trained_on
    return f"{score.corpus} (transfer)" if new else score.corpus


def _cells(score: Score) -> list[Cell]:
    tau = f"{score.kendall_tau:.3f}" if math.isfinite(score.kendall_tau) else "–"
    style = "bold" if score.predictor == LORA else ""
    texts = (
        score.predictor,
        f"{score.rows:,}",
        f"{score.exact:.1%}",
        f"{score.within_one:.1%}",
        f"{score.mae_tokens:.1f}",
        tau,
        f"{score.calibration_error:.3f}",
        f"{score.coverage:.1%}",
        f"× {score.interval_ratio:.1f}",
    )
    return [Cell(text, style=style) for text in texts]


def evaluation_json(evaluation: PredictorEvaluation, config: PredictorConfig) -> dict[str, Any]:
    """Everything as plain values; what does not exist is null."""
    return {
        "base": config.base.name,
        "head": config.shape.head,
        "bucket_edges": list(config.shape.edges),
        "labels": config.labels,
        "conformal_offset": config.conformal_offset,
        "interval": COVERAGE,
        "scores": [
            {
                **plain_fields(score),
                "transfer": score.corpus not in evaluation.trained_on | {ALL}
                and not score.corpus.startswith(MODEL),
            }
            for score in evaluation.scores
        ],
        "reliability": [dataclasses.asdict(bin_) for bin_ in evaluation.reliability],
        "confusion": evaluation.confusion.tolist(),
        "latencies": [dataclasses.asdict(latency) for latency in evaluation.latencies],
        "leak_exact": dict(evaluation.leak),
        "left_out": dict(evaluation.left_out),
        "unknown_models": list(evaluation.unknown_models),
    }


def write_evaluation(evaluation: PredictorEvaluation, config: PredictorConfig, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    figures = [reliability_figure(evaluation)]
    text = page(
        "predictor.html",
        page_data([LORA], "measured", figures),
        heading="Predicted lengths of answers",
        answer=headline(evaluation),
        scores=_scores(evaluation),
        figures=figures,
        edges=config.shape.edges,
        confusion=evaluation.confusion.tolist(),
        notes=notes(evaluation, config),
        footer=config.base.name,
    )
    return write_page(text, out)


def reliability_figure(evaluation: PredictorEvaluation) -> Figure:
    """Share of correct predictions against the predicted probability."""
    bins = evaluation.reliability
    labels = [f"{bin_.rows:,} answers" for bin_ in bins]
    reliability = curve(0, [b.said for b in bins], [b.true for b in bins], labels=labels)
    diagonal = {"axis": "diagonal", "value": 1.0, "label": "as sure as right"}
    return Figure(
        id="reliability",
        title="Reliability",
        note="Predictions in ten bins by the probability of their likeliest bucket; below the line "
        "it is surer than it should be.",
        x=Axis("said probability", "percent", top=1.0),
        y=Axis("share that was right", "percent", top=1.0),
        views={ONLY: {"series": [reliability], "lines": [diagonal]}},
        hover="point",
    )


def stream_text(came: StreamEvaluation) -> RenderableType:
    """A line for each window, and what was forgotten."""
    table = _windows(came)
    return Group(
        table.rich(table.label), *(Text(line, style="dim") for line in _stream_notes(came))
    )


def _windows(came: StreamEvaluation) -> Table:
    heads = ("answers", *_curves(came), "online, within 1", "learnt after it")
    rows = [_stream_cells(window) for window in came.windows]
    label = "Answers in the predicted bucket"
    caption = "Share of answers in the predicted bucket"
    return one_group(
        label, heads, rows, texts=(0, len(heads) - 1), caption=caption, badge="measured"
    )


def _curves(came: StreamEvaluation) -> Sequence[str]:
    return _CURVES[: 3 if any(window.baseline is not None for window in came.windows) else 2]


def _stream_cells(window: StreamWindow) -> list[str]:
    shares = window.as_trained, window.corrected, window.baseline, window.within_one
    update = window.update
    return [
        f"{window.first + 1}–{window.first + window.rows}",
        *(f"{share:.1%}" for share in shares if share is not None),
        "–" if update is None else f"{update.rows} answers, {update.verdict}",
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
    shares: list[Sequence[float | None]] = [
        [window.as_trained for window in came.windows],
        [window.corrected for window in came.windows],
        [window.baseline for window in came.windows],
    ]
    ends = [window.first + window.rows for window in came.windows]
    curves = [curve(place, ends, shares[place]) for place in range(len(_curves(came)))]
    learnt = [
        {"axis": "x", "value": window.first + window.rows, "label": window.update.verdict}
        for window in came.windows
        if window.update is not None
    ]
    return Figure(
        id="drift",
        title="Answers in the predicted bucket",
        note="Every answer is predicted before it is learnt from. Vertical lines: the adapter was "
        "taught, and what was taken of it.",
        x=Axis("answers that came", "number"),
        y=Axis("share in the predicted bucket", "percent", top=1.0),
        views={ONLY: {"series": curves, "lines": learnt}},
    )


def write_stream(came: StreamEvaluation, config: PredictorConfig, out: Path) -> Path:
    """Write the page of a stream, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    figures = [drift_figure(came)]
    text = page(
        "stream.html",
        page_data(list(_CURVES), "measured", figures),
        heading="Predicted lengths of answers, as they came",
        figures=figures,
        windows=_windows(came),
        notes=_stream_notes(came),
        footer=config.base.name,
    )
    return write_page(text, out)


def stream_json(came: StreamEvaluation) -> dict[str, Any]:
    """The stream's results as plain JSON values."""
    return plain_fields(came)
