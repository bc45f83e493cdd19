"""Decisions of a policy inside a server, beside those of a simulation of the same requests.

The plugin's step log says of every step which requests entered the batch and which were preempted,
and of every request that was sent away why. The simulation has the same requests at their times of
sending, and step times that are fitted to step logs of the same server.

    decisions.json           counts of every level, and how many requests were treated alike
    decisions/<cell>.csv.gz  what was decided about each request, in the server and simulated
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ....predictors.profiles.profile_format import Profile, read_profile
from ....workloads.arrays import Ints
from ....workloads.errors import SloBenchError
from ....workloads.whole_file import write_whole
from ...core.records.decision_counts import DecisionCounts
from ...core.records.request_records import Outcome, Records
from ...core.wire import DROPPED, OFFLOADED, REJECTED
from ...engine.loop.traced_instance import EngineTrace, InstanceLog, State
from ...experiments.execution.cell_specs import CellSpec
from ...load_generator.http.wire_requests import REQUEST_ID
from ...policies.systems import system
from ...results.cell_files import Choice, Column, gzip_csv
from ...results.compared_decisions import ASPECTS, AWAY, COUNTS, FOLDER, TABLE
from ...results.run_folder import read_rows
from ...results.step_log import lines_of
from .log_replay import AskedRequests, replay_of, simulated_again
from .measured_level import (
    MeasuredLevel,
    asked_requests,
    fitted_profile,
    planned_cells,
    swap_s_per_token,
)
from .run_replay import FOLDER as VALIDATION

_ROW = re.compile(rf"{REQUEST_ID}(\d+)(?!\d)")
_AWAY = {REJECTED: 1, DROPPED: 2, OFFLOADED: 3}
_OUTCOMES = {Outcome.REJECTED: 1, Outcome.DROPPED: 2}


@dataclass(frozen=True)
class RequestDecisions:
    """What was decided about each request, by its row in the level's records.

    `entered`: its place among all that entered a batch, from 0 on, by the first time; -1: never.
    `overtook`: it entered before a request of its instance that had been sent earlier. `away`: its
    place in `AWAY`.
    """

    entered: Ints
    overtook: Ints
    swaps: Ints
    recomputations: Ints
    away: Ints

    def differing(self, other: RequestDecisions) -> dict[str, Ints]:
        """Rows of the requests that were treated differently, by aspect."""
        return {
            name: np.flatnonzero(getattr(self, name) != getattr(other, name)) for name in ASPECTS
        }


@dataclass(frozen=True)
class LevelDecisions:
    """Decisions of one level. `simulated` is None where it was not simulated, which `note`
    explains; `differing` where the log does not tell requests apart.
    """

    cell: str
    requests: int
    server: Mapping[str, int]
    simulated: Mapping[str, int] | None = None
    differing: Mapping[str, Ints] | None = None
    step_times: str = ""
    note: str = ""
    by_request: Mapping[str, RequestDecisions] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain values, for `decisions.json`."""
        alike = differing = None
        if self.differing is not None:
            alike = self.requests - len(np.unique(np.concatenate([*self.differing.values()])))
            differing = {name: rows.tolist() for name, rows in self.differing.items()}
        return {
            "cell": self.cell,
            "requests": self.requests,
            "server": self.server,
            "simulated": self.simulated,
            "alike": alike,
            "differing": differing,
            "step_times": self.step_times,
            "note": self.note,
        }


def compare_decisions(folder: Path) -> list[LevelDecisions]:
    """Simulate every level of a run in which a policy decided inside servers, and keep both sides
    in its folder; nothing is written where there is none.

    Raises:
        SloBenchError: files of the run cannot be read or written.
    """
    rows = [
        row for row in read_rows(folder / "cells.csv") if row.get("decisions_order") is not None
    ]
    rows = [row for row in rows if row["decisions_order"] == row["decisions_order"]]
    if not rows:
        return []
    specs = planned_cells(folder)
    measured: dict[str, MeasuredLevel] = {}
    for row in rows:
        with contextlib.suppress(SloBenchError):  # without records it is not simulated
            measured[str(row["cell"])] = MeasuredLevel.read(folder, str(row["cell"]))
    levels = [_level(folder, row, measured, specs.get(str(row["cell"]))) for row in rows]
    for level in levels:
        if level.by_request:
            write_whole(folder / FOLDER / f"{level.cell}.csv.gz", gzip_csv(_columns(level)))
    table = json.dumps([level.to_json() for level in levels], indent=1, allow_nan=False)
    write_whole(folder / TABLE, [table.encode()])
    return levels


