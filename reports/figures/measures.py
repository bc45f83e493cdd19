"""Measures shown for each series when its capacity is not the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from .levels import has_slo, offered
from .numbers import percent_text, rate_text, seconds_text


@dataclass(frozen=True)
class Measure:
    """A column of level rows (see `levels.levels`) as a column of a table."""

    head: str
    column: str
    text: Callable[[float], str]
    more_is_better: bool

    def best(self, rows: pd.DataFrame) -> str:
        """How the best of some rows reads; empty where there is nothing to be better than."""
        values = rows[self.column].dropna()
        texts = {self.text(float(value)) for value in values}
        if len(texts) < 2:
            return ""
        return self.text(float(values.max() if self.more_is_better else values.min()))


IN_SLO = Measure("in SLO", "attainment", percent_text, True)
GOODPUT = Measure("goodput", "goodput_rps", rate_text, True)
FINISHED = Measure("finished req/s", "throughput_rps", rate_text, True)
MAKESPAN = Measure("makespan", "makespan_s", seconds_text, False)
LATENCY = Measure("mean latency", "e2e_mean_s", seconds_text, False)
TURNAROUND = Measure("weighted turnaround", "weighted_turnaround", rate_text, False)
TTFT = Measure("TTFT p99", "ttft_p99_s", seconds_text, False)
TPOT = Measure("TPOT p99", "tpot_p99_s", seconds_text, False)

AT_A_RATE = (IN_SLO, GOODPUT, TTFT, TPOT)
AT_ONCE = (FINISHED, MAKESPAN, LATENCY, TURNAROUND, IN_SLO)


def measures(cells: pd.DataFrame) -> tuple[Measure, ...]:
    """What to say of each series, the most important first; no SLO where none was asked."""
    shown = AT_ONCE if offered(cells) == "at once" else AT_A_RATE
    asked = has_slo(cells)
    return tuple(m for m in shown if m.column in cells.columns and (asked or m is not IN_SLO))


def load_text(cells: pd.DataFrame) -> str:
    """The load where every series has one level: `at 4 req/s`, or `all requests at once`."""
    if offered(cells) == "at once":
        return "all requests at once"
    rates = cells["level_rps"]
    low, high = rate_text(float(rates.min())), rate_text(float(rates.max()))
    return f"at {low} req/s" if low == high else f"at {low} to {high} req/s"
