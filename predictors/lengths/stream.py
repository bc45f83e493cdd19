"""What a predictor would have made of answers in the order in which they came: drift, and cure.

Every answer is predicted before it is learnt from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...workloads.answered import Answered
from .distribution import Lengths, buckets_in
from .online import FEWEST, OnlinePredictor, Update
from .samples import TEST


@dataclass(frozen=True)
class Window:
    """Answers that came one after the other: shares in the predicted bucket.

    `update` is what was learnt at the window's end, where enough that was new had come.
    """

    first: int  # the place of its first answer in the stream
    rows: int
    as_trained: float
    corrected: float  # by what came before, and taught by updates before
    within_one: float
    update: Update | None


@dataclass(frozen=True)
class Stream:
    """A stream in windows, and what became of the answers kept back from training."""

    windows: tuple[Window, ...]
    old_rows: int
    old_before: float
    old_after: float


def stream(
    online: OnlinePredictor,
    rows: Sequence[Answered],
    *,
    every: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Stream:
    """Let `rows` come in order; teach after every so many.

    Args:
        online: the predictor, which changes in memory and not on disk.
        rows: answers in order of arrival; the corpus is the workload that priors are kept by.
        every: answers in a window.
        progress: called with (answers that came, of how many).
    """
    old = online.samples[TEST]
    old_before = _exact(online.uncorrected(old), old)
    windows = []
    as_trained = online.uncorrected(rows).buckets()
    for first in range(0, len(rows), every):
        came = rows[first : first + every]
        guesses, within = [], []
        for workload in dict.fromkeys(row.corpus for row in came):
            of = [row for row in came if row.corpus == workload]
            told = online.lengths(of, workload)
            off = np.abs(told.buckets() - _true(told.edges, of))
            guesses += (off == 0).tolist()
            within += (off <= 1).tolist()
            online.observe(of, workload)
        waits = len(online.fresh()) >= FEWEST
        update = online.update() if waits and first + every < len(rows) else None
        edges = online.config.shape.edges
        static = as_trained[first : first + every] == _true(edges, came)
        windows.append(
            Window(
                first,
                len(came),
                float(static.mean()),
                float(np.mean(guesses)),
                float(np.mean(within)),
                update,
            )
        )
        progress(first + len(came), len(rows))
    return Stream(tuple(windows), len(old), old_before, _exact(online.uncorrected(old), old))


def _true(edges: tuple[int, ...], rows: Sequence[Answered]) -> np.ndarray:
    return buckets_in(edges, np.array([row.output_tokens for row in rows]))


def _exact(told: Lengths, rows: Sequence[Answered]) -> float:
    return float((told.buckets() == _true(told.edges, rows)).mean()) if rows else float("nan")
