"""Results of requests: bytes kept in a file during the run, and read into columns afterwards.

The columns of several sending processes are joined.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

import numpy as np

from ....workloads.arrays import Floats, Ints
from ...core.records.request_records import Gaps, Outcome, TimeseriesRow
from .answers import CompletionResult, Raw, read_answer
from .connection import Exchange
from .faults import RequestFault
from .wire_requests import WireRequests

FAULTS: tuple[RequestFault, ...] = tuple(RequestFault)
_MICROSECONDS = 1e6
_GAPS_AT_ONCE = 1 << 18
_MOST_BINS = 16  # for each gap that is counted; sorting takes longer


class Spool:
    """Private temporary file for exchanges; it is deleted when closed."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        # By row: where its timestamps, lengths and bytes begin, how many pieces, how many bytes.
        self._places: dict[int, tuple[int, int, int]] = {}
        self._end = 0

    def keep(self, exchange: Exchange) -> None:
        """Move the bytes of an ended exchange out of memory.

        Where the file cannot take them, the exchange ends with a fault of the client.
        """
        pieces = exchange.pieces
        if not pieces:
            return
        body = b"".join(pieces)
        record = exchange.stamps.tobytes() + array("I", map(len, pieces)).tobytes() + body
        exchange.pieces = []
        exchange.stamps = array("d")
        try:
            written = 0
            while written < len(record):
                written += os.pwrite(self._file.fileno(), record[written:], self._end + written)
        except OSError as error:
            exchange.fault = RequestFault.CLIENT
            folder = tempfile.gettempdir()
            exchange.detail = f"the answer cannot be kept in {folder}: {error.strerror}"
            return
        self._places[exchange.row] = self._end, len(pieces), len(body)
        self._end += len(record)

    def raw(
        self,
        exchange: Exchange,
        *,
        embeds: bool = False,
        most_tokens: int | None = None,
        hides: bool = False,
    ) -> Raw:
        """Return an exchange with its bytes, whether they are in the file or not yet."""
        place = self._places.get(exchange.row)
        if place is None:
            stamps, pieces = exchange.stamps, exchange.pieces
            lengths, body = array("I", map(len, pieces)), b"".join(pieces)
        else:
            stamps, lengths, body = self._read(*place)
        return Raw(
            exchange.status,
            exchange.fault,
            exchange.detail,
            stamps,
            lengths,
            body,
            embeds,
            most_tokens,
            exchange.chunked,
            exchange.headers,
            hides,
        )

    def _read(
        self, offset: int, pieces: int, body_bytes: int
    ) -> tuple[array[float], array[int], bytes]:
        stamps, lengths = array("d"), array("I")
        stamp_bytes = pieces * stamps.itemsize
        body_start = stamp_bytes + pieces * lengths.itemsize
        record = os.pread(self._file.fileno(), body_start + body_bytes, offset)
        stamps.frombytes(record[:stamp_bytes])
        lengths.frombytes(record[stamp_bytes:body_start])
        return stamps, lengths, record[body_start:]

    def close(self) -> None:
        """Delete the temporary file."""
        self._file.close()


@dataclass(repr=False)  # asyncio makes the text of what a task returns: here, of every answer
class DriveResult:
    """Exchanges of a run and the client's own timing. Times are those of `time.perf_counter`."""

    start_s: float  # the workload's time zero
    exchanges: list[Exchange]
    spool: Spool
    answers: dict[int, CompletionResult]  # by row, those that were read during the run
    lag_s: array[float]  # delay of the event loop, sampled 50 times a second
    cpu_s: float
    peak_rss_bytes: int


