"""Workload sources: lengths drawn from distributions, the rows of a trace, or a mix of both."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Floats, Ints
from .arrivals import ArrivalProcess, Concurrency, Extent, Poisson, parse_arrivals
from .blocks import BLOCK_ROWS, WorkloadBlocks
from .call_parser import positive
from .errors import SloBenchError
from .lengths import LengthDistribution, PairLengths
from .models import Models, MultiModelArrivals
from .prefixes import Continuations, HotPrefixes
from .request import SLO_COLUMNS, RequestType
from .sessions import Agents, Sessions, Task, Volume, begun, graph_of
from .slo import SloSpec
from .streams import Streams
from .workload import Workload, take

if TYPE_CHECKING:
    from .readers.table_reader import WorkloadTrace

NO_SLO = SloSpec()


@dataclass(frozen=True, kw_only=True)
class WorkloadSource(ABC):
    """Makes workloads.

    Attributes:
        name: a catalogue name, a file's name, or the mix as written.
        arrivals: the arrival process; None where the source keeps arrivals of its own.
        origin: where the figures or rows come from.
        notes: what was dropped, assumed or approximated.
        natural_rate_rps: mean rate of the source's own arrivals, or of its origin's, where known.
        models: the model of each request.
    """

    name: str
    arrivals: ArrivalProcess | None
    origin: str = ""
    notes: tuple[str, ...] = ()
    natural_rate_rps: float | None = None
    models: Models | None = None

    @property
    def has_arrivals(self) -> bool:
        """Whether the source keeps arrivals of its own, which `make` can speed up."""
        return self.arrivals is None

    @property
    def has_texts(self) -> bool:
        """Whether some requests have the text of their prompt."""
        return False

    @property
    def closed_loop(self) -> bool:
        """Whether a fixed number of requests is in flight, and there is no rate."""
        return isinstance(self.arrivals, Concurrency)

    @property
    def has_rate(self) -> bool:
        """Whether requests can be offered at a rate: not in a closed loop, nor all at once."""
        return not (self.closed_loop or (self.has_arrivals and self.natural_rate_rps is None))

    def make(
        self,
        *,
        rate_rps: float | None = None,
        replay_speed: float | None = None,
        requests: int | None = None,
        duration_s: float | None = None,
        seed: int = 0,
        slo: SloSpec = NO_SLO,
    ) -> Workload:
        """A workload; the same arguments give the same bytes.

        Lengths and SLOs of a seed are the same at every rate. A source with own arrivals divides
        its times by `replay_speed`, or by `rate_rps` over its natural rate (by default by 1); then
        `requests` keeps its first rows and `duration_s` the rows that arrive before it.

        Raises:
            SloBenchError: an argument is out of range, missing, or contradicts another.
        """
        streams = Streams(seed)
        if self.arrivals is None:
            workload = self._replayed(rate_rps, replay_speed, requests, duration_s)
        else:
            volume = self._volume(rate_rps, replay_speed, requests, duration_s)
            workload = self._drawn(volume, streams)
        if isinstance(self.arrivals, Concurrency):
            workload = dataclasses.replace(workload, concurrency=self.arrivals.users)
        if self.models is not None and not isinstance(self.models, MultiModelArrivals):
            workload = self.models.apply(workload, streams)
        workload = dataclasses.replace(workload, name=self.name)
        return slo.apply(workload, streams.rng("slo"))

    @abstractmethod
    def at_times(self, arrival_s: Floats, streams: Streams) -> Workload:
        """Requests that arrive at these times."""

    def _replayed(
        self, rate_rps: float | None, speed: float | None, requests: int | None, end_s: float | None
    ) -> Workload:
        """Requests at their own times, of a source that keeps them."""
        raise NotImplementedError

    def _volume(
        self, rate_rps: float | None, speed: float | None, requests: int | None, end_s: float | None
    ) -> Volume:
        """What the arrival process is to make."""
        if requests is None and end_s is None:
            raise SloBenchError("say how much to make: requests or duration_s")
        if speed is not None:
            raise SloBenchError(
                f"replay_speed is for traces with arrivals of their own; give {self.name} a "
                "rate_rps"
            )
        if self.closed_loop and rate_rps is not None:
            raise SloBenchError("a closed loop (concurrency) has no rate; leave rate_rps out")
        if rate_rps is None and not self.closed_loop:
            raise SloBenchError(f"{self.name} has no arrivals of its own; give it a rate_rps")
        rate = 1.0 if rate_rps is None else positive(rate_rps, "rate_rps")
        return Volume(rate, requests, end_s)

    def _drawn(self, volume: Volume, streams: Streams) -> Workload:
        """Requests whose arrivals the process draws."""
        assert self.arrivals is not None
        return self.at_times(volume.start_s(self.arrivals, streams, 1.0), streams)


@dataclass(frozen=True, kw_only=True)
class DrawnSource(WorkloadSource):
    """Lengths from distributions, arrivals from a process.

    With `texts`, the requests embed that many texts, all as long as the drawn prompt.
    """

    lengths: PairLengths
    continuations: Continuations | HotPrefixes | None = None
    sessions: Sessions | Agents | None = None
    texts: LengthDistribution | None = None
    priority: int = 0

    def blocks(
        self,
        *,
        rate_rps: float | None = None,
        replay_speed: float | None = None,
        requests: int | None = None,
        duration_s: float | None = None,
        seed: int = 0,
        slo: SloSpec = NO_SLO,
    ) -> WorkloadBlocks | None:
        """The same workload in blocks; None where it can only be made as a whole.

        Raises:
            SloBenchError: as of the whole workload.
        """
        apart = (self.sessions, self.continuations, self.models, self.texts) == (None,) * 4
        process = self.arrivals
        if not apart or process is None or self.closed_loop or not slo.same_for_all:
            return None
        volume = self._volume(rate_rps, replay_speed, requests, duration_s)
        streams = Streams(seed)

        def arrivals() -> Iterator[Floats]:
            return process.blocks_s(Extent(*volume, at_once=BLOCK_ROWS), streams.rng("arrivals"))

        def workloads() -> Iterator[Workload]:
            rng = streams.rng("lengths")
            for arrival_s in arrivals():
                pairs = self.lengths.draw(len(arrival_s), rng)
                priority = np.full(1, self.priority)
                block = Workload(arrival_s, **vars(pairs), priority=priority, name=self.name)
                yield slo.apply(block, streams.rng("slo"))

        return WorkloadBlocks.of(arrivals, workloads)

    def _drawn(self, volume: Volume, streams: Streams) -> Workload:
        if isinstance(self.models, MultiModelArrivals):
            coming = self.models.draw(volume.rate_rps, streams, volume.requests, volume.duration_s)
            return dataclasses.replace(
                self.at_times(coming.arrival_s, streams),
                model_index=coming.model_index,
                model_names=self.models.names,
            )
        if self.sessions is None:
            return super()._drawn(volume, streams)
        assert self.arrivals is not None
        return self.sessions.make(self.lengths, self.arrivals, streams, volume)

    def at_times(self, arrival_s: Floats, streams: Streams) -> Workload:
        priority = np.full(1, self.priority)
        if self.continuations is not None:
            shared = self.continuations.draw(self.lengths, arrival_s, streams)
            return Workload(
                arrival_s,
                **vars(shared.pairs),
                priority=priority,
                session=shared.session,
                prefix_blocks=shared.blocks,
                prefix_block_size=self.continuations.block_size,
            )
        pairs = self.lengths.draw(len(arrival_s), streams.rng("lengths"))
        workload = Workload(arrival_s, **vars(pairs), priority=priority)
        if self.texts is None:
            return workload
        texts = self.texts.at(streams.rng("texts").random(len(workload)))
        return dataclasses.replace(
            workload,
            prompt_tokens=workload.prompt_tokens * texts,
            request_type=np.full(1, int(RequestType.EMBED)),
            num_inputs=texts,
        )


@dataclass(frozen=True, kw_only=True)
class TraceSource(WorkloadSource):
    """A file's rows. With `arrivals`, these take the place of the file's own.

    Rows of a data set without arrivals are drawn in a random order, and again in another one
    when they run out; rows of a trace keep their order.
    """

    trace: WorkloadTrace

    @property
    def has_texts(self) -> bool:
        """Whether some requests have the text of their prompt."""
        return any(self.trace.workload.texts or ())

    @classmethod
    def of_trace(
        cls,
        trace: WorkloadTrace,
        path: str,
        arrivals: str,
        models: Models | None,
        *,
        redraw_arrivals: bool,
    ) -> TraceSource:
        """A file's trace as it was read; arguments as those of `load_source`.

        Raises:
            SloBenchError: it has arrivals, and other arrivals are set without `redraw_arrivals`.
        """
        process, workload, name = parse_arrivals(arrivals), trace.workload, Path(path).name
        keeps = trace.has_arrivals and not redraw_arrivals
        if keeps and process != Poisson():
            raise SloBenchError(
                f"{path} has arrivals of its own; to replace them by {arrivals} say redraw_arrivals"
            )
        rate = (len(workload) - 1) / workload.span_s if workload.span_s > 0 else None
        return cls(
            name=name,
            arrivals=None if keeps else process,
            origin=f"file {name}",
            notes=trace.notes,
            natural_rate_rps=rate,
            models=models,
            trace=trace,
        )

    def at_times(self, arrival_s: Floats, streams: Streams) -> Workload:
        rows = self._rows(len(arrival_s), streams.rng("lengths"))
        return take(self.trace.workload, rows, arrival_s)

    def _speed(self, rate_rps: float | None, replay_speed: float | None) -> float:
        if rate_rps is not None and replay_speed is not None:
            raise SloBenchError("give a trace either rate_rps or replay_speed, not both")
        if replay_speed is not None:
            return positive(replay_speed, "replay_speed")
        if rate_rps is None:
            return 1.0
        if self.natural_rate_rps is None:
            raise SloBenchError(
                f"all requests of {self.name} arrive at once, so it has no rate to change"
            )
        return positive(rate_rps, "rate_rps") / self.natural_rate_rps

    def _replayed(
        self, rate_rps: float | None, speed: float | None, requests: int | None, end_s: float | None
    ) -> Workload:
        workload = self.trace.workload
        arrival_s = workload.arrival_s / self._speed(rate_rps, speed)
        n = len(workload)
        if requests is not None:
            if requests < 1:
                raise SloBenchError(f"requests must be at least 1 but is {requests}")
            n = min(n, requests)
        if end_s is not None:
            limit_s = positive(end_s, "duration_s")
            n = min(n, int(np.searchsorted(arrival_s, limit_s, side="left")))
        return take(workload, np.arange(n), arrival_s[:n])

    def _rows(self, n: int, rng: np.random.Generator) -> Ints:
        size = len(self.trace.workload)
        if self.trace.has_arrivals:
            if n > size:
                raise SloBenchError(
                    f"{self.name} has {size:,} requests, {n:,} are needed; give a longer trace, or "
                    "a lower --requests where the command has it (plan has not)"
                )
            return np.arange(n)
        rounds = [rng.permutation(size) for _ in range(-(-n // size))]
        return np.concatenate(rounds)[:n]


@dataclass(frozen=True, kw_only=True)
class TaskSource(WorkloadSource):
    """Recorded tasks of agents, each of which begins by the arrival process, in a random order."""

    tasks: Sequence[Task]
    block_size: int

    def at_times(self, arrival_s: Floats, streams: Streams) -> Workload:
        chosen = list(islice(self._shuffled(streams), len(arrival_s)))
        return graph_of(chosen, arrival_s, self.block_size)

    def _drawn(self, volume: Volume, streams: Streams) -> Workload:
        assert self.arrivals is not None
        tasks, mean = self._shuffled(streams), sum(map(len, self.tasks)) / len(self.tasks)
        return begun(tasks, mean, self.block_size, self.arrivals, streams, volume)

    def _shuffled(self, streams: Streams) -> Iterator[Task]:
        """The tasks in a random order, again in another one when they run out."""
        rng = streams.rng("lengths")
        while True:
            yield from (self.tasks[index] for index in rng.permutation(len(self.tasks)))


@dataclass(frozen=True)
class Member:
    """One class of requests in a mix."""

    class_name: str
    source: DrawnSource | TraceSource
    share: float

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests of the class share blocks or wait for each other."""
        if isinstance(self.source, TraceSource):
            workload = self.source.trace.workload
            return workload.prefix_blocks is not None or workload.closed
        return self.source.sessions is not None or self.source.continuations is not None


