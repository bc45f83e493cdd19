"""The figures that can be compared, and which way is better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...workloads.errors import UnknownNameError

Column = Literal["ttft", "tpot", "e2e"]
Unit = Literal["share", "per_s", "s"]

COLUMNS: tuple[Column, ...] = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Metric:
    """One figure of a cell.

    A latency is a `column` and a statistic: its mean where `quantile` is None. The others count
    all requests that arrived.
    """

    name: str
    unit: Unit
    higher_is_better: bool
    column: Column | None = None
    quantile: float | None = None

    @property
    def needs_slo(self) -> bool:
        """Whether requests must have been judged."""
        return self.name in ("attainment", "goodput")


def _all() -> Iterable[Metric]:
    yield Metric("attainment", "share", True)
    yield Metric("goodput", "per_s", True)
    yield Metric("output_tokens", "per_s", True)
    for column in COLUMNS:
        yield Metric(f"{column}_mean", "s", False, column)
        for percent in (50, 90, 99):
            yield Metric(f"{column}_p{percent}", "s", False, column, percent / 100)


METRICS: dict[str, Metric] = {metric.name: metric for metric in _all()}
COMPARED = ("attainment", "goodput", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
GATED = ("attainment", "goodput", "ttft_p99", "tpot_p99")
"""What is looked at where nothing is asked for."""

_ENDINGS = ("_rps", "_per_s", "_s")  # of the columns of cells.csv


def metrics_named(text: str) -> tuple[Metric, ...]:
    """`attainment,ttft_p99`; the names of columns in cells.csv (`ttft_p99_s`) do as well.

    Raises:
        UnknownNameError: there is no such figure.
    """
    found = []
    for name in (piece.strip().lower() for piece in text.split(",")):
        short = next((name.removesuffix(e) for e in _ENDINGS if name.endswith(e)), name)
        if short not in METRICS:
            raise UnknownNameError("metric", name, METRICS)
        found.append(METRICS[short])
    return tuple(dict.fromkeys(found))
