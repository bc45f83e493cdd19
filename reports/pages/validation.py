"""A validation as table, plain values and a page with scatters: a log, or the levels of a run,
beside their simulation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from ...harness.results.read_run import RunResults
from ...harness.validation.replay.log_replay import (
    METRICS,
    STATISTICS,
    TOLERANCE,
    ErrorRow,
    Validation,
)
from ...harness.validation.replay.run_replay import FOLDER, TABLE, ValidatedPoint
from ...workloads.errors import FileFormatError
from ...workloads.parsing import finite, parse_json
from ..figures.drawing import page_data
from ..figures.figure import ONLY, Axis, Figure, View, curve, seconds_text
from ..terminal.screen import Screen
from .document import page, write_page
from .table import Cell, Table, one_group


def headline(validation: Validation) -> str:
    """The largest errors of all, in a sentence."""
    rows = [row for row in validation.rows() if math.isfinite(row.error)]
    means = [abs(row.error) for row in rows if row.statistic == "mean"]
    shown = [abs(row.error) for row in rows if row.statistic != "mape"]
    if not shown:
        return "There is nothing to compare."
    return (
        f"{len(validation.log):,} requests of {validation.engine} replayed: means within "
        f"{max(means):.1%}, means and quantiles within {max(shown):.1%}."
    )


def error_text(row: ErrorRow) -> str:
    """`+1.23 %`; the mean of absolute errors has no sign."""
    if not math.isfinite(row.error):
        return "–"
    return f"{100 * row.error:.2f} %" if row.statistic == "mape" else f"{100 * row.error:+.2f} %"


def _cells(row: ErrorRow, more: Sequence[str] = ()) -> list[str]:
    def time(seconds: float) -> str:
        return seconds_text(seconds) if math.isfinite(seconds) else ""

    texts = [spread_text(getattr(row, name)) for name in more]
    times = time(row.real_s), time(row.simulated_s)
    return [row.metric, row.statistic, *times, error_text(row), *texts]


def _errors(rows: Sequence[ErrorRow]) -> Table:
    """Table of all error statistics, by metric."""
    more = [name for name in _MORE if any(math.isfinite(getattr(row, name)) for row in rows)]
    heads = ("metric", "", "real", "simulated", "error", *(_MORE[name] for name in more))
    groups = itertools.groupby(rows, key=lambda row: row.metric)
    lines = [("", [_cells(row, more) for row in metric_rows]) for _, metric_rows in groups]
    return Table("All errors", heads, lines, texts=(0, 1))


# What a level adds to its error table, where it is known: attribute and heading.
_MORE = {"spread": "run to run", "replayed": "own step times"}


def counts_text(validation: Validation, preemptions: int | None = None) -> str:
    """Preemptions and hits of the prefix cache, simulated and, as far as known, measured."""
    prompt_tokens = int(validation.log.prompt_tokens.sum())
    measured_tokens = validation.log.cached_tokens

    def share(tokens: int) -> str:
        return f"{tokens / prompt_tokens:.1%}"

    measured = "" if preemptions is None else f"{preemptions:,} measured, "
    text = f"Preemptions: {measured}{validation.preemptions:,} simulated"
    if not validation.settings.prefix_caching:
        return f"{text}."
    measured = "" if measured_tokens is None else f"{share(measured_tokens)} measured, "
    cached = share(validation.cached_tokens)
    return f"{text}; prompt tokens in the prefix cache: {measured}{cached} simulated."


def assumptions(validation: Validation, preemptions: int | None = None) -> list[str]:
    """Lines on the simulated system and the assumptions; `preemptions`: measured, if known."""
    settings, host = validation.settings, validation.host
    added = []
    if host.launch_s:
        added.append(f"{1e3 * host.launch_s:g} ms of host overhead for a step without a CUDA graph")
    if host.step_s:
        added.append(f"{1e3 * host.step_s:g} ms of host overhead for every step")
    if validation.client_s:
        added.append(f"{1e3 * validation.client_s:.3g} ms between client and engine")
    graphs = f", CUDA graphs up to {host.graph_tokens} tokens" if host.graph_tokens else ""
    blocks = f"{settings.num_gpu_blocks:,}" if settings.num_gpu_blocks else "?"
    return [
        f"{validation.engine}: max_num_seqs {settings.max_num_seqs}, max_num_batched_tokens "
        f"{settings.max_num_batched_tokens}, {blocks} KV blocks of {settings.block_size} tokens, "
        f"prefix caching {'on' if settings.prefix_caching else 'off'}, "
        f"{'asynchronous' if settings.async_scheduling else 'synchronous'} scheduling{graphs}.",
        counts_text(validation, preemptions),
        f"Step times: {validation.step_time}; added: {' and '.join(added) or 'nothing'}.",
        *(f"Note: {note}." for note in validation.notes),
    ]


def validation_text(validation: Validation, level: ValidatedPoint | None = None) -> RenderableType:
    """Headline, error table, assumptions. With `level`, what that knows beyond the errors."""
    table = _errors(validation.rows() if level is None else level.errors()).rich()
    preemptions = None if level is None else level.preemptions
    lines = [Text(line, style="dim") for line in assumptions(validation, preemptions)]
    return Group(Text(headline(validation), style="bold"), table, *lines)


def levels_text(levels: Sequence[ValidatedPoint]) -> RenderableType:
    """The levels of a run: one in full, several with a line for each of their metrics."""
    if len(levels) == 1:
        verdicts = [Text(line) for line in verdict(levels[0].errors())]
        fitted = Text(fitted_text(levels[0]), style="dim")
        return Group(validation_text(levels[0].validation, levels[0]), *verdicts, fitted)
    parts: list[RenderableType] = [Text("Real against simulated", style="bold")]
    for level in levels:
        parts += [
            Text(f"\n{level.cell}"),
            _level_table(level),
            *(Text(line) for line in verdict(level.errors())),
            Text(counts_text(level.validation, level.preemptions)),
            Text(fitted_text(level), style="dim"),
        ]
        parts += [Text(f"Note: {note}.", style="dim") for note in level.validation.notes]
    return Group(*parts, Text(f"\n{assumptions(levels[0].validation)[0]}", style="dim"))


def _level_table(level: ValidatedPoint) -> Screen:
    lines = [
        line if line[0] else [Cell(text, style="dim") for text in line]
        for line in _lines(level.errors())
    ]
    return one_group("Errors", ("", "real", "simulated", *STATISTICS), lines).rich()


def fitted_text(level: ValidatedPoint) -> str:
    """Source of the fit of a level's step times."""
    if not level.fitted_on:
        return "Step times as given; none were fitted to this run."
    steps = len(level.profile.tables["steps"])
    fit = level.profile.fits[level.profile.best]
    held = f", {fit.held_out_percent:.1f} % off on steps kept out of the fit"
    which = level.fitted_on[0] if len(level.fitted_on) == 1 else f"{len(level.fitted_on)} levels"
    return (
        f"Step times of {level.cell}: fitted to {steps:,} steps of {which} on the same server"
        f"{held if math.isfinite(fit.held_out_percent) else ''}; its own steps were not used."
    )