@dataclass(frozen=True, kw_only=True)
class MixedSource(WorkloadSource):
    """One arrival process; each request's class is drawn in proportion to the shares."""

    members: tuple[Member, ...]

    @property
    def has_texts(self) -> bool:
        """Whether some requests have the text of their prompt."""
        return any(member.source.has_texts for member in self.members)

    def __post_init__(self) -> None:
        names = [m.class_name for m in self.members]
        if len(set(names)) != len(names) or not names:
            raise SloBenchError("a mix needs one class at least, and no class name twice")
        for m in self.members:
            positive(m.share, f"share of {m.class_name}")
            if m.shares_prefixes:
                raise SloBenchError(
                    f"{m.source.name} shares prefixes between its requests and cannot be mixed yet"
                )

    def at_times(self, arrival_s: Floats, streams: Streams) -> Workload:
        shares = np.cumsum([m.share for m in self.members])
        u = streams.rng("classes").random(len(arrival_s))
        which = np.searchsorted(shares / shares[-1], u, side="right")
        which = np.minimum(which, len(shares) - 1).astype(np.int64)
        parts = []
        for k, member in enumerate(self.members):
            rows = np.flatnonzero(which == k)
            if len(rows):
                member_streams = streams.within(member.class_name)
                parts.append((rows, member.source.at_times(arrival_s[rows], member_streams)))
        columns: dict[str, Any] = {}
        lengths = "prompt_tokens", "output_tokens", "max_output_tokens"
        for name in (*lengths, "request_type", "num_inputs", "priority", *SLO_COLUMNS.values()):
            columns[name] = np.empty(len(arrival_s), dtype=getattr(parts[0][1], name).dtype)
            for rows, part in parts:
                columns[name][rows] = getattr(part, name)
        for name in ("texts", "bodies"):
            columns[name] = _of_parts(name, parts, len(arrival_s))
        names = tuple(m.class_name for m in self.members)
        return Workload(arrival_s, **columns, class_index=which, class_names=names)


def _of_parts(name: str, parts: Sequence[tuple[Ints, Workload]], n: int) -> list[Any] | None:
    """A column of objects whose rows stand in several workloads; None where none has it."""
    column: list[Any] = [None] * n
    for rows, part in parts:
        for row, value in zip(rows, getattr(part, name) or (), strict=False):
            column[row] = value
    return column if any(value is not None for value in column) else None
