"""The report's section on a run that was simulated as well: scatters and the table of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...harness.results.read import RunFolder
from ...harness.validation.log_replay import METRICS, STATISTICS, ErrorRow
from ...harness.validation.run_replay import FOLDER, TABLE
from ...workloads.errors import FileFormatError
from ...workloads.parsing import parse_json
from ..figures.figure import Figure
from ..figures.numbers import seconds_text
from ..figures.scatters import scatter_of, scatter_view, short_error, spread_text
from .table import Row, Table, one_group
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


def found_in(runs: Sequence[RunFolder], cells: pd.DataFrame) -> list[ValidatedLevel]:
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


def shown(levels: Sequence[ValidatedLevel]) -> dict[str, Any]:
    """What the section lays out; nothing where no level was validated."""
    if not levels:
        return {}
    verdicts = [f"{level.cell}: {line}" for level in levels for line in verdict(level.errors())]
    assumed = list(dict.fromkeys(line for level in levels for line in _assumed(level)))
    return {"errors": _errors(levels), "verdicts": verdicts, "assumed": assumed}


def _assumed(level: ValidatedLevel) -> list[str]:
    fitted = ", ".join(level.table["fitted_on"]) or "none of this run (step times as given)"
    between = f"{1e3 * level.table['client_s']:.3g} ms between client and engine"
    notes = [f"{level.cell}: {note}." for note in level.table["notes"]]
    return [f"{level.cell}: step times of {fitted}; {between}.", *notes]


def _errors(levels: Sequence[ValidatedLevel]) -> Table:
    errors = (f"Error of {name}" for name in STATISTICS[:-1])
    heads = ("Level", "Metric", "Real mean", "Simulated mean", *errors, "MAPE")
    rows: list[Row] = []
    for level in levels:
        for metric in METRICS:
            own = [level.error(metric, statistic) for statistic in STATISTICS]
            mean = level.error(metric, "mean")
            means = (seconds_text(s) if s == s else "–" for s in (mean.real_s, mean.simulated_s))
            rows.append((level.cell, metric.upper(), *means, *map(short_error, own)))
            for heading, attribute in (("run to run", "spread"), ("own step times", "replayed")):
                shares = [getattr(error, attribute) for error in own]
                if any(share == share for share in shares):
                    rows.append(("", metric.upper(), heading, "", *map(spread_text, shares)))
    return one_group("Errors", heads, rows, css="after")