def validation_json(validation: Validation) -> list[dict[str, Any]]:
    """The rows of the error table as plain values; what does not exist is null."""
    return [
        {
            "metric": row.metric,
            "statistic": row.statistic,
            **{name: finite(getattr(row, name)) for name in ("real_s", "simulated_s", "error")},
        }
        for row in validation.rows()
    ]


def scatter(validation: Validation, metric: str) -> Figure:
    """Scatter of real and simulated latency, one point for each request."""
    view = scatter_view(validation.real[metric], validation.simulated[metric], 0)
    return scatter_of(metric, {ONLY: view}, [])


def quantiles(validation: Validation) -> Figure:
    """Quantiles of the real and simulated distribution of each latency."""
    shares = np.linspace(0, 1, 101)
    simulated, real = validation.simulated, validation.real

    def draw(place: int, seconds: NDArray[np.float64]) -> View:
        times_s = seconds[np.isfinite(seconds)]
        values = np.quantile(times_s, shares) if len(times_s) else np.zeros(0)
        return curve(place, values, shares[: len(values)])

    return Figure(
        id="distribution",
        title="Share of requests within a time",
        note="Real against simulated.",
        x=Axis("seconds", "seconds"),
        y=Axis("requests", "percent", top=1.0),
        views={
            metric: {"series": [draw(0, simulated[metric]), draw(1, real[metric])]}
            for metric in METRICS
        },
        picker="local",
        options=[[metric, TITLES[metric]] for metric in METRICS],
        hover="interpolate",
        markers=False,
    )


