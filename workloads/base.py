"""What a workload source is, and the two kinds of it: drawn from distributions, or a trace."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .arrivals import ArrivalProcess, Concurrency
from .call_parser import positive
from .errors import SloBenchError
from .fleet import Fleet
from .lengths import PairLengths
from .models import Models
from .prefixes import Continuations
from .readers import Trace
from .rows import take
from .sessions import Sessions
from .slo import SloSpec
from .streams import Streams
from .workload import Workload

Floats = NDArray[np.float64]
NO_SLO = SloSpec()


class WorkloadSource(Protocol):
    """Makes workloads.

    `has_arrivals` says whether the source keeps arrivals of its own; then `natural_rate_rps` is
    their mean rate, and `speed` may be given in place of a rate.
    """

    @property
    def name(self) -> str:
        """What was asked for: a catalogue name, a file's name, or the mix as written."""
        ...

    @property
    def origin(self) -> str:
        """Where the figures or rows come from."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was dropped, assumed or approximated."""
        ...

    @property
    def has_arrivals(self) -> bool:
        """Whether the source keeps arrivals of its own."""
        ...

    @property
    def closed_loop(self) -> bool:
        """Whether a fixed number of requests is in flight, and there is no rate."""
        ...

    @property
    def natural_rate_rps(self) -> float | None:
        """Mean rate of the source's own arrivals, or of its origin's, where known."""
        ...

    def make(
        self,
        *,
        rate_rps: float | None = None,
        speed: float | None = None,
        requests: int | None = None,
        duration_s: float | None = None,
        seed: int = 0,
        slo: SloSpec = NO_SLO,
    ) -> Workload:
        """A workload; the same arguments give the same bytes.

        Lengths and SLOs of a seed are the same at every rate. A source with own arrivals divides
        its times by `speed`, or by `rate_rps` over its natural rate; then `requests` keeps its
        first rows and `duration_s` what arrives before it.

        Raises:
            SloBenchError: an argument is out of range, missing, or contradicts another.
        """
        ...


@dataclass(frozen=True)
class DrawnSource:
    """Lengths from distributions, arrivals from a process."""

    name: str
    lengths: PairLengths
    arrivals: ArrivalProcess
    origin: str = ""
    notes: tuple[str, ...] = ()
    natural_rate_rps: float | None = None
    continuations: Continuations | None = None
    sessions: Sessions | None = None
    models: Models | None = None

    @property
    def has_arrivals(self) -> bool:
        """See `WorkloadSource`."""
        return False

    @property
    def closed_loop(self) -> bool:
        """See `WorkloadSource`."""
        return isinstance(self.arrivals, Concurrency)

    def make(
        self,
        *,
        rate_rps: float | None = None,
        speed: float | None = None,
        requests: int | None = None,
        duration_s: float | None = None,
        seed: int = 0,
        slo: SloSpec = NO_SLO,
    ) -> Workload:
        """See `WorkloadSource`."""
        check_extent(requests, duration_s)
        rate = offered_rate(self, rate_rps, speed)
        streams = Streams(seed)
        if isinstance(self.models, Fleet):
            coming = self.models.draw(rate, streams, requests, duration_s)
            workload = dataclasses.replace(
                self.at_times(coming.arrival_s, streams),
                model_index=coming.model_index,
                model_names=self.models.names,
            )
            return finish(workload, self.name, self.arrivals, None, streams, slo)
        if self.sessions is not None:
            workload = self.sessions.make(
                self.lengths,
                self.arrivals,
                streams,
                rate_rps=rate,
                requests=requests,
                duration_s=duration_s,
            )
        else:
            arrival_s = self.arrivals.times_s(
                rate, streams.rng("arrivals"), requests=requests, duration_s=duration_s
            )
            workload = self.at_times(arrival_s, streams)
        return finish(workload, self.name, self.arrivals, self.models, streams, slo)

    def at_times(self, arrival_s: Floats, streams: Streams) -> Workload:
        """Requests that arrive at these times."""
        if self.continuations is None:
            pairs = self.lengths.draw(len(arrival_s), streams.rng("lengths"))
            return Workload(arrival_s, **dataclasses.asdict(pairs))
        shared = self.continuations.draw(self.lengths, arrival_s, streams)
        return Workload(
            arrival_s,
            **dataclasses.asdict(shared.pairs),
            session=shared.session,
            prefix_blocks=shared.blocks,
            prefix_block_tokens=self.continuations.block_tokens,
        )


