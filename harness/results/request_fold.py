"""Figures of the requests of a long run, which come in blocks and are not kept.

Counts, sums and means are exact. Quantiles are those of a `QuantileSketch`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ...workloads.arrays import Floats, Ints
from ...workloads.blocks import WorkloadBlocks
from ...workloads.workload import Workload
from ..core.counters import DROPS, OVERTAKES, RECOMPUTES, REJECTIONS, SWAPS
from ..core.records.judging import judge
from ..core.records.quantile_sketch import RELATIVE_ERROR, QuantileSketch
from ..core.records.request_records import EndedBlock, Outcome, Records, Result
from .metrics import LatencySummary, RateWindow, RequestFigures, check_counted
from .stationarity import LEAST_REQUESTS, BatchFold, horizon_s, stationary

_LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
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
        self._sketches = {name: QuantileSketch() for name in _LATENCIES}
        self._outcomes = np.zeros(len(Outcome), dtype=np.int64)
        self._outcomes_counted = np.zeros(len(Outcome), dtype=np.int64)
        self._sums = Counter[str]()
        self._missed = Counter[str]()
        self._turnaround = 0.0
        self._first_counted_s = math.nan
        self._last_counted_s = math.nan
        self._last_finish_s = -math.inf
        self._overtakes = _Overtakes()
        self._wait_s, self._waits = np.zeros((2, 0))  # until the first batch, by instance

    @property
    def truncated(self) -> int:
        """Requests of which a part was cut off."""
        return self._sums["truncated"]

    def add(self, block: EndedBlock) -> None:
        """Add the requests of a block to all sums."""
        workload, records, sums = block.served, block.records, self._sums
        judged = judge(workload, records)
        if self._batches is not None:
            self._batches.add(block, judged.met)
        began = ~np.isnan(records.first_scheduled_s)
        shorter = workload.prompt_tokens < block.drawn.prompt_tokens
        shorter |= workload.output_tokens < block.drawn.output_tokens
        sums["truncated"] += int(shorter.sum())
        sums["began_prompt_tokens"] += int(workload.prompt_tokens[began].sum())
        sums["cached_tokens"] += int(records.cached_tokens[began].sum())
        sums["prompt_tokens"] += int(workload.prompt_tokens.sum())
        sums["expected_output_tokens"] += int(workload.output_tokens.sum())
        for name in ("preemptions_swap", "preemptions_recompute"):
            sums[name] += int(getattr(records, name).sum())
        self._overtakes.add(records)
        self._outcomes += np.bincount(records.outcome, minlength=len(Outcome))
        first = max(0, self._first - block.first_row)
        if first >= len(records):
            return
        counted = block.first_row + first - self._first  # requests before this one
        rows = np.arange(first + -counted % self._every, len(records), self._every)
        if len(rows):
            self._sampled.append((_rows(workload, rows), _rows(records, rows)))
        self._add_counted(_rows(records, slice(first, None)))
        sums["met"] += int(judged.met[first:].sum())
        for name, missed in judged.late.items():
            self._missed[name] += int(missed[first:].sum())

    def _add_counted(self, records: Records) -> None:
        self._outcomes_counted += np.bincount(records.outcome, minlength=len(Outcome))
        self._sums["output_tokens"] += int(records.output_tokens.sum())
        for name, sketch in self._sketches.items():
            sketch.add(getattr(records, name))
        if math.isnan(self._first_counted_s):
            self._first_counted_s = float(records.arrival_s[0])
        self._last_counted_s = float(records.arrival_s[-1])
        self._last_finish_s = float(np.fmax(self._last_finish_s, np.fmax.reduce(records.finish_s)))
        waits_s = records.first_scheduled_s - records.queued_s
        began = np.isfinite(waits_s) & (records.instance >= 0)
        instances = records.instance[began]
        self._wait_s = _added(self._wait_s, np.bincount(instances, weights=waits_s[began]))
        self._waits = _added(self._waits, np.bincount(instances))
        processing_s = records.finish_s - records.first_scheduled_s
        served = (records.outcome == Outcome.FINISHED) & (processing_s > 0)
        self._sums["turnarounds"] += int(served.sum())
        self._turnaround += float((records.e2e_s[served] / processing_s[served]).sum())

    def _waits_by_role(self, result: Result) -> dict[str, float]:
        """Mean wait (s) by role, as columns; as the function of this name in metrics.py."""
        waits: dict[str, float] = {}
        roles = [instance.role for instance in result.instances[: len(self._waits)]]
        for role in dict.fromkeys(instance.role for instance in result.instances if instance.role):
            members = [
                k
                for k, instance_role in enumerate(roles)
                if instance_role == role and self._waits[k]
            ]
            if members:
                mean_s = self._wait_s[members].sum() / self._waits[members].sum()
                waits[f"wait_mean_s_{role}"] = float(mean_s)
        return waits

    def figures(self, result: Result) -> RequestFigures:
        """The figures of all requests; `result` is that of the run."""
        sums, outcomes = self._sums, self._outcomes
        begin_s = self._warmup_s if self._warmup_s > 0 else self._first_counted_s
        drain_s = max(0.0, self._last_finish_s - self._last_counted_s)
        fold_counts = {
            OVERTAKES: self._overtakes.total(),
            DROPS: int(outcomes[Outcome.DROPPED]),
            REJECTIONS: int(outcomes[Outcome.REJECTED]) - result.overlong,
            SWAPS: sums["preemptions_swap"],
            RECOMPUTES: sums["preemptions_recompute"],
        }
        return RequestFigures(
            requests=int(self._outcomes_counted.sum()),
            met=sums["met"],
            window=RateWindow(self._last_counted_s - begin_s, drain_s),
            ttft=_summary(self._sketches["ttft_s"]),
            tpot=_summary(self._sketches["tpot_s"]),
            e2e=_summary(self._sketches["e2e_s"]),
            weighted_turnaround=self._turnaround / sums["turnarounds"]
            if sums["turnarounds"]
            else math.nan,
            output_tokens=sums["output_tokens"],
            outcomes={kind: int(self._outcomes_counted[kind]) for kind in Outcome},
            missed=self._missed,
            stationary=None if self._batches is None else stationary(self._batches.batches()),
            columns=self._waits_by_role(result),
            prompt_tokens=sums["began_prompt_tokens"],
            cached_tokens=sums["cached_tokens"],
            preemptions=(sums["preemptions_swap"], sums["preemptions_recompute"]),
            counts={name: fold_counts.get(name, count) for name, count in result.counts.items()},
            quantile_error=RELATIVE_ERROR,
        )

    def sample(self) -> RequestSample:
        """What the bands of the figures are computed from."""
        n = len(self._workload)
        records = _joined([records for _, records in self._sampled])
        return RequestSample(
            _joined([workload for workload, _ in self._sampled]),
            records,
            np.arange(len(records)),
            finished=int(self._outcomes[Outcome.FINISHED]),
            last_arrival_s=self._workload.last_s,
            prompt_tokens=self._sums["prompt_tokens"] / n,
            output_tokens=self._sums["expected_output_tokens"] / n,
        )


class _Overtakes:
    """Requests that began before one that had come to the same instance earlier, counted in the
    order in which they came (`mechanisms.overtook`).
    """

    def __init__(self) -> None:
        self._count_so_far = 0
        self._latest_s: dict[int, float] = {}  # first batch of those so far, by instance
        # Instance, coming and first batch of those that came after the last arrival so far.
        self._ahead = np.empty((3, 0))

    def add(self, records: Records) -> None:
        """Add requests in order of arrival."""
        began = np.isfinite(records.first_scheduled_s)
        rows = (records.instance, records.queued_s, records.first_scheduled_s)
        begun = np.concatenate((self._ahead, np.array([row[began] for row in rows])), axis=1)
        begun = begun[:, np.argsort(begun[1], kind="stable")]
        # Later requests come after the last arrival of these.
        n = int(np.searchsorted(begun[1], records.arrival_s[-1], side="right"))
        self._count(begun[:, :n])
        self._ahead = begun[:, n:]

    def total(self) -> int:
        """How many there are among all."""
        self._count(self._ahead)
        self._ahead = self._ahead[:, :0]
        return self._count_so_far

    def _count(self, begun: Floats) -> None:
        for instance in np.unique(begun[0]).tolist():
            begins_s = begun[2, begun[0] == instance]
            before_s = self._latest_s.get(instance, -math.inf)
            latest_s = np.maximum.accumulate(np.append(before_s, begins_s))[1:]
            self._count_so_far += int((latest_s > begins_s).sum())
            self._latest_s[instance] = float(latest_s[-1])


def _added(sums: Floats, more: Floats | Ints) -> Floats:
    """The sum of two columns, of which one may be longer."""
    total = np.zeros(max(len(sums), len(more)))
    total[: len(sums)] = sums
    total[: len(more)] += more
    return total


def _summary(sketch: QuantileSketch) -> LatencySummary:
    return LatencySummary(sketch.mean(), *sketch.quantiles((0.5, 0.9, 0.99)))


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