def _columns(level: LevelDecisions) -> dict[str, Column]:
    columns: dict[str, Column] = {"id": np.arange(level.requests, dtype=np.int64)}
    for side, decisions in level.by_request.items():
        for name in ("entered", *ASPECTS):
            values = getattr(decisions, name)
            columns[f"{side}_{name}"] = Choice(values, AWAY) if name == "away" else values
    return columns


def _level(
    folder: Path,
    row: Mapping[str, Any],
    measured: Mapping[str, MeasuredLevel],
    spec: CellSpec | None,
) -> LevelDecisions:
    cell = str(row["cell"])
    counts = {name: int(row.get(name) or 0) for name in COUNTS}
    trace = EngineTrace()
    try:
        level, requests = _simulable(measured.get(cell), spec)
        profile, source, swap_s = _profile(folder, level, list(measured.values()))
        replayed = replay_of(
            level.log,
            profile,
            level.engine,
            parameters=level.parameters,
            swap_s_per_token=swap_s,
        )
        records = simulated_again(replayed, requests, trace).records
    except SloBenchError as error:
        return LevelDecisions(cell, int(row["requests"]), counts, note=f"not simulated: {error}")
    simulated = _simulated(records, trace, requests)
    inside = _logged(level, requests)
    both = {} if inside is None else {"server": inside, "simulated": simulated}
    return LevelDecisions(
        cell,
        len(requests.order),
        counts,
        simulated=counts_of(records, trace),
        differing=None if inside is None else inside.differing(simulated),
        step_times=source,
        note="" if both else "the step log does not name requests, so counts alone are compared",
        by_request=both,
    )


def _simulable(
    level: MeasuredLevel | None, spec: CellSpec | None
) -> tuple[MeasuredLevel, AskedRequests]:
    if spec is not None and system(spec.system).cluster is not None:
        raise SloBenchError("its servers have different roles")
    requests = None if level is None else asked_requests(level, spec)
    if level is None or requests is None:
        raise SloBenchError(
            "its requests are not known as policies saw them (no experiment or records of "
            "requests, embedding requests, or adapters)"
        )
    return level, requests


def _profile(
    folder: Path, level: MeasuredLevel, measured: Sequence[MeasuredLevel]
) -> tuple[Profile, str, float | None]:
    """Step times of the level's server, their source (those of its validation, else of other
    levels on the same server, else of its own steps), and the time of its swaps by token.
    """
    kept = folder / VALIDATION / f"{level.cell}.toml"
    others = level.comparable(measured)
    if kept.is_file():
        profile = read_profile(kept)
        return profile, "those of its validation", swap_s_per_token(others, profile)
    steps = [step for other in others for step in other.steps()]
    if steps:
        source = f"fitted to {len(steps):,} steps of {', '.join(other.cell for other in others)}"
        profile = fitted_profile(level, others, steps, "whole steps")
        return profile, source, swap_s_per_token(others, profile)
    steps = level.steps()
    if not steps:
        raise SloBenchError("the server kept no step log, so its step times are not known")
    fitted = fitted_profile(level, [level], steps, "whole steps of the level itself")
    return fitted, f"fitted to its own {len(steps):,} steps", swap_s_per_token([level], fitted)


# ---------------------------------------------------------------- the server's own log


def _logged(level: MeasuredLevel, level_requests: AskedRequests) -> RequestDecisions | None:
    """What the step logs of a level say of each request; None where they do not name requests."""
    requests = len(level_requests.order)
    columns = {name: np.zeros(requests, dtype=np.int64) for name in ASPECTS}
    entered: list[tuple[float, int]] = []
    names_requests = False
    for part in level.meta.get("steps") or []:
        here: list[int] = []
        events = _events(level.root / part["file"], part["begin"], part["end"])
        for time_s, event, row, how in events:
            if not 0 <= row < requests:
                continue
            names_requests = True
            if event == "away":
                columns["away"][row] = _away(how)
            elif event == "preempted":
                columns["swaps" if how == "swap" else "recomputations"][row] += 1
            elif row not in here:
                here.append(row)
                entered.append((time_s, row))
        columns["overtook"][_overtaking(here, level_requests.order)] = 1
    if not names_requests:
        return None
    return RequestDecisions(_places(entered, requests), **columns)


