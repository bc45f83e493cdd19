"""The cells of a run as exports need them: parameters, metrics, and the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ...harness.results.read_run import RunResults, read_run
from ...workloads.errors import SloBenchError
from ..pages.run_page import write_report

Parameter = str | int | float | bool


@dataclass(frozen=True)
class ExportedCell:
    """One cell: what it ran (`parameters`), and what came of it (`metrics`)."""

    name: str
    parameters: dict[str, Parameter]
    metrics: dict[str, float]


@dataclass(frozen=True)
class ExportedRun:
    """A run with its cells; `created_s`: when it began, in Unix time."""

    results: RunResults
    cells: list[ExportedCell]
    created_s: float

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.results.name

    def report(self) -> Path:
        """The report; written if it is not there."""
        page = self.results.path / "report.html"
        return page if page.is_file() else write_report([self.results.path], page)


def exported_run(folder: Path) -> ExportedRun:
    """Read a run folder.

    Raises:
        SloBenchError: it is none, or no cell is finished.
    """
    run = read_run(folder)
    names = list(run.cells.columns)
    before = names.index("requests")
    cells = []
    for row in run.cells.to_dict("records"):
        values = {str(name): _plain(value) for name, value in row.items()}
        cells.append(
            ExportedCell(
                str(values["cell"]),
                {n: v for n in names[1:before] if (v := values[n]) is not None},
                {
                    n: float(v)
                    for n in names[before:]
                    if isinstance(v := values[n], bool | int | float)
                },
            )
        )
    if not cells:
        raise SloBenchError(f"{folder} has no finished cell")
    return ExportedRun(run, cells, _created_s(run))


def _plain(value: Any) -> Parameter | None:
    """A value of a table as Python's own; None where there is none."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool) and value != "" else None


def _created_s(run: RunResults) -> float:
    created = str(run.environment.get("created", ""))
    try:
        return datetime.fromisoformat(created).timestamp()
    except ValueError:
        return datetime(1970, 1, 1, tzinfo=UTC).timestamp()


def needed(package: str, to: str) -> Any:
    """A package that an export needs.

    Raises:
        SloBenchError: it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise SloBenchError(
            f"an export to {to} needs the package {package}: pip install {package} ({error})"
        ) from None