@dataclass
class RequestColumns:
    """Columns with one row for each request of the workload.

    Times are seconds from the workload's time zero; NaN if the event did not happen. `started_s` is
    when the client began with the request, `sent_s` when it was written to a connection; both would
    be `arrival_s` if the client were never late and connections cost nothing. `prompt_tokens`,
    `completion_tokens` and `cached_tokens` are counts of the server, -1 if unknown.
    `untimed_tokens` have no part in TPOT; `unsure` is 1 where the number of tokens is not known,
    `surplus` where there are more than were asked for, `refuted` where the usage is not used,
    `silent` where an answer opened long before it showed something.
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
    untimed_tokens: Floats
    unsure: Ints
    surplus: Ints
    refuted: Ints
    silent: Ints
    prompt_tokens: Ints
    completion_tokens: Ints
    cached_tokens: Ints

    @classmethod
    def empty(cls, n: int) -> RequestColumns:
        """Columns of `n` requests that never arrived."""
        unknown = ("endpoint", "prompt_tokens", "completion_tokens", "cached_tokens")
        columns = {}
        for f in fields(cls):
            if f.name.endswith("_s"):
                columns[f.name] = np.full(n, np.nan)
            elif f.name == "untimed_tokens":
                columns[f.name] = np.ones(n)
            else:
                columns[f.name] = np.full(n, -1 if f.name in unknown else 0, dtype=np.int64)
        columns["outcome"][:] = Outcome.CANCELLED
        return cls(**columns)


@dataclass
class SenderResult:
    """Results of one sending process, which sent `rows` of the workload."""

    start_s: float  # the workload's time zero, by `time.perf_counter`
    rows: Ints
    columns: RequestColumns  # of those rows only
    gaps: Gaps
    lag_s: Floats
    cpu_s: float
    peak_rss_bytes: int
    details: dict[int, str] = field(default_factory=dict)  # message of a fault, by row
    texts: dict[int, str] = field(default_factory=dict)
    token_s: Floats = field(default_factory=lambda: np.empty(0))  # row after row, if kept
    length_drift: tuple[TimeseriesRow, ...] = ()  # accuracy of an online predictor of lengths


_OF_EXCHANGE = {
    **{name: name for name in ("arrival_s", "started_s", "sent_s", "first_byte_s")},
    **{name: name for name in ("endpoint", "connections", "status")},
    "ended_s": "end_s",
}
_OF_ANSWER = (
    *("outcome", "chunks", "untimed_tokens", "unsure", "surplus", "refuted", "silent"),
    *("prompt_tokens", "completion_tokens", "cached_tokens"),
)
_of_answer = attrgetter(*_OF_ANSWER)


def read_part(
    driven: DriveResult, requests: WireRequests, *, keep_texts: bool, save_token_times: bool
) -> SenderResult:
    """Read all answers of a run into columns, and close its spool."""
    start_s = driven.start_s
    exchanges = sorted(driven.exchanges, key=lambda exchange: exchange.row)
    columns = RequestColumns.empty(len(exchanges))
    for name, attribute in _OF_EXCHANGE.items():
        getattr(columns, name)[:] = [getattr(exchange, attribute) for exchange in exchanges]
    for times_s in (columns.started_s, columns.sent_s, columns.first_byte_s, columns.ended_s):
        times_s -= start_s
    gaps = _GapCounts()
    details: dict[int, str] = {}
    texts: dict[int, str] = {}
    token_s: array[float] = array("d")
    of_answers: list[tuple[float, ...]] = []
    for place, exchange in enumerate(exchanges):
        expected = requests.expects(exchange.row)
        answer = driven.answers.pop(exchange.row, None)
        if answer is None:
            raw = driven.spool.raw(exchange, **expected)
            answer = read_answer(raw, keep_text=keep_texts)
        if answer.token_s:
            columns.first_token_s[place] = answer.token_s[0] - start_s
            columns.last_token_s[place] = answer.token_s[-1] - start_s
        columns.fault[place] = FAULTS.index(answer.fault)
        of_answers.append(_of_answer(answer))
        if not expected["embeds"]:
            if answer.untimed_tokens < len(answer.token_s):
                for sequence_s in answer.sequences or (answer.token_s,):
                    gaps.add(sequence_s)
            columns.output_tokens[place] = len(answer.token_s)
        if answer.detail:
            details[exchange.row] = answer.detail
        if keep_texts:
            texts[exchange.row] = answer.text
        if save_token_times and not expected["embeds"]:
            token_s.extend(answer.token_s)
    driven.spool.close()
    for name, values in zip(_OF_ANSWER, zip(*of_answers, strict=True), strict=False):
        getattr(columns, name)[:] = values
    return SenderResult(
        start_s=start_s,
        rows=np.array([exchange.row for exchange in exchanges], dtype=np.int64),
        columns=columns,
        gaps=gaps.total(),
        lag_s=np.array(driven.lag_s),
        cpu_s=driven.cpu_s,
        peak_rss_bytes=driven.peak_rss_bytes,
        details=details,
        texts=texts,
        token_s=np.array(token_s) - start_s,
    )


class _GapCounts:
    """Counts gaps by whole microseconds, so that a long run takes no more memory."""

    def __init__(self) -> None:
        self._times_s: array[float] = array("d")  # of one request after another
        self._tokens: list[int] = []  # of each
        self._total = joined_gaps([])

    def add(self, token_s: array[float]) -> None:
        if len(token_s) < 2:
            return
        self._times_s.extend(token_s)
        self._tokens.append(len(token_s))
        if len(self._times_s) >= _GAPS_AT_ONCE:
            self.total()

    def total(self) -> Gaps:
        if self._tokens:
            between = np.cumsum(self._tokens[:-1], dtype=np.int64) - 1
            gaps = np.rint(np.delete(np.diff(self._times_s), between) * _MICROSECONDS)
            values, counts = _counted(gaps)
            self._total = joined_gaps([self._total, Gaps(values / _MICROSECONDS, counts)])
            self._times_s, self._tokens = array("d"), []
        return self._total


def _counted(gaps: Floats) -> tuple[Floats, Ints]:
    """Return the values of whole numbers, in order, and how often each occurs."""
    if gaps.max() > _MOST_BINS * len(gaps) or gaps.min() < 0:
        return np.unique(gaps, return_counts=True)
    counts = np.bincount(gaps.astype(np.int64))
    values = np.flatnonzero(counts)
    return values.astype(np.float64), counts[values]


def joined_gaps(parts: Iterable[Gaps]) -> Gaps:
    """Join counted gaps, so that each value occurs once."""
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