@dataclass(frozen=True)
class TraceSource:
    """A file's rows. With `arrivals`, these take the place of the file's own.

    Rows of a data set without arrivals are drawn in a random order, and again in another one
    when they run out; rows of a trace keep their order.
    """

    name: str
    trace: Trace
    arrivals: ArrivalProcess | None
    origin: str
    models: Models | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """See `WorkloadSource`."""
        return self.trace.notes

    @property
    def has_arrivals(self) -> bool:
        """See `WorkloadSource`."""
        return self.arrivals is None

    @property
    def closed_loop(self) -> bool:
        """See `WorkloadSource`."""
        return isinstance(self.arrivals, Concurrency)

    @property
    def natural_rate_rps(self) -> float | None:
        """Requests after the first, over the span; None for a single moment."""
        workload = self.trace.workload
        return (len(workload) - 1) / workload.span_s if workload.span_s > 0 else None

    def make(
        self,
        *,
        rate_rps: float | None = None,
        speed: float | None = None,
        requests: int | None = None,
        duration_s: float | None = None,
        seed: int = 0,
        slo: SloSpec = NO_SLO,
    ) -> Workload:
        """See `WorkloadSource`; without rate and speed a trace runs at speed 1, and whole."""
        streams = Streams(seed)
        if self.arrivals is None:
            factor = self._speed(rate_rps, speed)
            workload = self._replayed(factor, requests, duration_s)
            return finish(workload, self.name, None, self.models, streams, slo)
        check_extent(requests, duration_s)
        rate = offered_rate(self, rate_rps, speed)
        arrival_s = self.arrivals.times_s(
            rate, streams.rng("arrivals"), requests=requests, duration_s=duration_s
        )
        workload = self.at_times(arrival_s, streams)
        return finish(workload, self.name, self.arrivals, self.models, streams, slo)

    def at_times(self, arrival_s: Floats, streams: Streams) -> Workload:
        """Rows that arrive at these times in place of their own."""
        rows = self._rows(len(arrival_s), streams.rng("lengths"))
        return take(self.trace.workload, rows, arrival_s)

    def _speed(self, rate_rps: float | None, speed: float | None) -> float:
        if rate_rps is not None and speed is not None:
            raise SloBenchError("give a trace either rate_rps or speed, not both")
        if speed is not None:
            return positive(speed, "speed")
        if rate_rps is None:
            return 1.0
        if self.natural_rate_rps is None:
            raise SloBenchError(
                f"all requests of {self.name} arrive at once, so it has no rate to change"
            )
        return positive(rate_rps, "rate_rps") / self.natural_rate_rps

    def _replayed(self, speed: float, requests: int | None, duration_s: float | None) -> Workload:
        workload = self.trace.workload
        arrival_s = workload.arrival_s / speed
        n = len(workload)
        if requests is not None:
            if requests < 1:
                raise SloBenchError(f"requests must be at least 1 but is {requests}")
            n = min(n, requests)
        if duration_s is not None:
            limit_s = positive(duration_s, "duration_s")
            n = min(n, int(np.searchsorted(arrival_s, limit_s, side="left")))
        return take(workload, np.arange(n), arrival_s[:n])

    def _rows(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        size = len(self.trace.workload)
        if self.trace.has_arrivals:
            if n > size:
                raise SloBenchError(
                    f"{self.name} has {size} requests, {n} are asked for; ask for fewer"
                )
            return np.arange(n)
        rounds = [rng.permutation(size) for _ in range(-(-n // size))]
        return np.concatenate(rounds)[:n]


def check_extent(requests: int | None, duration_s: float | None) -> None:
    """One of both must be given."""
    if requests is None and duration_s is None:
        raise SloBenchError("say how much to make: requests or duration_s")


def offered_rate(source: WorkloadSource, rate_rps: float | None, speed: float | None) -> float:
    """The rate for a source whose arrivals are drawn; 1 for a closed loop, which uses none."""
    if speed is not None:
        raise SloBenchError(
            f"speed is for traces with arrivals of their own; give {source.name} a rate_rps"
        )
    if source.closed_loop:
        if rate_rps is not None:
            raise SloBenchError("a closed loop (concurrency) has no rate; leave rate_rps out")
        return 1.0
    if rate_rps is None:
        raise SloBenchError(f"{source.name} has no arrivals of its own; give it a rate_rps")
    return positive(rate_rps, "rate_rps")


def finish(
    workload: Workload,
    name: str,
    arrivals: ArrivalProcess | None,
    models: Models | None,
    streams: Streams,
    slo: SloSpec,
) -> Workload:
    """What all sources end with: closed loop, models, name, SLO."""
    if isinstance(arrivals, Concurrency):
        workload = dataclasses.replace(workload, concurrency=arrivals.users)
    if models is not None:
        assert not isinstance(models, Fleet)  # which draws its models with its arrivals
        workload = models.apply(workload, streams)
    workload = dataclasses.replace(workload, name=name)
    return slo.apply(workload, streams.rng("slo"))
