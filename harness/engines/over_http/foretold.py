"""How long an answer will be, told to the server's policy: predicted when its request is due.

What reads prompts does so in a thread of its own, all requests at once that wait for it. Meanwhile
their clocks run: what a prediction costs is part of a request's latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ....predictors.output_length import AtDispatch, Learned, length_predictor
from ....workloads.workload import Workload
from ...core.wire import Told
from .options import HttpOptions

AT_ONCE = 32  # requests whose prompts are read together, at most
_LENGTHS_STREAM = 3


class Foretells(Protocol):
    """Says of requests how long their answers will be."""

    def of(self, rows: Sequence[int]) -> list[Told]:
        """In order; takes its time, so it is asked in a thread of its own."""
        ...


class Known:
    """Lengths that nothing at dispatch could change: a constant, a noisy oracle."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def of(self, rows: Sequence[int]) -> list[Told]:
        """See `Foretells`."""
        return [Told(int(self._tokens[row]), int(self._tokens[row])) for row in rows]


class Read:
    """Lengths that a trained predictor reads off prompts."""

    def __init__(self, predictor: AtDispatch) -> None:
        self._predictor = predictor
        self.of([0])  # the first takes longer than any

    def of(self, rows: Sequence[int]) -> list[Told]:
        """See `Foretells`."""
        return [Told(*pair) for pair in self._predictor.lengths(rows)]


def foretells(workload: Workload, options: HttpOptions) -> Foretells | None:
    """What `options` ask for; None: policies are told nothing.

    Raises:
        SloBenchError: the predictor cannot be had.
    """
    if not options.length_predictor or options.values_field is None or not len(workload):
        return None
    rng = np.random.default_rng((options.length_seed, _LENGTHS_STREAM))
    predictor = length_predictor(options.length_predictor)
    if isinstance(predictor, Learned) and workload.texts is not None and any(workload.texts):
        return Read(predictor.at_dispatch(workload, rng))
    return Known(predictor.predict(workload, rng))
