"""What errors of a simulation mean on a machine that is itself no steadier than it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...harness.validation.log_replay import TOLERANCE, ErrorRow

JUDGED = ("p50", "p90")


def verdict(rows: Sequence[ErrorRow]) -> list[str]:
    """Sentences on the p50 and p90 of a level: how steady the machine was, which errors are beyond
    that, and what is left with the steps' own durations. Empty where nothing of it is known.
    """
    judged = [row for row in rows if row.statistic in JUDGED]
    told = []
    known = [row for row in judged if row.within is not None]
    if known:
        outside = [row for row in known if not row.within]
        spreads = [row.spread for row in known]
        told.append(
            f"The same level, measured again, differs by {min(spreads):.1%} to {max(spreads):.1%} "
            f"in p50 and p90; {len(known) - len(outside)} of {len(known)} errors are within "
            f"{TOLERANCE:.0%} or that, whichever is larger{_named(outside)}."
        )
    replayed = [abs(row.replayed) for row in judged if math.isfinite(row.replayed)]
    if replayed:
        told.append(
            f"Simulated with the steps' own times: p50 and p90 within {max(replayed):.2%}, every "
            "iteration decided as in the run."
        )
    return told


def _named(outside: Sequence[ErrorRow]) -> str:
    if not outside:
        return ""
    names = (
        f"{row.metric.upper()} {row.statistic} ({row.error:+.1%} at {row.spread:.1%})"
        for row in outside
    )
    return f"; outside are {', '.join(names)}"
