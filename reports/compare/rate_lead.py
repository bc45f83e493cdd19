"""Which of two sides carries more requests in SLO, as `run` and `compare` both say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...harness.results.request_figures import RequestFigure
from ..figures.levels import TARGETS
from .bootstrap import REPLICATES, Differences, Interval, interval, resample
from .matching import MatchedRuns
from .model_error import (
    ErrorDraws,
    crossings_rps,
    difference_band,
    error_draws,
    holds,
    mean_draws,
    rate_draws,
)
from .pairing import LevelSamples
from .results import Cell, Floats, metrics_named

CONFIDENCE = 0.95
TARGET = TARGETS[0]
_SEED = 0
_SURE = (0.75, 0.98)  # attainments of runs that surely miss and surely reach the target
(ATTAINMENT,) = metrics_named("attainment")


@dataclass(frozen=True)
class RateLead:
    """The highest rates (req/s) of A and B with `TARGET` of requests in SLO, between tested rates.

    `bounds` is the interval of B less A by the requests that were drawn, `model_band` that by the
    model's error (None: not known).
    """

    a_rps: float
    b_rps: float
    bounds: Interval
    model_band: Interval | None

    @property
    def verdict(self) -> Literal["better", "worse", "none"]:
        """B's: whether the interval leaves 0 out."""
        return "better" if self.bounds.low > 0 else "worse" if self.bounds.high < 0 else "none"

    @property
    def in_reality(self) -> bool | None:
        """Whether the model's error leaves the lead its sign; None where that is not known."""
        return holds(self.b_rps - self.a_rps, self.model_band)


def drawn_attainment(samples: LevelSamples, replicates: int = REPLICATES) -> Differences:
    """Attainment of A and B, drawn again: each level draws the same seeds."""
    rng = np.random.default_rng(_SEED)
    seeds = len(samples.a)
    picks = rng.integers(seeds, size=(replicates, seeds))
    return resample(
        samples.a,
        samples.b,
        (ATTAINMENT,),
        paired=samples.paired,
        rng=rng,
        replicates=replicates,
        picks=picks,
    )


def deciding_levels(levels: Sequence[MatchedRuns]) -> list[MatchedRuns]:
    """Those of rising rates that decide at which rate the target is missed: not those before and
    after which all runs surely reach it, nor those above the first that all surely miss.
    """
    ordered = sorted(levels, key=lambda level: level.rate_rps or 0.0)
    shares = [
        [float(cell.row.get("attainment", TARGET)) for cell in (*level.a, *level.b)]
        for level in ordered
    ]
    reached = next((n for n, runs in enumerate(shares) if min(runs) < _SURE[1]), len(shares))
    missed = next((n for n, runs in enumerate(shares) if max(runs) <= _SURE[0]), len(shares))
    return ordered[max(0, reached - 1) : missed + 1]


def rate_lead(
    drawn: Mapping[float, Differences],
    levels: Sequence[MatchedRuns],
    confidence: float = CONFIDENCE,
) -> RateLead | None:
    """The lead by `drawn_attainment` of the deciding ones of `levels`; None of one rate, and where
    attainment is not known.
    """
    rates = sorted(drawn)
    if len(levels) < 2 or not rates:
        return None

    def crossed(name: str) -> Floats:
        shares = np.array([getattr(drawn[rate], name).reshape(-1) for rate in rates])
        return crossings_rps(rates, shares, TARGET)

    ((a_rps,), (b_rps,)) = crossed("a"), crossed("b")
    draws = crossed("drawn_b") - crossed("drawn_a")
    if not np.isfinite(draws).all():
        return None
    errors_a, errors_b = (
        rate_draws(
            {level.rate_rps or 0.0: draws_of(getattr(level, side), ATTAINMENT) for level in levels},
            TARGET,
        )
        for side in ("a", "b")
    )
    band = difference_band(errors_a, errors_b)
    return RateLead(float(a_rps), float(b_rps), interval(draws, confidence), band)


def draws_of(cells: Sequence[Cell], figure: RequestFigure) -> ErrorDraws | None:
    """A figure of cells that differ in their seeds alone, by the model's error."""
    return mean_draws([error_draws(cell.row, figure.name) for cell in cells])
