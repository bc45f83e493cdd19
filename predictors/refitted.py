"""Ascendra's performance model, fitted again and again to the batches that an instance has run.

Source: Ascendra, §5.1 and appendix A: t = C1 (tM + tF) + C2 max(tM, tF) + C3 tM + C4 tF + C5, with
tM the time of all bytes and tF that of all operations at the hardware's peak.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .placement import Placement
from .profiles.formulas import AscendraStepTime, ascendra_terms
from .profiles.least_squares import non_negative
from .profiles.step_time_table import Host
from .step_time import work

_FIRST_FIT = 64  # batches
_REFIT = 1024
_WINDOW = 4096
_ONE_IN = 4  # recent batches of a refit
_PRIOR = (0.0, 1.4, 0.0, 0.0, 0.004)  # of the peak, and seconds: before anything was seen


class RefittedModel:
    """Predicts step times and learns from measured ones.

    Coefficients are not negative (NNLS) and minimise relative errors over the last batches: C1
    follows from C3 and C4, so that least squares without bounds would be arbitrary. FLOPs count a
    multiplication and an addition, chunks attend causally to themselves, KV heads are counted: the
    printed appendix differs (see docs/papers.md).
    """

    def __init__(self, placement: Placement) -> None:
        self._model = AscendraStepTime(work(placement), *_PRIOR, Host())
        self._seen = np.empty((_WINDOW, 3))
        self._rows = self._passed = 0
        self._due = _FIRST_FIT
        self._error = 0.0
        self._judged = 0

    @property
    def coefficients(self) -> tuple[float, float, float, float, float]:
        """C1 to C4, and C5 in seconds."""
        model = self._model
        return (model.c1, model.c2, model.c3, model.c4, model.c5_s)

    @property
    def error(self) -> float:
        """Mean relative error of what was predicted of batches before they were learned from; NaN
        before the first fit.
        """
        return self._error / self._judged if self._judged else float("nan")

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Predicted time of one iteration; see `harness.core.view.Predictions`."""
        model = self._model
        return model.seconds(*model.sides_s(decode_seqs, decode_kv_tokens, chunks))

    def learn(
        self,
        decode_seqs: int,
        decode_kv_tokens: int,
        chunks: Sequence[tuple[int, int]],
        duration_s: float,
    ) -> None:
        """A batch of this composition took so long."""
        rows = self._rows
        if rows >= _REFIT:
            self._passed += 1
            if self._passed % _ONE_IN:
                return
        memory_s, compute_s = self._model.sides_s(decode_seqs, decode_kv_tokens, chunks)
        if rows >= _FIRST_FIT:
            self._error += abs(self._model.seconds(memory_s, compute_s) - duration_s) / duration_s
            self._judged += 1
        self._seen[rows % _WINDOW] = (memory_s, compute_s, duration_s)
        self._rows = rows = rows + 1
        if rows == self._due:
            self._due = rows * 2 if rows < _REFIT else rows + _REFIT
            self._refit()

    def _refit(self) -> None:
        rows = self._seen[: min(self._rows, _WINDOW)]
        memory, compute, duration = rows.T
        terms = ascendra_terms(memory, compute)
        solution = non_negative(terms / duration[:, None], np.ones(len(rows)))
        c1, c2, c3, c4, c5_s = solution.tolist()
        self._model = AscendraStepTime(self._model.peak, c1, c2, c3, c4, c5_s, Host())
