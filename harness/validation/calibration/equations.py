"""Equations for the factors of a calibration: what steps between two events of a log took together.

A log tells when each request had its first and its last token. Replayed with the clock set to
these, the batches in between are known, and so is what their steps took together: linear equations
for the factors. A few batches are not those of the run, so a robust loss is minimised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....predictors.profiles.calibration import Calibration, hats
from ....predictors.profiles.step_time_table import Curve, TableStepTime
from ....predictors.roofline import StepTime
from ....workloads.arrays import Floats, Mask
from ....workloads.errors import SloBenchError
from ..replay.snapped_replay import Span

# Tokens of a step at which factors are learned: sizes of CUDA graphs, then of chunks.
FACTOR_BOUNDS = (0.2, 5.0)  # within which a factor is searched: assumed
KNOTS = (1.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)
_MIN_SPANS = 20
# Weight of a time between two events: clocks of a log, and steps that are not linear layers.
CLOCK_S, SHARE = 0.003, 0.03
_SMOOTH = 0.05  # standard deviation of the difference between neighbouring factors
# What a client sees of a long prompt's first and last token is later than of a short one's: seconds
# a prompt token, their standard deviation in these, and the most of these.
_LATER_S, _LATER_SPREAD, _LATER_MOST = 1e-6, 5.0, 20.0


def factors_of(factors: Sequence[float]) -> Calibration:
    """A calibration of these factors alone."""
    return Calibration(origin=(), tokens=KNOTS, factors=tuple(factors))


@dataclass(frozen=True)
class Equations:
    """A row a span: `rest_s` + `factored_s` · factors = `real_s`."""

    factored_s: Floats  # [span, knot]
    rest_s: Floats
    real_s: Floats
    late: Mask  # of the second half of its log
    longer_prompt: Floats  # tokens, of the last event over the first; 0 in logs of engines
    steps: int

    def rows(self, chosen: Mask) -> Equations:
        """The equations of these spans."""
        return Equations(
            self.factored_s[chosen],
            self.rest_s[chosen],
            self.real_s[chosen],
            self.late[chosen],
            self.longer_prompt[chosen],
            self.steps,
        )

    @classmethod
    def joined(cls, parts: Sequence[Equations]) -> Equations:
        """The equations of several logs."""
        names = ("factored_s", "rest_s", "real_s", "late", "longer_prompt")
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(**columns, steps=sum(part.steps for part in parts))

    def solved(self) -> Floats:
        """Factors: least squares with Cauchy's loss, near to each other where little is known."""
        from scipy.optimize import least_squares

        n = len(KNOTS)
        weight = 1 / (CLOCK_S + SHARE * self.real_s)
        differences = np.diff(np.eye(n), axis=0) / _SMOOTH
        later_s = _LATER_S * self.longer_prompt

        def residuals(unknown: Floats) -> Floats:
            factors, later = unknown[:n], unknown[n]
            off_s = self.factored_s @ factors + later_s * later + self.rest_s - self.real_s
            spread = np.array([later / _LATER_SPREAD])
            return np.concatenate([weight * off_s, differences @ factors, spread])

        begin = np.append(np.ones(n), 0.0)
        ends = (-_LATER_MOST, _LATER_MOST)
        bounds = [np.append(np.full(n, f), end) for f, end in zip(FACTOR_BOUNDS, ends, strict=True)]
        solution = least_squares(residuals, begin, loss="cauchy", bounds=tuple(bounds))
        return np.asarray(solution.x[:n], dtype=np.float64)


def at_bounds(learned: Calibration) -> list[str]:
    """A note where a factor is as small or large as may be learned."""
    tokens = [
        f"{knot:,.0f}"
        for knot, factor in zip(learned.tokens, learned.factors, strict=True)
        if not 1.01 * FACTOR_BOUNDS[0] < factor < 0.99 * FACTOR_BOUNDS[1]
    ]
    return tokens and [
        f"factors of steps of {', '.join(tokens)} tokens are as far from 1 as may be learned "
        f"({FACTOR_BOUNDS[0]:g} to {FACTOR_BOUNDS[1]:g}): check model, GPU, tp and settings"
    ]


def equations(
    spans: Sequence[Span], model: StepTime, factors: Floats, *, half_s: float, of_client: bool
) -> Equations:
    """The spans of one replay, predicted by `model` with these factors; the second half of its log
    begins at `half_s`.

    Raises:
        SloBenchError: there are too few spans.
    """
    if len(spans) < _MIN_SPANS:
        raise SloBenchError(
            f"the log has {len(spans)} times between first and last tokens that can be used; a "
            f"calibration needs {_MIN_SPANS}, of some dozens of requests"
        )
    factored_s = np.array(_factored(spans, model, factors))
    predicted_s = np.array([span.predicted_s for span in spans])
    longer = np.array([span.longer_prompt for span in spans])
    return Equations(
        factored_s,
        predicted_s - factored_s @ factors,
        np.array([span.real_s for span in spans]),
        np.array([span.end_s >= half_s for span in spans]),
        longer if of_client else np.zeros(len(spans)),
        sum(len(span.steps) for span in spans),
    )


def _factored(spans: Sequence[Span], model: StepTime, factors: Floats) -> list[Floats]:
    """Seconds of each span that each factor multiplies."""
    if type(model) is not TableStepTime:  # whole steps
        present = factors_of(factors.tolist())
        return [_of_steps(span, present) for span in spans]
    linear, host = model.tables.linear, model.host
    weights = hats(KNOTS, np.maximum(1.0, linear.counts))
    parts = [Curve(linear.counts, linear.seconds * weights[:, k]) for k in range(len(KNOTS))]
    seconds_by_tokens: dict[int, Floats] = {}

    def linear_s(tokens: int) -> Floats:
        if tokens not in seconds_by_tokens:
            size = host.graph_size(tokens)
            seconds_by_tokens[tokens] = np.array([part(size) for part in parts])
        return seconds_by_tokens[tokens]

    return [np.sum([linear_s(tokens) for tokens, _ in span.steps], axis=0) for span in spans]


def _of_steps(span: Span, present: Calibration) -> Floats:
    tokens, seconds = np.array(span.steps, dtype=np.float64).T
    bare_s = seconds / present.at(tokens)
    return np.asarray(bare_s @ hats(KNOTS, tokens), dtype=np.float64)