def write_validation(validation: Validation, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    figures = [*(scatter(validation, metric) for metric in METRICS), quantiles(validation)]
    text = page(
        "validation.html",
        page_data(["simulated", "real"], "simulated and measured", figures),
        heading=f"{validation.engine}: a real log and its simulation",
        answer=headline(validation),
        errors=_errors(validation.rows()),
        figures=figures,
        assumed=assumptions(validation),
        footer=validation.log.name,
    )
    return write_page(text, out)


_VALUES = ("real_s", "simulated_s", "error", "spread", "replayed_error")


@dataclass(frozen=True)
class ValidatedLevel:
    """One level as `validation.json` and its per-request file tell it."""

    cell: str
    series: str
    table: Mapping[str, Any]
    requests: pd.DataFrame

    def errors(self) -> list[ErrorRow]:
        """Table of errors, one row for each statistic."""
        rows = {(row["metric"], row["statistic"]): row for row in reversed(self.table["rows"])}
        errors = []
        for key in itertools.product(METRICS, STATISTICS):
            values = (np.nan if (v := rows[key][name]) is None else float(v) for name in _VALUES)
            errors.append(ErrorRow(*key, *values))
        return errors


def found_in(runs: Sequence[RunResults], cells: pd.DataFrame) -> list[ValidatedLevel]:
    """The validated levels of all runs.

    Raises:
        FileFormatError: what is there cannot be read.
    """
    series = dict(zip(cells["cell"], cells["series"], strict=True))
    return [level for run in runs for level in _of_run(run.path, series)]


def _of_run(folder: Path, series: Mapping[str, str]) -> list[ValidatedLevel]:
    path = folder / TABLE
    if not path.is_file():
        return []
    try:
        levels = parse_json(path.read_text("utf-8"))
        return [
            ValidatedLevel(
                level["cell"],
                series.get(level["cell"], level["cell"]),
                level,
                pd.read_csv(folder / FOLDER / f"{level['cell']}.csv.gz"),
            )
            for level in levels
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error


def scatters(levels: Sequence[ValidatedLevel], names: Sequence[str]) -> list[Figure]:
    """For each metric a point a request; a view for each level."""
    if not levels:
        return []
    drawn = []
    for metric in METRICS:
        views = {}
        for place, level in enumerate(levels):
            requests = level.requests
            series_index = names.index(level.series) if level.series in names else 0
            real, simulated = (
                requests[f"{metric}_{kind}_s"].to_numpy(dtype=np.float64)
                for kind in ("real", "simulated")
            )
            views[str(place)] = scatter_view(real, simulated, series_index)
        options = [[str(place), level.cell] for place, level in enumerate(levels)]
        drawn.append(scatter_of(metric, views, options if len(levels) > 1 else []))
    return drawn


def shown(levels: Sequence[ValidatedLevel]) -> dict[str, Any]:
    """Values for the section's template; empty if no level was validated."""
    if not levels:
        return {}
    verdicts = [f"{level.cell}: {line}" for level in levels for line in verdict(level.errors())]
    assumed = list(dict.fromkeys(line for level in levels for line in _assumed(level)))
    return {"errors": _errors_by_level(levels), "verdicts": verdicts, "assumed": assumed}


def _assumed(level: ValidatedLevel) -> list[str]:
    fitted = ", ".join(level.table["fitted_on"]) or "none of this run (step times as given)"
    between = f"{1e3 * level.table['client_s']:.3g} ms between client and engine"
    notes = [f"{level.cell}: {note}." for note in level.table["notes"]]
    return [f"{level.cell}: step times of {fitted}; {between}.", *notes]


def _errors_by_level(levels: Sequence[ValidatedLevel]) -> Table:
    errors = (f"error of {name}" for name in STATISTICS[:-1])
    heads = ("level", "metric", "real mean", "simulated mean", *errors, "MAPE")
    rows = [(level.cell, *line) for level in levels for line in _lines(level.errors())]
    return one_group("Errors", heads, rows, css="after")


def _lines(errors: Sequence[ErrorRow]) -> Iterator[Sequence[str]]:
    """Of each metric both means, then the errors of all statistics. Below it by how much the level
    differs from run to run, and the errors with its own step times.
    """
    rows = {(row.metric, row.statistic): row for row in errors}
    for metric in METRICS:
        metric_rows = [rows[metric, statistic] for statistic in STATISTICS]
        yield (metric, *_cells(metric_rows[0])[2:4], *map(short_error, metric_rows))
        for name, heading in _MORE.items():
            shares = [getattr(row, name) for row in metric_rows]
            if any(map(math.isfinite, shares)):
                yield ("", heading, "", *map(spread_text, shares))


_JUDGED = ("p50", "p90")


def verdict(rows: Sequence[ErrorRow]) -> list[str]:
    """Sentences on the p50 and p90 of a level: how steady the machine was, which errors are beyond
    that, and what is left with the steps' own durations. Empty where nothing of it is known.
    """
    judged = [row for row in rows if row.statistic in _JUDGED]
    sentences = []
    repeated = [row for row in judged if row.within is not None or row.undecidable]
    if repeated:
        outside = [row for row in repeated if row.within is False]
        undecided = [row for row in repeated if row.undecidable]
        spreads = [row.spread for row in repeated]
        sentences.append(
            f"The same level, measured again, differs by {min(spreads):.1%} to {max(spreads):.1%} "
            f"in p50 and p90; {len(repeated) - len(outside) - len(undecided)} of {len(repeated)} "
            f"errors are within {TOLERANCE:.0%}{_named('outside', outside)}"
            f"{_named('undecidable', undecided)}."
        )
    replayed = [abs(row.replayed) for row in judged if math.isfinite(row.replayed)]
    if replayed:
        sentences.append(
            f"Simulated with the steps' own times: p50 and p90 within {max(replayed):.2%}, every "
            "iteration decided as in the run."
        )
    return sentences


def _named(word: str, outside: Sequence[ErrorRow]) -> str:
    if not outside:
        return ""
    names = (
        f"{row.metric.upper()} {row.statistic} ({row.error:+.1%} at {row.spread:.1%})"
        for row in outside
    )
    return f"; {word}: {', '.join(names)}"


TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e": "End-to-end latency",
}
_MOST_POINTS = 2000


def short_error(row: ErrorRow) -> str:
    """`+1.2 %`, for a table of many; `× 12` where it is far off."""
    if not math.isfinite(row.error):
        return "–"
    if abs(row.error) >= 10:
        return f"× {1 + row.error:,.0f}"
    return f"{100 * row.error:.1f} %" if row.statistic == "mape" else f"{100 * row.error:+.1f} %"


def spread_text(share: float) -> str:
    """`3.1 %`; nothing where it is not known."""
    if not math.isfinite(share):
        return ""
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # no minus before a zero


def scatter_view(real: NDArray[np.float64], simulated: NDArray[np.float64], place: int) -> View:
    """Points of requests that have both times; `place` is the series whose colour they have."""
    points = np.flatnonzero(np.isfinite(real) & np.isfinite(simulated))
    points = points[:: max(1, -(-len(points) // _MOST_POINTS))]
    top = float(max(real[points].max(), simulated[points].max())) if len(points) else 0.0
    labels = [f"request {point}" for point in points]
    return {
        "series": [curve(place, real[points], simulated[points], labels=labels)],
        "lines": [{"axis": "diagonal", "value": top, "label": "equal"}],
        "scatter": True,
    }


def scatter_of(metric: str, views: dict[str, View], options: list[list[str]]) -> Figure:
    """The figure of one or more such views."""
    return Figure(
        id=f"scatter-{metric}",
        title=TITLES[metric],
        note=f"A point a request, {_MOST_POINTS:,} at most; on the line both agree.",
        x=Axis("real, s", "seconds"),
        y=Axis("simulated, s", "seconds"),
        views=views,
        picker="local" if options else "none",
        options=options,
        hover="point",
    )