def _events(path: Path, begin: int, end: int | None) -> Iterator[tuple[float, str, int, str]]:
    """Time, event, row and manner of everything that a step log says of single requests."""
    for line in lines_of(path, begin, end):
        event, time_s = line.get("event"), float(line.get("time_s") or 0.0)
        if event == "step":
            for victim in line.get("preempted", ()):
                yield time_s, "preempted", _row(victim["id"]), str(victim["by"])
            for request_id in line.get("entered", ()):
                yield time_s, "entered", _row(request_id), ""
        elif event == "preempted":
            yield time_s, "preempted", _row(line["id"]), "recompute"
        elif event == "away":
            yield time_s, "away", _row(line["id"]), str(line.get("reason") or "")


def _row(request_id: object) -> int:
    match = _ROW.search(str(request_id))
    return int(match[1]) if match else -1


def _away(reason: str) -> int:
    return next((place for text, place in _AWAY.items() if reason.startswith(text)), 0)


def _overtaking(entered: Sequence[int], order: Ints) -> list[int]:
    """Of the requests of one instance, in the order in which they entered, those that entered
    before one that had been sent earlier.
    """
    place = {int(row): position for position, row in enumerate(order)}
    overtaking, earliest = [], len(order)
    for row in reversed(entered):
        if place[row] > earliest:
            overtaking.append(row)
        earliest = min(earliest, place[row])
    return overtaking


def _places(entered: Sequence[tuple[float, int]], requests: int) -> Ints:
    places = np.full(requests, -1, dtype=np.int64)
    for position, (_, row) in enumerate(sorted(entered, key=lambda entry: entry[0])):
        places[row] = position
    return places


# ---------------------------------------------------------------- the simulation


def _simulated(
    records: Records, trace: EngineTrace, level_requests: AskedRequests
) -> RequestDecisions:
    requests = len(level_requests.order)
    columns = {name: np.zeros(requests, dtype=np.int64) for name in ASPECTS}
    columns["swaps"][level_requests.order] = records.preemptions_swap
    columns["recomputations"][level_requests.order] = records.preemptions_recompute
    away = [_OUTCOMES.get(Outcome(int(outcome)), 0) for outcome in records.outcome]
    columns["away"][level_requests.order] = away
    entered: list[tuple[float, int]] = []
    for log in trace.instances.values():
        first = sorted((changes[0].time_s, r) for r, changes in log.moves.items())
        here = [(time_s, int(level_requests.order[r])) for time_s, r in first]
        columns["overtook"][_overtaking([row for _, row in here], level_requests.order)] = 1
        entered += here
    return RequestDecisions(_places(entered, requests), **columns)


def counts_of(records: Records, trace: EngineTrace) -> dict[str, int]:
    """Decisions of a simulation, counted as the plugin counts them inside a server."""
    counts = DecisionCounts()
    for log in trace.instances.values():
        _count(records, log, counts)
    away = np.isin(records.outcome, [int(outcome) for outcome in _OUTCOMES])
    counts.release = int(away.sum())
    return counts.totals() | {
        "preemptions_swap": int(records.preemptions_swap.sum()),
        "preemptions_recompute": int(records.preemptions_recompute.sum()),
    }


_ARRIVES, _ENDS, _PREEMPTED, _ENTERS = range(4)  # in the order in which a scheduler sees them


def _count(records: Records, log: InstanceLog, counts: DecisionCounts) -> None:
    """Count the choices of one instance from the moves of its requests."""
    events: list[tuple[float, int, int]] = []
    for r, changes in log.moves.items():
        events.append((float(records.queued_s[r]), _ARRIVES, r))
        before: State | None = None
        for time_s, state in changes:
            if state is State.DONE:
                events.append((time_s, _ENDS, r))
            elif state in (State.PREEMPTED, State.SWAPPED):
                events.append((time_s, _PREEMPTED, r))
            elif before in (None, State.PREEMPTED, State.SWAPPED):
                events.append((time_s, _ENTERS, r))
            before = state
    waiting: set[int] = set()
    batch: set[int] = set()
    entering: list[int] = []
    events.sort()
    for position, (time_s, event, r) in enumerate(events):
        if event == _ARRIVES:
            waiting.add(r)
        elif event == _ENDS:
            batch.discard(r)
        elif event == _PREEMPTED:
            batch.discard(r)
            counts.preempt(r, batch)
            waiting.add(r)
        else:
            entering.append(r)
            waiting.discard(r)
            batch.add(r)
            last = position + 1 == len(events) or events[position + 1][:2] != (time_s, _ENTERS)
            if last:
                counts.enter(entering, waiting)
                entering = []
