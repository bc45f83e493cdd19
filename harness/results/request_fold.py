"""Figures of the requests of a long run, which come in blocks and are not kept.

Counts, sums and means are exact. Quantiles are those of a `QuantileSketch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ...workloads.arrays import Ints
from ...workloads.blocks import WorkloadBlocks
from ...workloads.workload import Workload
from ..core.records.judging import judge
from ..core.records.request_records import EndedBlock, Outcome, Records, Result
from .metrics import Hardware, RunFold
from .rate_windows import check_counted
from .request_figures import Requests, Value
from .stationarity import LEAST_REQUESTS, BatchFold, horizon_s, stationary

MOST_SAMPLED = 5000

Table = TypeVar("Table", Workload, Records)


@dataclass(frozen=True)
class RequestSample:
    """Up to `MOST_SAMPLED` counted requests, evenly spread over the run: some `rows`. The other
    fields are of all requests, the warm-up included; the last two are means.
    """

    workload: Workload
    records: Records
    rows: Ints
    finished: int
    last_arrival_s: float
    prompt_tokens: float
    output_tokens: float


class RequestFold:
    """Takes the requests of a run block by block, in order of arrival."""

    def __init__(self, workload: WorkloadBlocks, warmup_s: float = 0.0) -> None:
        """`warmup_s`: requests that arrive earlier do not count.

        Raises:
            SloBenchError: no request would count.
        """
        self._first = workload.before(warmup_s) if warmup_s > 0 else 0
        check_counted(len(workload) - self._first, warmup_s, workload.last_s)
        self._warmup_s = warmup_s
        self._workload = workload
        counted = len(workload) - self._first
        self._batches: BatchFold | None = None
        if counted >= LEAST_REQUESTS:
            within_s = horizon_s(next(workload.draw()))  # of any block: bounds are the same for all
            self._batches = BatchFold(workload, horizon_s=within_s, warmup_s=warmup_s)
        self._every = 1 + counted // MOST_SAMPLED
        self._sampled: list[tuple[Workload, Records]] = []
        self._run = RunFold(exact=False)
        self._finished = self._prompt_tokens = self._output_tokens = 0

    def add(self, block: EndedBlock) -> None:
        """Add the requests of a block to all sums."""
        workload, records = block.served, block.records
        judged = judge(workload, records)
        requests = Requests.of(workload, records, judged, block.drawn)
        if self._batches is not None:
            self._batches.add(block, judged.met)
        self._finished += int((records.outcome == Outcome.FINISHED).sum())
        self._prompt_tokens += int(workload.prompt_tokens.sum())
        self._output_tokens += int(workload.output_tokens.sum())
        first = max(0, self._first - block.first_row)
        self._run.add(requests, slice(first, None))
        before = block.first_row + first - self._first  # counted requests before this block
        rows = np.arange(first + -before % self._every, len(records), self._every)
        if len(rows):
            self._sampled.append((_rows(workload, rows), _rows(records, rows)))

    def row(self, result: Result, hardware: Hardware) -> dict[str, Value]:
        """The figures of all requests; `result` is that of the run."""
        is_stationary = None if self._batches is None else stationary(self._batches.batches())
        window = self._run.window(self._warmup_s)
        return self._run.row(result, hardware, window, is_stationary, self._warmup_s, {})

    def sample(self) -> RequestSample:
        """What the bands of the figures are computed from."""
        n = len(self._workload)
        records = _joined([records for _, records in self._sampled])
        return RequestSample(
            _joined([workload for workload, _ in self._sampled]),
            records,
            np.arange(len(records)),
            finished=self._finished,
            last_arrival_s=self._workload.last_s,
            prompt_tokens=self._prompt_tokens / n,
            output_tokens=self._output_tokens / n,
        )


def _columns(table: Workload | Records) -> dict[str, Any]:
    values = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def _rows(table: Table, rows: Ints | slice) -> Table:
    columns = {name: column[rows] for name, column in _columns(table).items()}
    return dataclasses.replace(table, **columns)


def _joined(tables: Sequence[Table]) -> Table:
    parts = [_columns(table) for table in tables]
    joined: dict[str, Any] = {
        name: np.concatenate([part[name] for part in parts]) for name in parts[0]
    }
    return dataclasses.replace(tables[0], **joined)
