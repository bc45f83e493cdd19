"""How long an answer will be, told to the server's policy: predicted when its request is due.

What reads prompts does so in a thread of its own, all requests at once that wait for it. Meanwhile
their clocks run: what a prediction costs is part of a request's latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from ....predictors.output_length import AtDispatch, LearnedLength, length_predictor
from ....workloads.workload import Workload
from ...core import records
from ...core.wire import PredictedLength
from .answers import Raw, read_answer
from .options import HttpOptions

AT_ONCE = 32  # requests whose prompts are read together, at most
_LENGTHS_STREAM = 3


class LengthSource(Protocol):
    """Says of requests how long their answers will be."""

    def of(self, rows: Sequence[int]) -> list[PredictedLength]:
        """In order; takes its time, so it is asked in a thread of its own."""
        ...

    @property
    def hears(self) -> bool:
        """Does it want to know what came?"""
        ...

    def heard(self, row: int, raw: Raw) -> None:
        """What came of a request; returns at once."""
        ...

    def close(self) -> None:
        """All have ended."""
        ...

    def drift(self, start_s: float) -> tuple[records.Told, ...]:
        """How right it was over time, where it followed; `start_s` by `time.perf_counter`."""
        ...


class PrecomputedLengths:
    """Lengths that nothing at dispatch could change: a constant, a noisy oracle."""

    hears = False

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def of(self, rows: Sequence[int]) -> list[PredictedLength]:
        """See `LengthSource`."""
        return [PredictedLength(int(self._tokens[row]), int(self._tokens[row])) for row in rows]

    def heard(self, row: int, raw: Raw) -> None:
        """See `LengthSource`."""

    def close(self) -> None:
        """See `LengthSource`."""

    def drift(self, start_s: float) -> tuple[records.Told, ...]:
        """See `LengthSource`."""
        return ()


class TrainedLengths:
    """Lengths that a trained predictor reads off prompts; answers are read in a thread of its own,
    where it follows what comes.
    """

    def __init__(self, predictor: AtDispatch) -> None:
        self._predictor = predictor
        self._hearing = ThreadPoolExecutor(1, thread_name_prefix="answers heard")

    def of(self, rows: Sequence[int]) -> list[PredictedLength]:
        """See `LengthSource`."""
        return [PredictedLength(*pair) for pair in self._predictor.lengths(rows)]

    @property
    def hears(self) -> bool:
        """See `LengthSource`."""
        return self._predictor.follower.online > 0

    def heard(self, row: int, raw: Raw) -> None:
        """See `LengthSource`."""
        self._hearing.submit(self._hear, row, raw)

    def _hear(self, row: int, raw: Raw) -> None:
        answer = read_answer(raw)
        if answer.outcome is records.Outcome.FINISHED:
            self._predictor.came(row, len(answer.token_s))

    def close(self) -> None:
        """See `LengthSource`."""
        self._hearing.shutdown()
        self._predictor.close()

    def drift(self, start_s: float) -> tuple[records.Told, ...]:
        """See `LengthSource`."""
        follower, found = self._predictor.follower, []
        begin_s = start_s
        for window in follower.all_windows():
            at_s = begin_s - start_s
            found += [
                records.Told(at_s, "lengths", "as told", window.exact),
                records.Told(at_s, "lengths", "as told, within one", window.within_one),
                records.Told(at_s, "lengths", "without correction", window.plain),
            ]
            begin_s = window.end_s
        found += [
            records.Told(at_s - start_s, "taught", "predictor", taught.step)
            for at_s, taught in follower.taught
            if taught.step
        ]
        return tuple(found)


def length_source(workload: Workload, options: HttpOptions) -> LengthSource | None:
    """What `options` ask for; None: policies are told nothing.

    Raises:
        SloBenchError: the predictor cannot be had.
    """
    if not options.length_predictor or options.values_field is None or not len(workload):
        return None
    rng = np.random.default_rng((options.length_seed, _LENGTHS_STREAM))
    predictor = length_predictor(options.length_predictor)
    if isinstance(predictor, LearnedLength) and workload.texts is not None and any(workload.texts):
        return TrainedLengths(predictor.at_dispatch(workload, rng, options.lengths_folder))
    return PrecomputedLengths(predictor.predict(workload, rng))
