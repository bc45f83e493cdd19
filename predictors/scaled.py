"""Step times that are longer or shorter than those of another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .profiles.calibration import Calibration
from .profiles.step_time_table import TableStepTime
from .roofline import StepTime


@dataclass(frozen=True)
class ScaledStepTime:
    """Any step-time model, every step `factor` times as long; with a calibration also by its factor
    of the step's tokens.
    """

    model: StepTime
    factor: float = 1.0
    calibration: Calibration | None = None

    @cached_property
    def _factors(self) -> dict[int, float]:
        return {}

    def _factor(self, tokens: int) -> float:
        if self.calibration is None:
            return self.factor
        if tokens not in self._factors:
            by_tokens = self.calibration.at(np.array([max(1.0, tokens)]))
            self._factors[tokens] = self.factor * float(by_tokens[0])
        return self._factors[tokens]

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Duration of one step in seconds."""
        tokens = decode_seqs + sum(chunk for _, chunk in chunks)
        return self._factor(tokens) * self.model.step_s(decode_seqs, decode_kv_tokens, chunks)

    def span_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        """Duration of several decode steps in seconds."""
        factor = self._factor(decode_seqs)
        return factor * self.model.span_s(decode_seqs, decode_kv_tokens, steps)

    def steps_within(self, decode_seqs: int, decode_kv_tokens: int, duration_s: float) -> int:
        """The number of steps within a time, corrected for the rounding of `span_s`."""
        factor = self._factor(decode_seqs)
        steps = self.model.steps_within(decode_seqs, decode_kv_tokens, duration_s / factor)
        if steps <= 0:
            return 0
        while self.span_s(decode_seqs, decode_kv_tokens, steps) < duration_s:
            steps += 1
        while steps > 1 and self.span_s(decode_seqs, decode_kv_tokens, steps - 1) >= duration_s:
            steps -= 1
        return steps


def calibrated(model: StepTime, calibration: Calibration) -> StepTime:
    """A model with the factors of a calibration: on the linear layers of tables, else on steps."""
    if set(calibration.factors) == {1.0}:
        return model
    if type(model) is not TableStepTime:
        return ScaledStepTime(model, calibration=calibration)
    tables = model.tables
    factors = calibration.at(np.maximum(1.0, tables.linear.counts))
    linear = replace(tables.linear, seconds=tables.linear.seconds * factors)
    return TableStepTime(*tables._replace(linear=linear), resident=model.resident)
