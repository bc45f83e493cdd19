"""Rates, shares and times as a reader sees them, and where they come from."""

from __future__ import annotations

import math

import pandas as pd

from .levels import HighestRate


def origin(cells: pd.DataFrame) -> str:
    """`simulated`, `measured`, or both: where the numbers come from."""
    simulated = cells["backend"] == "simulated"
    if simulated.all():
        return "simulated"
    return "simulated and measured" if simulated.any() else "measured"


def highest_text(found: HighestRate) -> str:
    """`6`, `≥ 6` where the highest rate tested still reaches the target, `< 1` where none does; a
    dash where no rate was offered.
    """
    if not found.top_rps:
        return "–"
    if found.rate_rps is None:
        return f"< {rate_text(found.lowest_rps)}"
    return f"≥ {rate_text(found.rate_rps)}" if found.at_end else rate_text(found.rate_rps)


def rate_text(rate_rps: float) -> str:
    """Three significant digits, no exponent."""
    if not math.isfinite(rate_rps):
        return "–"
    digits = max(0, 2 - math.floor(math.log10(abs(rate_rps)))) if rate_rps else 0
    text = f"{rate_rps:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent_text(share: float) -> str:
    """One decimal, cut off rather than rounded, so that 89.99 % never reads as 90 %."""
    if math.isnan(share):
        return "–"
    return f"{math.floor(share * 1000 + 1e-9) / 10:.1f} %"


def seconds_text(seconds: float) -> str:
    """`350 ms`, `1.25 s`, `210 s`."""
    if math.isnan(seconds):
        return "–"
    if math.isinf(seconds):
        return "∞"
    if seconds < 0.9995:
        return f"{rate_text(seconds * 1000)} ms"
    return f"{rate_text(seconds)} s"
