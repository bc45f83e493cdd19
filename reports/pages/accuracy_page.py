"""Errors of predictions of real GPUs: a table for the terminal, and a page with every point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from ...harness.validation.accuracy.aiconfigurator import beside
from ...harness.validation.accuracy.prediction_errors import ErrorSummary, Judged, summaries
from ...predictors.bands import model_kind
from ...predictors.specs import model
from ...workloads.errors import SloBenchError
from ..figures.drawing import page_data
from ..figures.figure import Axis, Figure, Format, View, curve
from .document import page, write_page
from .table import Table, one_group

# Of a table: heads, and the texts below them; a last column has AIConfigurator's errors.
_ERRORS: Mapping[str, Callable[[ErrorSummary], str]] = {
    "metric": lambda row: row.metric,
    "n": lambda row: str(row.n),
    "median": lambda row: f"{row.median_error:.1%}",
    "mean": lambda row: f"{row.mean_error:.1%}",
    "p90": lambda row: f"{row.p90_error:.1%}",
    "bias": lambda row: f"{row.bias:+.1%}",
    "in band": lambda row: "–" if row.in_band is None else f"{row.in_band:.0%}",
}
_COLUMNS: Mapping[str, Callable[[ErrorSummary], str]] = {
    "engine": lambda row: row.engine,
    "GPU": lambda row: row.gpu,
    "models": lambda row: row.model,
    "load, regime": lambda row: row.mode,
    **_ERRORS,
}
_BESIDE = "AIConfigurator (ours, n)"
_OPTIONAL = ("p90", "in band", _BESIDE)
_OF_SETS = ("ttft_mean", "tpot_mean", "e2e_mean")
GROUPINGS: tuple[tuple[str, str, Callable[[Judged], str]], ...] = (
    ("engine", "by engine", lambda row: row.engine),
    ("gpu", "by GPU", lambda row: row.gpu),
    ("models", "by model class", lambda row: row.model_class),
    ("regime", "by regime", lambda row: f"{row.mode}, {row.regime}"),
)
# Of which there are figures; units of those that are no latencies.
METRICS = ("ttft", "tpot", "e2e", "throughput", "max_rate")
UNITS = {"throughput": "tokens/s", "max_rate": "req/s"}
TITLES = {"throughput": "Throughput", "max_rate": "Highest rate within bounds"}


def regimes(judged: Sequence[Judged]) -> list[ErrorSummary]:
    """Summaries by engine, GPU, model class, and load with regime (in place of `mode`)."""
    return [row for row in summaries(judged, _regime) if shown(row.metric)]


def _regime(row: Judged) -> tuple[str, str, str, str, str]:
    return ("", row.engine, row.gpu, row.model_class, f"{row.mode}, {row.regime}")


def _beside(row: ErrorSummary, judged: Sequence[Judged]) -> str:
    """AIConfigurator's median error, and ours on the rows that it predicted."""
    group = (row.set, row.engine, row.gpu, row.model, row.mode)
    comparison = beside([other for other in judged if _regime(other) == group], row.metric)
    if comparison is None:
        return "–"
    return f"{comparison.theirs:.1%} ({comparison.ours:.1%}, {comparison.n})"


def shown(metric: str) -> bool:
    """Whether the metric is in tables: means, medians, throughput and rates."""
    return metric in UNITS or metric.rpartition("_")[2] in ("mean", "p50")


def accuracy_text(judged: Sequence[Judged], skipped: Counter[tuple[str, str]]) -> RenderableType:
    """The tables of errors, by set at the end, and what was not predicted."""
    tables = [_table(judged), _sets(judged)]
    shown_tables = [table.rich(table.label) for table in tables]
    return Group(*shown_tables, *(Text(line, style="dim") for line in _not(skipped)))


def _table(judged: Sequence[Judged]) -> Table:
    heads = [*_COLUMNS, _BESIDE]
    rows = [
        [*(text(row) for text in _COLUMNS.values()), _beside(row, judged)]
        for row in regimes(judged)
    ]
    last = None if any(row[-1] != "–" for row in rows) else -1  # AIConfigurator predicted none
    title = f"Errors of {len(judged):,} prediction{'s' * (len(judged) != 1)}"
    shown_rows = [row[:last] for row in rows]
    return one_group(title, heads[:last], shown_rows, texts=range(5), optional=_OPTIONAL)


