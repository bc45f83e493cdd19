"""Validation of a run on real servers against its simulation, with step times fitted to its step
logs.

The profile for a level is never fitted to the level itself, but to the steps of all other levels on
a server with the same settings. If there are none, a short level was measured first for that
purpose. For levels that were measured several times, errors are compared to the spread of the
measurements.

    validation.json           error table of every level, and the levels that its profile is fitted
    to
    validation.csv            the same as rows
    validation/<cell>.toml    the profile
    validation/<cell>.csv.gz  every request, real and simulated
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....predictors.profiles.profile_format import Profile, write_profile
from ....workloads.arrays import Floats
from ....workloads.csv_text import guarded
from ....workloads.errors import SloBenchError
from ....workloads.parsing import finite
from ....workloads.whole_file import write_whole
from ...experiments.execution.cell_specs import CellSpec
from ...results.cell_files import Column, gzip_csv
from ...results.engine_logs import RealLog
from ...results.run_folder import read_rows
from .log_replay import (
    METRICS,
    AskedRequests,
    ErrorRow,
    Validation,
    latencies_of,
    statistics,
    validate,
)
from .measured_level import (
    MeasuredLevel,
    asked_requests,
    fitted_profile,
    planned_cells,
    swap_s_per_token,
)
from .step_replay import Replayed, ReplayError, replay

FOLDER = "validation"
TABLE = "validation.json"
_CLIENT_LEVELS = 3  # number of levels that give the latency between client and engine
_SECONDS_AND_ERRORS = ("real_s", "simulated_s", "error", "spread")  # of an `ErrorRow`
_IDENTITY = ("system", "workload", "rate_rps", "replay_speed", "seed")


@dataclass(frozen=True)
class ValidatedPoint:
    """A measured level with its simulation.

    `fitted_on` names the levels with the steps that the profile was fitted to, and is empty where
    the profile was given. `identity` are its columns in `cells.csv`. `again` are repeated
    measurements of the same requests. `replayed`: the simulation with the durations of the logged
    steps, where it is possible. `preemptions`: measured, where the server counts them.
    """

    cell: str
    identity: Mapping[str, Any]
    profile: Profile
    fitted_on: tuple[str, ...]
    validation: Validation
    again: tuple[RealLog, ...] = ()
    replayed: Replayed | None = None
    preemptions: int | None = None

    def noting(self, note: str) -> ValidatedPoint:
        """Return the point with one more note."""
        validation = dataclasses.replace(self.validation, notes=(*self.validation.notes, note))
        return dataclasses.replace(self, validation=validation)

    def errors(self) -> list[ErrorRow]:
        """The error table, with the spread of repeated measurements and the error of a step replay.

        Where the level was measured several times, a measured value is the median of them.
        """
        real = _figures(self.validation.real)
        tables = [real, *(_figures(latencies_of(log)) for log in self.again)]
        replayed = {} if self.replayed is None else _figures(self.replayed.latencies)
        error_rows = []
        for row in self.validation.rows():
            key = row.metric, row.statistic
            if key in real:
                values = [table[key] for table in tables]
                if self.again and min(values) > 0:
                    row = dataclasses.replace(row, spread=max(values) / min(values) - 1)
                if replayed and real[key]:
                    row = dataclasses.replace(row, replayed=replayed[key] / real[key] - 1)
                row = row.beside(float(np.median(values)))
            error_rows.append(row)
        return error_rows

    def rows(self) -> list[dict[str, Any]]:
        """Error table as plain values; None for unknown values."""
        return [
            {
                "cell": self.cell,
                **self.identity,
                "metric": row.metric,
                "statistic": row.statistic,
                **{name: finite(getattr(row, name)) for name in _SECONDS_AND_ERRORS},
                "within": row.within,
                "replayed_error": finite(row.replayed),
            }
            for row in self.errors()
        ]


def _figures(seconds: Mapping[str, Floats]) -> dict[tuple[str, str], float]:
    return {
        (metric, name): value
        for metric in METRICS
        for name, value in statistics(seconds[metric]).items()
    }


def validate_run(folder: Path, profile: Profile | None = None) -> list[ValidatedPoint]:
    """Replay every level of a run on real servers, and keep the errors in its folder.

    Args:
        folder: the run folder.
        profile: step times to validate; by default they are fitted to the servers' step logs.

    Raises:
        SloBenchError: no level is of a real server, a level has no step log or too few steps, or
            files cannot be read or written.
    """
    rows = [row for row in read_rows(folder / "cells.csv") if row.get("backend") != "simulated"]
    if not rows:
        raise SloBenchError(f"{folder} has no level of a real server; there is nothing to validate")
    measured = [MeasuredLevel.read(folder, str(row["cell"])) for row in rows]
    specs = planned_cells(folder)
    levels = []
    for row, level in zip(rows, measured, strict=True):
        others = level.comparable(measured)
        identity = {name: row[name] for name in _IDENTITY if row.get(name) is not None}
        judged = _judged(level, identity, others, profile, specs)
        repetitions = tuple(repetition.log for repetition in level.again())
        counted = row.get("server_preemptions")
        preemptions = counted if isinstance(counted, int) else None
        judged = dataclasses.replace(judged, again=repetitions, preemptions=preemptions)
        judged = _with_replay(judged, level, specs.get(level.cell))
        if not row.get("valid"):
            judged = judged.noting(f"the level is not valid: {row.get('invalid_because') or '?'}")
        levels.append(judged)
    _keep(folder, levels)
    return levels


def _with_replay(
    judged: ValidatedPoint, level: MeasuredLevel, spec: CellSpec | None
) -> ValidatedPoint:
    room = level.meta.get("room")
    if room is None or spec is None:
        return judged
    (part,) = level.meta["steps"]
    try:
        step_replay = replay(spec, level.root / part["file"], room)
    except ReplayError as error:
        return judged.noting(f"not replayed with its own step times: {error}")
    return dataclasses.replace(judged, replayed=step_replay)


def _judged(
    level: MeasuredLevel,
    identity: Mapping[str, Any],
    others: Sequence[MeasuredLevel],
    profile: Profile | None,
    specs: Mapping[str, CellSpec],
) -> ValidatedPoint:
    requests = asked_requests(level, specs.get(level.cell))
    if profile is not None:
        validation = _replayed(level, profile, requests=requests)
        return ValidatedPoint(level.cell, identity, profile, (), validation)
    steps = [step for other in others for step in other.steps()]
    if not steps:
        raise SloBenchError(
            f"{level.cell} has no other level with a step log on the same server, to which step "
            "times could be fitted; measure with `slo-bench run --validate`, or give --profile FILE"
        )
    names = tuple(other.cell for other in others)
    fitted = fitted_profile(
        level, others, steps, f"whole steps; {level.cell}, which is judged by it, is not among them"
    )
    client_s = _client_s(others, fitted)
    validation = _replayed(level, fitted, client_s, requests, swap_s_per_token(others, fitted))
    return ValidatedPoint(level.cell, identity, fitted, names, validation)


def _replayed(
    level: MeasuredLevel,
    profile: Profile,
    client_s: float = 0.0,
    requests: AskedRequests | None = None,
    swap_s: float | None = None,
) -> Validation:
    return validate(
        level.log,
        profile,
        level.engine,
        parameters=level.parameters,
        client_s=client_s,
        asked_requests=requests,
        swap_s_per_token=swap_s,
    )


def _client_s(others: Sequence[MeasuredLevel], profile: Profile) -> float:
    """Latency between client and engine in seconds, which the simulation lacks.

    It is the median delay of measured first tokens after simulated ones, among the quarter of the
    requests that were the fastest on both sides, which no queue disturbs; of several levels the
    smallest.
    """
    late = []
    for other in others[:_CLIENT_LEVELS]:
        validation = _replayed(other, profile)
        real_s, simulated_s = validation.real["ttft"], validation.simulated["ttft"]
        fastest = np.argsort(np.maximum(real_s, simulated_s))[: 1 + len(real_s) // 4]
        late.append(float(np.nanmedian((real_s - simulated_s)[fastest])))
    return max(0.0, min(late))


def _keep(folder: Path, levels: Sequence[ValidatedPoint]) -> None:
    for level in levels:
        validation = level.validation
        write_profile(level.profile, folder / FOLDER / f"{level.cell}.toml")
        columns: dict[str, Column] = {
            "prompt_tokens": validation.log.prompt_tokens,
            "output_tokens": validation.log.output_tokens,
        }
        times: dict[str, Column] = {
            f"{metric}_{name}_s": values[metric]
            for metric in METRICS
            for name, values in (("real", validation.real), ("simulated", validation.simulated))
        }
        write_whole(folder / FOLDER / f"{level.cell}.csv.gz", gzip_csv(columns | times))
    rows = [row for level in levels for row in level.rows()]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    for row in rows:
        writer.writerow({k: guarded(v) if isinstance(v, str) else v for k, v in row.items()})
    write_whole(folder / "validation.csv", [text.getvalue().encode()])
    table = [
        {
            "cell": level.cell,
            **level.identity,
            "requests": len(level.validation.log),
            "fitted_on": list(level.fitted_on),
            "measured": 1 + len(level.again),
            "replayed_iterations": level.replayed.iterations if level.replayed else None,
            "step_time": level.validation.step_time,
            "client_s": level.validation.client_s,
            "preemptions": {
                "real": level.preemptions,
                "simulated": level.validation.preemptions,
            },
            "cached_tokens": {
                "real": level.validation.log.cached_tokens,
                "simulated": level.validation.cached_tokens,
            },
            "notes": list(level.validation.notes),
            "rows": level.rows(),
        }
        for level in levels
    ]
    write_whole(folder / TABLE, [json.dumps(table, indent=1, allow_nan=False).encode()])
