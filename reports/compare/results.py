"""Results to compare, whatever program wrote them: runs of systems, request by request."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...harness.core.records.judging import judge_records
from ...harness.core.records.request_records import Outcome, Records
from ...harness.experiments.config.setting import listed
from ...harness.results.metrics import objectives
from ...harness.results.rate_windows import RateWindow, counted_requests, rate_window
from ...harness.results.read_run import RunResults, detail_file, read_run, read_table
from ...harness.results.request_figures import RequestFigure, Requests
from ...harness.results.run_columns import FAULT_COLUMN, REASON_COLUMN
from ...harness.results.run_folder import INPUTS
from ...harness.servers.launch.backend_names import SIMULATED
from ...workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from ...workloads.parsing import parse_toml
from ...workloads.request import NEVER_S, SLO_COLUMNS, Slo
from ..figures.facets import IDENTITY
from ..figures.figure import rate_key
from ..figures.levels import combine
from ..pages.answers_page import failed_text
from ..terminal.experiment_lines import lines_of_settings
from .conditions import Settings, column_text

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

Clock = Literal["scheduled", "sent"]
"""From when latencies count: the moment a request was due, or the one it was sent at."""


class NotComparableError(SloBenchError):
    """Results between which no difference would mean anything."""


COMPARED = ("attainment", "goodput", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
GATED = ("attainment", "goodput", "ttft_p99", "tpot_p99")
"""What is looked at where nothing is asked for."""

_MOST_NAMED = 3  # cells of one reason; more are counted


def comparable() -> dict[str, RequestFigure]:
    """By their short names, the figures of requests of which more or less is better."""
    return {n: figure for n, figure in objectives().items() if isinstance(figure, RequestFigure)}


def metrics_named(text: str) -> tuple[RequestFigure, ...]:
    """`attainment,ttft_p99`; the names of columns in cells.csv (`ttft_p99_s`) do as well.

    Raises:
        SloBenchError: no figure is named, or one that there is not.
    """
    by_name = comparable()
    if not text.strip(" ,"):
        raise SloBenchError(f"no metric is named; known: {', '.join(by_name)}")
    columns = {figure.name: figure for figure in by_name.values()}
    metrics = []
    for name in (piece.strip().lower() for piece in text.split(",")):
        figure = by_name.get(name) or columns.get(name)
        if figure is None:
            raise UnknownNameError("metric", name, by_name)
        metrics.append(figure)
    return tuple(dict.fromkeys(metrics))


@dataclass(frozen=True)
class RunSample:
    """The counted requests of one run, in order of arrival, and what its rates divide by."""

    requests: Requests
    window: RateWindow

    def __len__(self) -> int:
        return len(self.requests.records)

    @property
    def finished(self) -> bool:
        """Whether a request finished."""
        return not bool(np.isnan(self.requests.records.finish_s).all())


@dataclass(frozen=True)
class RequestResults:
    """Times and token counts of every request of one run. Times are seconds, NaN for no such event.

    `bounds_s` holds each request's SLO, None where the file has none. `sent_s` is None where only
    the scheduled arrival is known, which of a simulated client is the same. `duration_s` stands in
    for moments: where it is set, `arrival_s` is all zero and times are durations. `offered` is
    false where no rate is offered, or none is known. `further` are columns of `Records` that other
    programs do not write.
    """

    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats
    output_tokens: Floats
    prompt_tokens: Floats
    expected_output_tokens: Floats | None  # asked for; None where only those given are known
    finished: Mask
    bounds_s: Mapping[str, Floats] | None = None
    sent_s: Floats | None = None
    duration_s: float | None = None
    warmup_s: float = 0.0
    offered: bool = True
    further: Mapping[str, Floats] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def counted(self) -> Mask:
        """All that did not arrive during the warm-up; what never arrived counts (as missed)."""
        return counted_requests(self.arrival_s, self.warmup_s)

    def sample(self, clock: Clock, slo: Slo | None) -> RunSample:
        """The requests that count, with latencies on that clock, held against `slo` or their own
        bounds. Whatever arrived and did not finish is a miss.
        """
        counted = self.counted
        if not counted.any():
            raise SloBenchError(f"warmup_s = {self.warmup_s:g} leaves no request to compare")
        began_s = self.arrival_s
        if clock == "sent" and self.sent_s is not None:
            began_s = self.sent_s
        unknown = np.full(len(self), np.nan)
        columns = {
            **{column.name: unknown for column in fields(Records)},
            "untimed_tokens": np.ones(len(self)),
            "outcome": np.where(self.finished, Outcome.FINISHED, Outcome.UNFINISHED),
            **self.further,
            "arrival_s": began_s,
            "first_token_s": self.first_token_s,
            "finish_s": self.finish_s,
            "output_tokens": np.nan_to_num(self.output_tokens),
        }
        records = Records(**{name: values[counted] for name, values in columns.items()})
        bounds = self.bounds_s if slo is None else slo.bounds
        judged = None
        if bounds is not None:
            bounds = {n: np.broadcast_to(b, len(self))[counted] for n, b in bounds.items()}
            judged = judge_records(records, self.finished[counted], bounds)
        untruncated = np.zeros(len(records), dtype=np.bool_)
        requests = Requests(records, judged, self.prompt_tokens[counted], untruncated)
        return RunSample(requests, self._window())

    def _window(self) -> RateWindow:
        if self.duration_s is not None:
            return RateWindow(0.0, self.duration_s, self.offered)
        return rate_window(self.arrival_s, self.finish_s, self.warmup_s, offered=self.offered)


@dataclass(frozen=True)
class Cell:
    """One run of one system at one load with one seed; its requests are read when asked for.

    `identity` says everything else that tells cells apart, by column; "" is unknown.
    """

    name: str
    identity: Mapping[str, str]
    rate_rps: float | None  # None: closed loop, or unknown
    seed: int
    read: Callable[[], RequestResults] = field(repr=False)
    stationary: bool | None = None  # None: cannot be told
    window_s: float = math.nan  # window of arrivals
    invalid_because: str = ""
    row: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of cells.csv


@dataclass(frozen=True)
class Results:
    """All valid cells of a run folder or of another program's file.

    `refused` says by figure (or its family: `ttft`) why it cannot be compared with anything;
    `settings` are those of the experiment, None where the file holds none; `unfinished` says in
    words that cells are missing; `left_out` are the cells that are invalid; `failed` says in words
    how many requests failed, empty where none did; `tested` names in lines what was tested.
    `made_by` is what simulated figures depend on beside settings: version and step times, by name.
    """

    name: str
    kind: str
    cells: Sequence[Cell]
    clock: Clock = "scheduled"
    has_slo: bool = False
    notes: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    settings: Settings | None = None
    left_out: Sequence[Cell] = ()
    simulated: bool = False
    unfinished: str = ""
    failed: str = ""
    tested: tuple[str, ...] = ()
    made_by: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, metric: RequestFigure, slo: Slo | None) -> str | None:
        """Why this figure cannot be had here, if it cannot."""
        for family in (metric.short, metric.short.partition("_")[0]):
            if family in self.refused:
                return f"{self.name}: {self.refused[family]}"
        if metric.needs_slo:
            if slo is None and not self.has_slo:
                return (
                    f"{self.name}: {self.kind} keeps no SLO with its requests; "
                    "say which to hold both against, as in --slo ttft=1,tpot=0.15"
                )
            for name, bound_s in (slo or Slo()).bounds.items():
                if bound_s < NEVER_S and name in self.refused:
                    return f"{self.name}: the SLO bounds {name}, and {self.refused[name]}"
        return None


def common_clock(a: Results, b: Results) -> Clock:
    """The clock that both have: time from the scheduled arrival if both know it."""
    return "sent" if "sent" in (a.clock, b.clock) else "scheduled"


_OUTCOMES = {outcome.name.lower(): float(outcome) for outcome in Outcome}
_COLUMNS = (
    "arrival_s",
    "first_token_s",
    "finish_s",
    "outcome",
    "output_tokens",
    "prompt_tokens",
    "expected_output_tokens",
    *SLO_COLUMNS.values(),
)


def run_results(path: Path) -> Results:
    """All valid cells of a run folder.

    Raises:
        SloBenchError: it is no whole run folder, kept no per-request records, or has no valid cell.
    """
    run = read_run(path)
    if not run.keeps_requests:
        raise SloBenchError(
            f"{path} kept no per-request records, without which nothing says how certain a "
            "difference is; run it again without --records none"
        )
    table = combine([run])
    cells = run_cells(run, table)
    left_out = [cell for cell in cells if cell.invalid_because]
    if len(left_out) == len(cells):
        raise NotComparableError(
            f"nothing to compare: no cell of {path} is valid: {reasons_text(left_out)}"
        )
    notes = []
    if left_out:
        notes.append(
            f"{run.name}: {len(left_out)} of {len(cells)} cells are invalid and left out: "
            f"{reasons_text(left_out)}."
        )
    settings = Settings.of(_experiment(run), run.environment.get(INPUTS))
    simulated = bool((table["backend"] == "simulated").any())
    step_times: Mapping[str, Any] = run.environment.get("step_time") or {}
    made_by = {"slo-bench": str(run.environment.get("slo_bench"))} | {
        f"step times of {name}": str(entry.get("provenance")) for name, entry in step_times.items()
    }
    return Results(
        name=run.name,
        kind="slo-bench",
        cells=[cell for cell in cells if not cell.invalid_because],
        has_slo=True,
        notes=tuple(notes),
        settings=settings.with_api(table),
        left_out=left_out,
        simulated=simulated,
        made_by=made_by if simulated else {},
        unfinished=run.unfinished,
        failed=failed_text(table),
        tested=tuple(lines_of_settings(run.experiment_toml)),
    )


def run_cells(run: RunResults, table: pd.DataFrame) -> list[Cell]:
    """The cells of a run, of the rows of `levels.combine` that are its own."""
    experiment = _experiment(run)
    closed = _closed(experiment)
    columns = [c for c in ("system", *IDENTITY, *run.axes) if c in table.columns]
    return [
        Cell(
            name=str(row["cell"]),
            identity={c: _identity(c, row[c], axis=c in run.axes) for c in columns},
            rate_rps=None if closed else float(row["level_rps"]),
            seed=int(row["seed"]),
            read=partial(
                read_requests,
                run.path,
                str(row["cell"]),
                _warmup_s(experiment, row),
                offered=not closed,
            ),
            stationary=row.get("stationary"),
            window_s=float(row.get("arrival_window_s", math.nan)),
            invalid_because=_invalid_because(row),
            row=dict(row),
        )
        for _, row in table.iterrows()
    ]


def _invalid_because(row: pd.Series[Any]) -> str:
    """Why a cell is no result; empty if it is one. Of measured requests one must have finished;
    that a simulated policy serves none is a result.
    """
    if not row["valid"]:
        return str(row.get(REASON_COLUMN) or "") or "late client"
    if row["backend"] == SIMULATED or row.get("finished") != 0:
        return ""
    detail = str(row.get(FAULT_COLUMN) or "")
    return f"none of {int(row['requests'])} requests finished" + (f" ({detail})" if detail else "")


def reasons_text(cells: Sequence[Cell]) -> str:
    """`late client (CELL, CELL and 3 more); …`: why cells are invalid."""
    by_reason: dict[str, list[str]] = {}
    for cell in cells:
        by_reason.setdefault(cell.invalid_because, []).append(cell.name)
    pieces = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        pieces.append(f"{reason} ({', '.join(names[:_MOST_NAMED])}{more})")
    return "; ".join(pieces)


def _experiment(run: RunResults) -> Mapping[str, object]:
    try:
        return parse_toml(run.experiment_toml)
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(run.path / "experiment.toml", None, f"is no TOML: {error}") from error


def _closed(experiment: Mapping[str, object]) -> bool:
    """Whether a number of users sets the load; its rate is then an outcome, not a setting."""
    processes = listed(experiment.get("arrivals", ""))
    return any(str(process).startswith("concurrency") for process in processes)


def _warmup_s(experiment: Mapping[str, object], row: pd.Series[Any]) -> float:
    warmup_s = row.get("warmup_s", experiment.get("warmup_s", 0.0))
    is_number = isinstance(warmup_s, str | int | float) and warmup_s != ""
    return float(warmup_s) if is_number else 0.0


def _identity(column: str, value: object, *, axis: bool) -> str:
    """A value of a column; "" is unknown. Of an axis, an empty field is an unset value."""
    if axis and "." not in column:
        return column_text(column, value)
    if value is None or value != value:
        return ""
    return rate_key(value) if isinstance(value, float) else str(value)


def read_requests(
    folder: Path, cell: str, warmup_s: float = 0.0, *, offered: bool = True
) -> RequestResults:
    """The per-request records of a cell; `offered` is false for a closed loop.

    Raises:
        SloBenchError: they are missing or cannot be read.
    """
    path = detail_file(folder / "requests", cell)
    recorded = [column.name for column in fields(Records) if column.name not in _COLUMNS]
    frame = read_table(path, _COLUMNS, ("sent_s", *recorded), words=("outcome",))
    frame = frame.assign(outcome=frame["outcome"].astype(str).map(_OUTCOMES))

    def column(name: str) -> NDArray[np.float64]:
        return frame[name].to_numpy()

    return RequestResults(
        arrival_s=column("arrival_s"),
        first_token_s=column("first_token_s"),
        finish_s=column("finish_s"),
        output_tokens=column("output_tokens"),
        prompt_tokens=column("prompt_tokens"),
        expected_output_tokens=column("expected_output_tokens"),
        finished=column("outcome") == Outcome.FINISHED,
        bounds_s={short: column(name) for short, name in SLO_COLUMNS.items()},
        sent_s=column("sent_s") if "sent_s" in frame else None,
        warmup_s=warmup_s,
        offered=offered,
        further={name: column(name) for name in ("outcome", *recorded) if name in frame},
    )
