"""Results of all requests as columns; parts from several processes are joined."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core.records import Gaps, Outcome, TimeseriesRow
from .answers import CompletionResult, read_answer
from .drive import DriveResult
from .exchange import Exchange
from .faults import RequestFault

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FAULTS: tuple[RequestFault, ...] = tuple(RequestFault)
_MICROSECONDS = 1e6
_GAPS_AT_ONCE = 1 << 18


@dataclass
class RequestColumns:
    """One row for each request of the workload. Times count from its time zero, NaN: never.

    `started_s` is when we turned to the request, `sent_s` when it was written to a connection;
    both would be `arrival_s` if the client were never late and connections cost nothing.
    `prompt_tokens`, `completion_tokens` and `cached_tokens` are the server's, -1: it said nothing.
    """

    arrival_s: Floats
    started_s: Floats
    sent_s: Floats
    first_byte_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    ended_s: Floats
    outcome: Ints
    fault: Ints  # index into FAULTS
    status: Ints
    endpoint: Ints
    connections: Ints
    chunks: Ints
    output_tokens: Ints
    prompt_tokens: Ints
    completion_tokens: Ints
    cached_tokens: Ints

    @classmethod
    def empty(cls, n: int) -> RequestColumns:
        """Requests to which nothing has happened: none ever came."""
        unknown = ("endpoint", "prompt_tokens", "completion_tokens", "cached_tokens")
        columns = {}
        for f in fields(cls):
            if f.name.endswith("_s"):
                columns[f.name] = np.full(n, np.nan)
            else:
                columns[f.name] = np.full(n, -1 if f.name in unknown else 0, dtype=np.int64)
        columns["outcome"][:] = Outcome.CANCELLED
        return cls(**columns)


@dataclass
class SenderResult:
    """Results of one sending process: the rows that it sent."""

    start_s: float  # the workload's time zero, by `time.perf_counter`
    rows: Ints
    columns: RequestColumns  # of those rows only
    gaps: Gaps
    lag_s: Floats
    cpu_s: float
    peak_rss_bytes: int
    details: dict[int, str] = field(default_factory=dict)  # what is known of a fault, by row
    texts: dict[int, str] = field(default_factory=dict)
    token_s: Floats = field(default_factory=lambda: np.empty(0))  # row after row, if kept
    told: tuple[
        TimeseriesRow, ...
    ] = ()  # how right predicted lengths were, if they followed the run

    def save(self, path: Path) -> None:
        """Write the result to a file for another process."""
        arrays = {f.name: getattr(self.columns, f.name) for f in fields(RequestColumns)}
        numbers = np.array([self.start_s, self.cpu_s, self.peak_rss_bytes])
        np.savez(
            path,
            **{f"column_{name}": values for name, values in arrays.items()},
            rows=self.rows,
            gap_s=self.gaps.gap_s,
            gap_count=self.gaps.count,
            lag_s=self.lag_s,
            numbers=numbers,
            token_s=self.token_s,
        )
        path.with_suffix(".json").write_text(json.dumps([self.details, self.texts]), "utf-8")

    @classmethod
    def load(cls, path: Path) -> SenderResult:
        """Read a result written by `save`."""
        details, texts = json.loads(path.with_suffix(".json").read_text("utf-8"))
        with np.load(path, allow_pickle=False) as found:
            start_s, cpu_s, peak_rss_bytes = found["numbers"].tolist()
            return cls(
                start_s=start_s,
                rows=found["rows"],
                columns=RequestColumns(
                    **{f.name: found[f"column_{f.name}"] for f in fields(RequestColumns)}
                ),
                gaps=Gaps(found["gap_s"], found["gap_count"]),
                lag_s=found["lag_s"],
                cpu_s=cpu_s,
                peak_rss_bytes=int(peak_rss_bytes),
                details={int(row): text for row, text in details.items()},
                texts={int(row): text for row, text in texts.items()},
                token_s=found["token_s"],
            )


def read_part(
    driven: DriveResult,
    embeds: Callable[[int], bool],
    *,
    keep_texts: bool,
    save_token_times: bool,
) -> SenderResult:
    """Read all answers; the spool is closed."""
    start_s = driven.start_s
    exchanges = sorted(driven.exchanges, key=lambda exchange: exchange.row)
    columns = RequestColumns.empty(len(exchanges))
    gaps = _GapCounts()
    part = SenderResult(
        start_s=start_s,
        rows=np.array([exchange.row for exchange in exchanges], dtype=np.int64),
        columns=columns,
        gaps=Gaps(np.empty(0), np.empty(0, dtype=np.int64)),
        lag_s=np.array(driven.lag_s),
        cpu_s=driven.cpu_s,
        peak_rss_bytes=driven.peak_rss_bytes,
    )
    token_s: array[float] = array("d")
    for place, exchange in enumerate(exchanges):
        raw = driven.spool.raw(exchange, embeds=embeds(exchange.row))
        answer = read_answer(raw, keep_text=keep_texts)
        _fill(columns, place, exchange, answer, start_s)
        if not raw.embeds:
            gaps.add(answer.token_s)
            columns.output_tokens[place] = len(answer.token_s)
        if answer.detail:
            part.details[exchange.row] = answer.detail
        if keep_texts:
            part.texts[exchange.row] = answer.text
        if save_token_times:
            token_s.extend(answer.token_s if not raw.embeds else ())
    driven.spool.close()
    part.gaps = gaps.total()
    part.token_s = np.array(token_s) - start_s
    return part


def _fill(
    columns: RequestColumns,
    place: int,
    exchange: Exchange,
    answer: CompletionResult,
    start_s: float,
) -> None:
    columns.arrival_s[place] = exchange.arrival_s
    columns.started_s[place] = exchange.started_s - start_s
    columns.sent_s[place] = exchange.sent_s - start_s
    columns.first_byte_s[place] = exchange.first_byte_s - start_s
    columns.ended_s[place] = exchange.end_s - start_s
    columns.endpoint[place] = exchange.endpoint
    columns.connections[place] = exchange.connections
    columns.status[place] = exchange.status
    if answer.token_s:
        columns.first_token_s[place] = answer.token_s[0] - start_s
        columns.last_token_s[place] = answer.token_s[-1] - start_s
    columns.outcome[place] = answer.outcome
    columns.fault[place] = FAULTS.index(answer.fault)
    columns.chunks[place] = answer.chunks
    columns.prompt_tokens[place] = answer.prompt_tokens
    columns.completion_tokens[place] = answer.completion_tokens
    columns.cached_tokens[place] = answer.cached_tokens


class _GapCounts:
    """Counts gaps by whole microseconds, so that a long run takes no more memory."""

    def __init__(self) -> None:
        self._pending: list[Floats] = []
        self._n = 0
        self._counted: list[Gaps] = []

    def add(self, token_s: Sequence[float]) -> None:
        if len(token_s) < 2:
            return
        self._pending.append(np.rint(np.diff(token_s) * _MICROSECONDS))
        self._n += len(token_s) - 1
        if self._n >= _GAPS_AT_ONCE:
            self._count()

    def _count(self) -> None:
        if self._pending:
            values, counts = np.unique(np.concatenate(self._pending), return_counts=True)
            self._counted.append(Gaps(values / _MICROSECONDS, counts))
        self._pending, self._n = [], 0
        self._counted = [joined_gaps(self._counted)]

    def total(self) -> Gaps:
        self._count()
        return self._counted[0]


def joined_gaps(parts: Iterable[Gaps]) -> Gaps:
    """Gaps of several, each value once."""
    parts = list(parts)
    if not parts:
        return Gaps(np.empty(0), np.empty(0, dtype=np.int64))
    values, place = np.unique(np.concatenate([p.gap_s for p in parts]), return_inverse=True)
    counts = np.zeros(len(values), dtype=np.int64)
    np.add.at(counts, place, np.concatenate([p.count for p in parts]))
    return Gaps(values, counts)


def joined_columns(parts: Sequence[SenderResult], n: int) -> RequestColumns:
    """Join the columns of all `n` requests; requests never sent are cancelled."""
    whole = RequestColumns.empty(n)
    for part in parts:
        for f in fields(RequestColumns):
            getattr(whole, f.name)[part.rows] = getattr(part.columns, f.name)
    return whole
