"""Errors of predictions of real GPUs, as a table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ...harness.validation.accuracy.errors import ErrorSummary, Judged, summaries
from .table import one_group

HEADS = (
    "engine",
    "GPU",
    "models",
    "load, regime",
    "metric",
    "n",
    "median",
    "p90",
    "bias",
    "in band",
)
METRICS = ("ttft", "tpot", "e2e", "throughput")


def regimes(judged: Sequence[Judged]) -> list[ErrorSummary]:
    """Summaries by engine, GPU, model class, and load with regime (in place of `mode`)."""
    found = summaries(
        judged,
        lambda row: ("", row.engine, row.gpu, row.model_class, f"{row.mode}, {row.regime}"),
    )
    return [row for row in found if shown(row.metric)]


def shown(metric: str) -> bool:
    """Whether the metric is in tables: means, medians and throughput."""
    return metric.rpartition("_")[2] in ("mean", "p50", "throughput")


def cells(row: ErrorSummary) -> tuple[str, ...]:
    """A row of the table, under `HEADS`."""
    return (
        row.engine,
        row.gpu,
        row.model,
        row.mode,
        row.metric,
        str(row.n),
        f"{row.median_error:.1%}",
        f"{row.p90_error:.1%}",
        f"{row.bias:+.1%}",
        "–" if row.in_band is None else f"{row.in_band:.0%}",
    )


def accuracy_text(judged: Sequence[Judged], skipped: Counter[tuple[str, str]]) -> RenderableType:
    """The table of errors, and what was not predicted."""
    title = f"Errors of {len(judged):,} predictions"
    table = one_group(title, HEADS, [cells(row) for row in regimes(judged)], texts=range(5))
    lines = [
        Text(f"{n:,} not predicted in {name}: {reason}", style="dim")
        for (name, reason), n in sorted(skipped.items())
    ]
    return Group(table.rich(title), *lines)
