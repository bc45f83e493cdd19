"""A gate for CI: is the candidate worse than the baseline by more than may be?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...workloads.errors import SloBenchError
from .comparing import Comparison, Row
from .results import NotComparableError


@dataclass(frozen=True)
class Regression:
    """A row in which the candidate is worse than may be. `size` is a share of the baseline, or a
    difference of shares; `low` is its end nearest to no regression.
    """

    row: Row
    size: float
    low: float


@dataclass(frozen=True)
class Judgement:
    """What the gate found. `open_rows` are worse by more than the bound, but not significantly."""

    max_regression: float
    regressions: Sequence[Regression]
    open_rows: Sequence[Regression]

    @property
    def passed(self) -> bool:
        """Whether nothing got significantly worse by more than the bound."""
        return not self.regressions


def judge_comparison(comparison: Comparison, max_regression: float) -> Judgement:
    """Fail what is significantly worse (all rows considered, see `Row.p_holm`) and by more than the
    bound: in percent of the baseline, or in points where the figure is a share of requests.

    Raises:
        NotComparableError: baseline and candidate did not do the same.
    """
    if comparison.obstacles:
        raise NotComparableError("; ".join(comparison.obstacles))
    unknown = [row for row in comparison.rows if row.verdict == "unknown"]
    if len(unknown) == len(comparison.rows):
        raise NotComparableError("no figure is known on both sides")
    beyond = [
        regression
        for row in comparison.rows
        if row.verdict != "unknown" and (regression := _regression(row)).size > max_regression
    ]
    return Judgement(
        max_regression=max_regression,
        regressions=[r for r in beyond if r.row.verdict == "worse"],
        open_rows=[r for r in beyond if r.row.verdict != "worse"],
    )


def _regression(row: Row) -> Regression:
    """How much worse B is; negative where it is better."""
    points = row.metric.unit == "share"
    change, bounds = (row.difference, row.bounds) if points else (row.relative, row.relative_bounds)
    if math.isnan(change):  # the baseline is zero: any change is beyond measure
        worse = (row.difference < 0) == row.metric.higher_is_better and row.difference != 0
        return Regression(row, math.inf if worse else 0.0, math.nan)
    if row.metric.higher_is_better:
        return Regression(row, -change, -bounds.high)
    return Regression(row, change, bounds.low)


def parse_regression(text: str) -> float:
    """`5%` or `0.05`. A bare number above 1 is refused, for nobody means 500 % by 5.

    Raises:
        SloBenchError: it is no such share.
    """
    body = text.strip()
    percent = body.endswith("%")
    try:
        value = float(body[:-1]) / 100 if percent else float(body)
    except ValueError:
        raise SloBenchError(f"cannot read --max-regression {text!r}; write 5% or 0.05") from None
    if not 0 <= value < math.inf or (value > 1 and not percent):
        raise SloBenchError(f"--max-regression {text} is no share; 5 % is written 5% or 0.05")
    return value
