"""The report's section on a run that was simulated as well: scatters and the table of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...harness.results.read import RunResults
from ...harness.validation.log_replay import METRICS, STATISTICS, ErrorRow
from ...harness.validation.run_replay import FOLDER, TABLE
from ...workloads.errors import FileFormatError
from ...workloads.parsing import parse_json
from ..figures.figure import Figure
from ..figures.numbers import seconds_text
from ..figures.scatters import BADGE, scatter_of, scatter_view, short_error, spread_text
from . import sections
from .verdicts import verdict

_VALUES = ("real_s", "simulated_s", "error", "spread", "replayed_error")


@dataclass(frozen=True)
class ValidatedLevel:
    """One level as `validation.json` and its per-request file tell it."""

    cell: str
    series: str
    table: Mapping[str, Any]
    requests: pd.DataFrame

    def errors(self) -> list[ErrorRow]:
        """The error table."""
        return [self.error(metric, name) for metric in METRICS for name in STATISTICS]

    def error(self, metric: str, statistic: str) -> ErrorRow:
        """One figure of the error table."""
        for row in self.table["rows"]:
            if (row["metric"], row["statistic"]) == (metric, statistic):
                values = (np.nan if row[name] is None else float(row[name]) for name in _VALUES)
                return ErrorRow(metric, statistic, *values)
        raise KeyError((metric, statistic))


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
            of = level.requests
            own = names.index(level.series) if level.series in names else 0
            real, simulated = (
                of[f"{metric}_{kind}_s"].to_numpy(dtype=np.float64)
                for kind in ("real", "simulated")
            )
            views[str(place)] = scatter_view(real, simulated, own)
        options = [[str(place), level.cell] for place, level in enumerate(levels)]
        drawn.append(scatter_of(metric, views, options if len(levels) > 1 else []))
    return drawn


def section(levels: Sequence[ValidatedLevel], grid: str) -> str:
    """The section; empty where nothing was validated."""
    if not levels:
        return ""
    told = "".join(f"<p>{escape(line)}</p>" for line in dict.fromkeys(_told(levels)))
    return (
        '<section id="validation"><h2>Real against simulated</h2>'
        '<p class="lead">Every level was simulated as well: the same arrivals and lengths, the '
        "server’s own limits, step times fitted to its steps in other levels.</p>"
        f"{grid}{_table(levels)}{_verdicts(levels)}"
        '<details class="fold"><summary>What was assumed</summary>'
        f'<div class="body">{told}</div></details></section>'
    )


def _told(levels: Sequence[ValidatedLevel]) -> list[str]:
    lines = []
    for level in levels:
        fitted = ", ".join(level.table["fitted_on"]) or "none of this run (step times as given)"
        between = f"{1e3 * level.table['client_s']:.3g} ms between client and engine"
        lines.append(f"{level.cell}: step times of {fitted}; {between}.")
        lines += [f"{level.cell}: {note}." for note in level.table["notes"]]
    return lines


def _table(levels: Sequence[ValidatedLevel]) -> str:
    errors = (f"Error of {name}" for name in STATISTICS[:-1])
    heads = ("Level", "Metric", "Real mean", "Simulated mean", *errors, "MAPE")
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    body = []
    for level in levels:
        for metric in METRICS:
            mean = level.error(metric, "mean")
            values = (
                metric.upper(),
                *(seconds_text(s) if s == s else "–" for s in (mean.real_s, mean.simulated_s)),
                *(short_error(level.error(metric, statistic)) for statistic in STATISTICS),
            )
            body.append(_line(level.cell, values))
            for heading, attribute in (("run to run", "spread"), ("own step times", "replayed")):
                shares = [getattr(level.error(metric, name), attribute) for name in STATISTICS]
                if any(share == share for share in shares):
                    texts = (spread_text(share) for share in shares)
                    body.append(_line("", (metric.upper(), heading, "", *texts)))
    return (
        '<div class="card scroll after" tabindex="0" role="region" aria-label="Errors">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _line(head: str, values: Sequence[str]) -> str:
    cells = "".join(f"<td>{escape(value)}</td>" for value in values)
    return f'<tr><th scope="row">{escape(head)}</th>{cells}</tr>'


def _verdicts(levels: Sequence[ValidatedLevel]) -> str:
    told = [(level.cell, line) for level in levels for line in verdict(level.errors())]
    return "".join(f"<p>{escape(cell)}: {escape(line)}</p>" for cell, line in told)


def grid(drawn: Sequence[Figure]) -> str:
    """The scatters' frames, which say that they show both."""
    return f'<div class="grid">{"".join(sections.figure(figure, BADGE) for figure in drawn)}</div>'
