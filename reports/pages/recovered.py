"""What a length predictor is worth: the share of goodput that it recovers.

Of the goodput between a constant prediction and the true lengths, paired by seed: a predictor that
gives each policy the constant's goodput recovers 0 %, one that gives it the oracle's 100 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ..figures.facets import IDENTITY, axes_of
from ..figures.figure import rate_text
from .table import Table, one_group
from .verdicts import interval_over_seeds

_AXIS, _ORACLE, _CONSTANT = "length_predictor", "oracle", "constant("
_NOTE = (
    "100 % is the goodput with true lengths, 0 % that with the constant; ±: 95 % interval over "
    "seeds. –: both differ by less than that interval, so there is nothing to recover."
)


@dataclass(frozen=True)
class Recovered:
    """Shares of the goodput between a constant and true lengths, at one rate of one system."""

    setup: str  # system and what else was swept
    rate_rps: float
    constant: str  # of several the one with the most goodput
    gap_rps: float  # goodput with true lengths less that with the constant, mean over seeds
    gap_half_rps: float  # half of its 95 % interval; infinite for one seed
    shares: dict[str, tuple[float, float]]  # by predictor: share, half of its 95 % interval

    @property
    def is_gap(self) -> bool:
        """Whether the policy has more goodput with true lengths, beyond chance."""
        least = 0.0 if math.isinf(self.gap_half_rps) else self.gap_half_rps
        return self.gap_rps > least


def recovered(cells: pd.DataFrame) -> list[Recovered]:
    """Of every system and rate with a constant, true lengths and a third predictor."""
    if _AXIS not in cells.columns:
        return []
    others = [c for c in (*IDENTITY, *axes_of(cells)) if c in cells.columns and c != _AXIS]
    keys = ["system", *others, "level_rps"]
    valid = cells[cells["valid"].astype(bool)]
    recoveries = []
    for _, group in valid.groupby(keys, sort=False, dropna=False):
        goodput = group.pivot_table(index="seed", columns=_AXIS, values="goodput_rps", sort=False)
        constants = [str(c) for c in goodput.columns if str(c).startswith(_CONSTANT)]
        if _ORACLE not in goodput or not constants:
            continue
        means = {name: float(goodput[name].mean()) for name in constants}
        constant = max(means, key=means.__getitem__)
        gap = (goodput[_ORACLE] - goodput[constant]).dropna()
        mean = float(gap.mean())
        shares = {
            str(name): _ratio(goodput[name] - goodput[constant], gap)
            for name in goodput.columns
            if name != _ORACLE and name not in constants
        }
        if shares and len(gap):
            settings = [str(group[c].iloc[0]) for c in others if cells[c].nunique(dropna=False) > 1]
            setup = " · ".join((str(group["system"].iloc[0]), *filter(None, settings)))
            rate, half = float(group["level_rps"].iloc[0]), interval_over_seeds(list(gap)).half
            recoveries.append(Recovered(setup, rate, constant, mean, half, shares))
    return recoveries


def _ratio(gain: pd.Series[float], gap: pd.Series[float]) -> tuple[float, float]:
    """Mean gain / mean gap over seeds, and half of its 95 % interval (delta method)."""
    both = pd.concat([gain, gap], axis=1, keys=["gain", "gap"]).dropna()
    mean = float(both["gap"].mean())
    if not len(both) or not mean:
        return math.nan, math.nan
    share = float(both["gain"].mean()) / mean
    return share, interval_over_seeds(list(both["gain"] - share * both["gap"])).half / abs(mean)


def table(cells: pd.DataFrame, badge: str = "") -> Table:
    """A row for each system and rate; none where lengths were not predicted in these ways."""
    rows = recovered(cells)
    predictors = list(dict.fromkeys(name for row in rows for name in row.shares))
    heads = ("system", "req/s", "gap, req/s", *predictors)
    lines = [_line(row, predictors) for row in rows]
    constants = ", ".join(dict.fromkeys(row.constant for row in rows))
    return one_group(
        "Goodput recovered by the length predictor",
        heads,
        lines,
        names=predictors,
        caption=f"Share of the goodput between {constants} and true lengths",
        note=_NOTE,
        badge=badge,
    )


def _line(row: Recovered, predictors: Sequence[str]) -> list[str]:
    row_shares = row.shares if row.is_gap else {}
    shares = [_share(row_shares[name]) if name in row_shares else "–" for name in predictors]
    return [row.setup, rate_text(row.rate_rps), f"{row.gap_rps:.2f}", *shares]


def _share(estimate: tuple[float, float]) -> str:
    share, half = estimate
    return f"{share:.0%}" + ("" if math.isinf(half) else f" ± {100 * half:.0f}")