def _sets(judged: Sequence[Judged]) -> Table:
    """Errors of TTFT, TPOT and E2E by set, engine and kind of model."""
    groups = summaries(
        judged, lambda row: (row.set, row.engine, "", model_kind(model(row.model)), row.mode)
    )
    rows = [
        [row.engine, row.model, row.mode, row.set, *(text(row) for text in _ERRORS.values())]
        for row in groups
        if row.metric in _OF_SETS
    ]
    heads = ["engine", "models", "load", "set", *_ERRORS]
    return one_group("By set", heads, rows, texts=range(5), optional=_OPTIONAL)


def _not(skipped: Counter[tuple[str, str]]) -> list[str]:
    return [
        f"{n:,} not predicted in {name}: {reason}" for (name, reason), n in sorted(skipped.items())
    ]


def figures(judged: Sequence[Judged]) -> list[Figure]:
    """Predicted against measured, a figure a metric; each view has its own groups."""
    metrics = {name for row in judged for name in row.errors() if shown(name)}
    order = [f"{name}{statistic}" for statistic in ("_mean", "", "_p50") for name in METRICS]
    return [_figure(judged, metric) for metric in order if metric in metrics]


def _figure(judged: Sequence[Judged], metric: str) -> Figure:
    measured_rows = [row for row in judged if metric in row.errors()]
    form: Format = "number" if metric in UNITS else "seconds"
    unit = UNITS.get(metric, "s")
    latency, _, statistic = metric.partition("_")
    title = TITLES.get(metric, f"{latency.upper()} {statistic}")
    return Figure(
        id=metric,
        title=title,
        note=f"{len(measured_rows):,} measurements, logarithmic axes.",
        x=Axis(f"measured, {unit}", form, "log"),
        y=Axis(f"predicted, {unit}", form, "log"),
        views={key: _view(measured_rows, metric, group_of) for key, _, group_of in GROUPINGS},
        picker="local",
        options=[[key, label] for key, label, _ in GROUPINGS],
        hover="point",
    )


def _view(measured_rows: Sequence[Judged], metric: str, group_of: Callable[[Judged], str]) -> View:
    groups: dict[str, list[Judged]] = {}
    for row in measured_rows:
        groups.setdefault(group_of(row), []).append(row)
    series = []
    for place, (_, rows) in enumerate(sorted(groups.items())):
        x, y = [row.measured[metric] for row in rows], [row.predicted[metric] for row in rows]
        series.append(curve(place, x, y, labels=[_label(row, metric) for row in rows]))
    top = max(max(row.measured[metric], row.predicted[metric]) for row in measured_rows)
    return {
        "series": series,
        "names": sorted(groups),
        "lines": [{"axis": "diagonal", "value": top, "label": "equal"}],
        "scatter": True,
    }


def _label(row: Judged, metric: str) -> str:
    """What a pointer finds: the row, what was run, the error and the band."""
    band = row.band(metric)
    band_text = "" if band is None else f", 90 % band {band[0]:.3g} to {band[1]:.3g}"
    subject = f"{row.model} on {row.gpu}, {row.case or row.engine}"
    return f"{row.set}, {row.row}: {subject}; {row.errors()[metric]:+.1%}{band_text}"


def write_accuracy(judged: Sequence[Judged], skipped: Counter[tuple[str, str]], out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written, or nothing was predicted.
    """
    if not judged:
        raise SloBenchError("no measurement was predicted; there is nothing to show")
    drawn = figures(judged)
    text = page(
        "accuracy.html",
        page_data([], "simulated and measured", always=drawn),
        heading="How far predictions are from measurements",
        answer=f"{len(judged):,} measurements of real GPUs beside their predictions.",
        figures=drawn,
        errors=_table(judged),
        skipped=_not(skipped),
        footer="Median and 90th percentile of |predicted / measured - 1|; bias: median with sign.",
    )
    return write_page(text, out)
