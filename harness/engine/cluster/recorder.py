"""What the instances of one cell did: records of their requests, timeline and sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress

import numpy as np

from ....predictors.operators.front_end import FrontEnd
from ....workloads.blocks import BLOCK_ROWS
from ....workloads.workload import Workload
from ...core.counters import Counters, TimedCounters
from ...core.decisions import ReleaseReason
from ...core.records.quantile_sketch import QuantileSketch
from ...core.records.request_records import (
    EndedBlock,
    Floats,
    Gaps,
    Ints,
    Outcome,
    Records,
    Timeline,
    TimeseriesRow,
    Totals,
)
from ...core.state import Release, RequestState
from ..loop.engine_instance import EngineInstance
from ..loop.measures import Measures, gaps_of, summed
from .lazy_instance import LazyInstance

_OUTCOMES = {
    ReleaseReason.DROP: Outcome.DROPPED,
    ReleaseReason.REJECT: Outcome.REJECTED,
    ReleaseReason.OFFLOAD: Outcome.DROPPED,
    ReleaseReason.FAIL: Outcome.FAILED,
}
_ACT_SPANS = 96


class Recorder:
    """Collects ended requests and forgets their objects."""

    def __init__(self, n: int, arrival_s: np.ndarray) -> None:
        self.records = _begun(n, arrival_s)
        self.ended = 0
        self.front_end: FrontEnd | None = None  # of the servers that requests are sent to

    def finished(self, requests: list[RequestState], instance: int, *, eventful: bool) -> None:
        """Those have all their tokens from that instance.

        `eventful`: some may have followed others, been preempted or found a cached prefix.
        """
        if not requests:
            return
        self.ended += len(requests)
        rows = _ints([r.id for r in requests])
        self._put_finished(self.records, rows, requests, instance, eventful=eventful)

    def _put_finished(
        self,
        records: Records,
        rows: Ints,
        requests: list[RequestState],
        instance: int,
        *,
        eventful: bool,
    ) -> None:
        _put(records.first_scheduled_s, rows, [r.first_scheduled_s for r in requests])
        _put(records.first_token_s, rows, [r.first_token_s for r in requests])
        _put(records.finish_s, rows, [r.finish_s for r in requests])
        _put(records.output_tokens, rows, [r.emitted_tokens for r in requests])
        if eventful:
            _put(records.arrival_s, rows, [r.arrival_s for r in requests])
            _put(records.queued_s, rows, [r.queued_s for r in requests])
            _put(records.cached_tokens, rows, [r.cached_tokens for r in requests])
            _put(records.preemptions_swap, rows, [r.swaps for r in requests])
            _put(records.preemptions_recompute, rows, [r.recomputes for r in requests])
            _put(records.transfer_s, rows, [r.transfer_s for r in requests])
        if self.front_end is not None:
            prompts = [r.prompt_tokens for r in requests]
            passing_s = self.front_end.passing_s(_ints(prompts))
            records.first_token_s[rows] += passing_s
            records.finish_s[rows] += passing_s
        records.outcome[rows] = Outcome.FINISHED
        records.instance[rows] = instance

    def measured(self, measures: Measures) -> None:
        """What an instance has measured until now may be taken from it."""

    def gone(self, release: Release) -> None:
        """That one will not be served: it has no finish."""
        self.ended += 1
        _put_gone(self.records, release.request.id, release)

    def cancelled(self, rows: list[int]) -> None:
        """Rows of requests that never arrived."""
        self.ended += len(rows)
        self.records.arrival_s[rows] = self.records.queued_s[rows] = np.nan
        self.records.outcome[rows] = Outcome.CANCELLED

    def rejected(self, rows: np.ndarray) -> None:
        """Those were refused at the door."""
        self.ended += len(rows)
        self.records.outcome[rows] = Outcome.REJECTED

    def number(self, instances: Ints) -> None:
        """Name the instance of each lane, after the run; the last is that of no lane."""
        self.records.instance[:] = instances[self.records.instance]

    def last_finish_s(self) -> float:
        """When the last request finished; 0 if none has."""
        finish_s = self.records.finish_s
        return float(np.nanmax(finish_s)) if np.isfinite(finish_s).any() else 0.0

    def gaps(self, measures: Iterable[Measures]) -> Gaps:
        """All gaps between tokens, those that the instances still have included."""
        return gaps_of(measures)


class BlockRecorder(Recorder):
    """Passes the requests on in blocks, in order, as soon as all of a block have ended; gaps
    between tokens are summarised.

    A block stays until the earlier ones are passed on: memory grows with the span of arrivals of
    the requests in the system.
    """

    def __init__(self, consume: Callable[[EndedBlock], None], instances: Ints) -> None:
        """`instances`: number of the instance of each lane; the last is that of no lane."""
        super().__init__(0, np.empty(0))
        self.refused = 0  # requests rejected at the door
        self._consume = consume
        self._instances = instances
        self._blocks: deque[EndedBlock] = deque()
        self._left: deque[int] = deque()  # of each block, requests that have not ended
        self._rows = 0
        self._last_finish_s = 0.0
        self._gaps = QuantileSketch()

    def begun(
        self, blocks: Iterable[tuple[Workload, Workload, Ints]]
    ) -> Iterator[tuple[Workload, Ints]]:
        """Blocks of what is asked, what is served and the rows that are refused at the door;
        passed on, as each begins, without the first. All but the last have `BLOCK_ROWS` rows.
        """
        for drawn, served, rejected in blocks:
            self._begin(drawn, served, rejected)
            yield served, rejected

    def _begin(self, drawn: Workload, served: Workload, rejected: Ints) -> None:
        records = _begun(len(served), served.arrival_s)
        records.outcome[rejected] = Outcome.REJECTED
        self.ended += len(rejected)
        self.refused += len(rejected)
        self._blocks.append(EndedBlock(self._rows, drawn, served, records))
        self._left.append(len(served) - len(rejected))
        self._rows += len(served)

    def finished(self, requests: list[RequestState], instance: int, *, eventful: bool) -> None:
        if not requests:
            return
        self.ended += len(requests)
        rows = _ints([r.id for r in requests])
        rows -= self._blocks[0].first_row
        of_block = rows // BLOCK_ROWS
        for k in np.unique(of_block).tolist():
            mine = of_block == k
            some = requests if mine.all() else list(compress(requests, mine.tolist()))
            places = rows[mine] - k * BLOCK_ROWS
            self._put_finished(self._blocks[k].records, places, some, instance, eventful=eventful)
            self._left[k] -= len(some)
        self._pass_on()

    def gone(self, release: Release) -> None:
        self.ended += 1
        k, place = divmod(release.request.id - self._blocks[0].first_row, BLOCK_ROWS)
        _put_gone(self._blocks[k].records, place, release)
        self._left[k] -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        while self._left and not self._left[0]:
            self._left.popleft()
            block = self._blocks.popleft()
            records = block.records
            records.instance[:] = self._instances[records.instance]
            last_s = np.fmax.reduce(records.finish_s)  # NaN where none has finished
            self._last_finish_s = float(np.fmax(self._last_finish_s, last_s))
            self._consume(block)

    def measured(self, measures: Measures) -> None:
        if measures.n_gaps >= BLOCK_ROWS:
            self._take_gaps(measures)

    def _take_gaps(self, measures: Measures) -> None:
        gaps = measures.take_gaps()
        self._gaps.add(gaps.gap_s, gaps.count)

    def number(self, instances: Ints) -> None:
        pass  # done block by block

    def last_finish_s(self) -> float:
        self._pass_on()
        return self._last_finish_s

    def gaps(self, measures: Iterable[Measures]) -> Gaps:
        for each in measures:
            self._take_gaps(each)
        return Gaps(*self._gaps.values())


def _begun(n: int, arrival_s: Floats) -> Records:
    records = Records.empty(n)
    records.arrival_s[:] = records.queued_s[:] = arrival_s
    return records


def _ints(values: list[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))


def _put(column: Floats | Ints, rows: Ints, values: list[float] | list[int]) -> None:
    column[rows] = np.fromiter(values, column.dtype, len(values))


def _put_gone(records: Records, row: int, release: Release) -> None:
    r = release.request
    records.arrival_s[row] = r.arrival_s
    records.queued_s[row] = r.queued_s
    records.outcome[row] = _OUTCOMES[release.reason]
    records.instance[row] = r.instance


def timeline_of(instances: Sequence[EngineInstance]) -> Timeline:
    """Sums over all instances; an instance is empty from the end of its work on."""
    total = sum(i.kv_manager.total for i in instances)
    times, sums = summed([*i.measures.samples, (i.now_s, 0, 0, 0)] for i in instances)
    return Timeline(times, sums[0], sums[1], sums[2] / total)


def _samples(engine: EngineInstance) -> Floats:
    """Times, waiting and running requests, and KV blocks of an instance, until its end."""
    samples = [*engine.measures.samples, (engine.now_s, 0, 0, 0)]
    return np.array(samples, dtype=np.float64).T


def state_rows(instance: LazyInstance) -> Iterator[TimeseriesRow]:
    """State of one instance over time: requests, those that wait, KV blocks in use and the share of
    the GPUs' arithmetic that its tokens took. Each value holds until the next.
    """
    engine = instance.engine
    times_s, waiting, running, blocks = _samples(engine)
    yield from _changes("requests", instance.name, times_s, waiting + running)
    yield from _changes("waiting", instance.name, times_s, waiting)
    usage = blocks / max(1, engine.kv_manager.total)
    yield from _changes("kv_cache_usage", instance.name, times_s, usage)
    if engine.measures.worked:
        worked_s, tokens = np.array([(0.0, 0), *engine.measures.worked], dtype=np.float64).T
        times_s, indices = np.unique(worked_s, return_index=True)
        rate = np.diff(tokens[indices]) / np.diff(times_s)
        share = np.append(rate * instance.s_per_token, 0.0)
        yield from _changes("compute", instance.name, times_s, share)


def memory_rows(
    instance: LazyInstance, passes: Sequence[tuple[float, float, int]], end_s: float
) -> Iterator[TimeseriesRow]:
    """Memory of a device that an embedder shares, over time: KV, activations of the embedder's
    `passes` (begin, end, blocks) and what neither holds, as shares; means over equal spans.
    """
    engine = instance.engine
    times_s, _, _, blocks = _samples(engine)
    begins_s, ends_s, held = np.array(passes, dtype=np.float64).reshape(-1, 3).T
    end_s = max(end_s, float(times_s[-1]), float(ends_s[-1]) if len(ends_s) else 0.0, 1e-9)
    edges = np.linspace(0.0, end_s, _ACT_SPANS + 1)
    kv = _span_means(times_s, np.append(times_s[1:], times_s[-1]), blocks, edges)
    activations = _span_means(begins_s, ends_s, held, edges)
    total = max(1, engine.kv_manager.total)
    shares = {"KV": kv / total, "embeddings": activations / total}
    shares["free"] = np.maximum(0.0, 1.0 - shares["KV"] - shares["embeddings"])
    for name, share in shares.items():
        ended = np.append(share, 1.0 if name == "free" else 0.0)
        yield from _changes("memory", f"{instance.name}: {name}", edges, ended)


def _span_means(begins_s: Floats, ends_s: Floats, values: Floats, edges: Floats) -> Floats:
    """Mean within each span of values that hold from their begin to their end, which ascend and
    do not overlap; 0 between them.
    """
    if not len(values):
        return np.zeros(len(edges) - 1)
    areas = np.cumsum(values * (ends_s - begins_s))
    # The area up to each edge: of the values that have ended, and of the one that holds.
    indices = np.searchsorted(begins_s, edges, side="right") - 1
    before = np.where(indices > 0, areas[np.maximum(indices, 1) - 1], 0.0)
    since_s = np.clip(edges - begins_s[indices], 0.0, (ends_s - begins_s)[indices])
    until = np.where(indices >= 0, before + values[indices] * since_s, 0.0)
    return np.asarray(np.diff(until) / np.diff(edges))


def _changes(metric: str, entity: str, times_s: Floats, values: Floats) -> Iterator[TimeseriesRow]:
    """The values, rounded to 1e-4, where they differ from the one before."""
    values = np.round(values, 4)
    changed = np.flatnonzero(np.diff(values, prepend=np.nan) != 0)
    for time_s, value in zip(times_s[changed].tolist(), values[changed].tolist(), strict=True):
        yield TimeseriesRow(time_s, metric, entity, value)


def acts_of(counters: Iterable[Counters], end_s: float) -> Iterator[TimeseriesRow]:
    """Acts per second of every mechanism, by reason, in equal spans of the time until `end_s`."""
    times_s: dict[str, list[float]] = {}
    for timed in counters:
        for label, acts_s in timed.times_s.items() if isinstance(timed, TimedCounters) else ():
            times_s.setdefault(label, []).extend(acts_s)
    for label, all_s in times_s.items():
        end_s = max(end_s, *all_s, 1e-9)
        count, edges = np.histogram(all_s, _ACT_SPANS, (0.0, end_s))
        yield from _changes("acts", label, edges, np.append(count, 0) * _ACT_SPANS / end_s)


def totals_of(instances: Sequence[EngineInstance], makespan_s: float) -> Totals:
    """Sums over all instances; GPU time is left unknown (NaN)."""
    measures = [i.measures for i in instances]
    blocks = sum(i.kv_manager.total for i in instances)
    block_s = makespan_s * blocks
    return Totals(
        makespan_s=makespan_s,
        busy_s=sum(i.now_s - i.measures.idle_s for i in instances),
        steps=sum(m.steps for m in measures),
        prefill_tokens=sum(m.prefill_tokens for m in measures),
        decode_tokens=sum(m.decode_tokens for m in measures),
        padded_tokens=sum(m.padded_tokens for m in measures),
        kv_cache_usage_peak=sum(m.kv_peak for m in measures) / blocks if blocks else 0.0,
        kv_cache_usage_mean=sum(m.kv_block_s for m in measures) / block_s if block_s else 0.0,
    )
