"""What each system of a run was allowed: the table that says whether a comparison is fair."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace

from ...harness.experiments.allowances import HEADS, allowances
from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.results.read_run import RunResults
from ...workloads.errors import SloBenchError
from ...workloads.parsing import parse_toml
from .table import Table


def table_of(runs: Sequence[RunResults]) -> Table:
    """The systems of every run whose experiment and systems are known here."""
    groups = []
    for run in runs:
        try:
            experiment = ExperimentSchema(**parse_toml(run.experiment_toml))
            rows = [
                replace(entry, parameters={**entry.parameters, **entry.defaults}).row
                for entry in allowances(experiment)
            ]
        except (SloBenchError, tomllib.TOMLDecodeError):
            continue  # a system of another installation, or a file that the report shows as it is
        if rows:
            groups.append((run.name if len(runs) > 1 else "", rows))
    return Table(
        "What each system was allowed", HEADS, groups, texts=range(len(HEADS)), css="allowed"
    )
