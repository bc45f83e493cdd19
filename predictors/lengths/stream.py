"""What a predictor would have made of answers in the order in which they came: drift, and cure.

Every answer is predicted before it is learnt from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...workloads.errors import SloBenchError
from ...workloads.labelled_prompts import LabelledPrompt
from .distribution import PredictedDistributions, buckets_in
from .length_samples import TEST, prompts_of, read_samples, seen_in, tokens_of
from .online import FEWEST, OnlinePredictor, Update
from .predictor import TrainedPredictor
from .predictor_config import PredictorConfig


@dataclass(frozen=True)
class StreamWindow:
    """Answers that came one after the other: shares in the predicted bucket.

    `update` is what was learnt at the window's end, where enough that was new had come.
    """

    first: int  # the place of its first answer in the stream
    rows: int
    as_trained: float
    corrected: float  # by what came before, and taught by updates before
    within_one: float
    baseline: float | None  # by the baseline predictor
    update: Update | None


@dataclass(frozen=True)
class StreamEvaluation:
    """A stream in windows, and what became of the answers kept back from training."""

    windows: tuple[StreamWindow, ...]
    old_rows: int
    old_before: float
    old_after: float


def stream(
    online: OnlinePredictor,
    rows: Sequence[LabelledPrompt],
    *,
    every: int,
    baseline: TrainedPredictor | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> StreamEvaluation:
    """Present `rows` in order and train after every `every` of them.

    Args:
        online: the predictor, which changes in memory and not on disk.
        rows: answers in order of arrival; the corpus is the workload by which priors are kept.
        every: answers in a window.
        baseline: another predictor to compare with, for example one trained on such answers from
            the start.
        progress: called with (answers that came, of how many).
    """
    old = online.samples[TEST]
    worth = online.config.neighbours
    old_before = _exact(online.uncorrected(old), old, worth)
    windows = []
    as_trained = online.uncorrected(rows).buckets(worth)
    named_baseline = None
    if baseline is not None:
        named_baseline = baseline.lengths(prompts_of(rows)).buckets(baseline.config.neighbours)
    for first in range(0, len(rows), every):
        came = rows[first : first + every]
        guesses, within = [], []
        for workload in dict.fromkeys(row.corpus for row in came):
            answers = [row for row in came if row.corpus == workload]
            predicted = online.lengths(answers, workload)
            off = np.abs(predicted.buckets(worth) - buckets_in(predicted.edges, tokens_of(answers)))
            guesses += (off == 0).tolist()
            within += (off <= 1).tolist()
            online.observe(answers, workload)
        waits = len(online.fresh()) >= FEWEST
        update = online.update() if waits and first + every < len(rows) else None
        true = buckets_in(online.config.shape.edges, tokens_of(came))
        static = as_trained[first : first + every] == true
        other = None if named_baseline is None else named_baseline[first : first + every] == true
        windows.append(
            StreamWindow(
                first,
                len(came),
                float(static.mean()),
                float(np.mean(guesses)),
                float(np.mean(within)),
                None if other is None else float(other.mean()),
                update,
            )
        )
        progress(first + len(came), len(rows))
    old_after = _exact(online.uncorrected(old), old, worth)
    return StreamEvaluation(tuple(windows), len(old), old_before, old_after)


def load_baseline(
    folder: Path, online: OnlinePredictor, rows: Sequence[LabelledPrompt], *, base: str | None
) -> TrainedPredictor:
    """Load a predictor to compare `online` with on `rows`.

    Raises:
        SloBenchError: it was trained on some of the rows, or has other buckets.
    """
    config = PredictorConfig.load(folder)
    if config.shape.edges != online.config.shape.edges:
        raise SloBenchError(f"the buckets of {folder} are others; compare predictors with the same")
    took_part = seen_in(read_samples(folder / config.samples_file))
    overlap = sum(map(took_part, rows))
    if overlap:
        raise SloBenchError(
            f"{folder} was trained or calibrated on {overlap:,} of the {len(rows):,} prompts to "
            "come, and would flatter; train it on others of their kind"
        )
    return TrainedPredictor.load(folder, base=base, config=config)


def _exact(
    predicted: PredictedDistributions, rows: Sequence[LabelledPrompt], neighbours: float
) -> float:
    if not rows:
        return float("nan")
    return float(
        (predicted.buckets(neighbours) == buckets_in(predicted.edges, tokens_of(rows))).mean()
    )
