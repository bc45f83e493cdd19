"""Published results beside ours, row by row, with a verdict that is computed from the run."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ...harness.results.read import RunResults
from ...predictors.fitted_to_papers import FittedConstant, fitted_to
from ...workloads.errors import SloBenchError
from ...workloads.parsing import parse_toml
from ..figures.levels import knee_rps
from .published_table import PublishedRow, PublishedTable, load_published
from .published_verdicts import VERDICTS, Finding, finding

MANY_ROWS = 20
"""A longer table scrolls in a window of its own, so that what follows stays near."""


@dataclass(frozen=True)
class JudgedTable:
    """A published table and what a run says about each of its rows."""

    table: PublishedTable
    findings: tuple[Finding, ...]
    knee_rps: float | None

    @property
    def rows(self) -> list[tuple[PublishedRow, Finding]]:
        """Each row with its finding."""
        return list(zip(self.table.rows, self.findings, strict=True))

    @property
    def title(self) -> str:
        """The title of the table, with the knee where rows are taken there."""
        knee = "" if self.knee_rps is None else f"; the knee is at {self.knee_rps:.3g} req/s"
        return self.table.title + knee

    @property
    def headline(self) -> str:
        """How many rows have which verdict: `6 rows: 2 reproduced, 4 not run`."""
        counts = Counter(found.verdict for found in self.findings)
        parts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
        n = len(self.findings)
        return f"{n} row{'' if n == 1 else 's'}: {', '.join(parts)}"

    @property
    def fitted(self) -> tuple[FittedConstant, ...]:
        """What was fitted to the paper."""
        return fitted_to(self.table.paper)

    @property
    def long(self) -> bool:
        """Whether the table scrolls in a window of its own."""
        return len(self.findings) > MANY_ROWS


def judged(
    table: PublishedTable, cells: pd.DataFrame, settings: Mapping[str, Any], levels: pd.DataFrame
) -> JudgedTable:
    """The rows of a table beside a run.

    Args:
        table: what was published.
        cells: the run's cells, as `levels.combine` returns them.
        settings: the run's experiment.toml.
        levels: the levels of those cells, which say where the knee is.
    """
    knee = knee_rps(levels)
    at_knee = any(
        "knee" in (pins or {}).values()
        for row in table.rows
        for pins in (row.where, row.than, *row.order)
    )
    findings = tuple(finding(row, cells, settings, knee) for row in table.rows)
    return JudgedTable(table, findings, knee if at_knee else None)


def tables_of(
    runs: Sequence[RunResults], cells: pd.DataFrame, levels: pd.DataFrame
) -> list[JudgedTable | str]:
    """The tables that the runs' experiments name, or why one cannot be shown.

    Args:
        runs: the run folders; `cells["folder"]` is a run's place among them.
        cells: all their cells.
        levels: the levels of those cells.
    """
    found: list[JudgedTable | str] = []
    for place, run in enumerate(runs):
        try:
            settings = parse_toml(run.experiment_toml)
            name = settings.get("published")
            if name is not None:
                table = load_published(str(name))
                found.append(judged(table, cells[cells["folder"] == place], settings, levels))
        except tomllib.TOMLDecodeError:
            continue  # the report shows the file as it is
        except SloBenchError as error:
            found.append(str(error))
    return found
