"""Where a workload comes from: the catalogue, a trace file, or a mix; the way in for other rooms.

source = load_source("azure-conv")
workload = source.make(rate_rps=6.45, requests=1000, seed=0, slo=parse_slo("ttft=1"))
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from . import catalogue
from .arrivals import ArrivalProcess, Concurrency, Poisson, parse_arrivals
from .call_parser import parse_call, positive
from .errors import SloBenchError, UnknownNameError
from .fleet import Fleet
from .lengths import PairLengths, Part, pair, parse_lengths
from .models import Models, parse_models
from .prefixes import Continuations
from .readers import Trace, read
from .rows import take
from .sessions import Sessions, parse_sessions
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


def load_source(
    text: str | Path,
    *,
    arrivals: str = "poisson",
    prompt_tokens: str | None = None,
    output_tokens: str | None = None,
    sessions: str | None = None,
    models: str | None = None,
    format: str | None = None,  # noqa: A002
    redraw_arrivals: bool = False,
) -> WorkloadSource:
    """A catalogue name, the path of a trace, `synthetic`, `synthetic(…)` or `embed(…)` (see
    `written`), or `mix(chat=azure-conv:0.7, …)` and its short form `collocated(1:9)`.

    Args:
        text: what to load; `synthetic` needs `prompt_tokens` and `output_tokens`.
        arrivals: the arrival process, as `parse_arrivals` reads it. A trace with arrivals of its
            own keeps them, unless `redraw_arrivals`.
        prompt_tokens: a length distribution in place of the catalogue's (`parse_lengths`).
        output_tokens: likewise.
        sessions: makes conversations of a catalogue's lengths (`parse_sessions`).
        models: which model each request asks for (`parse_models`).
        format: the format of a trace file, where it cannot be told (`readers.FORMATS`).
        redraw_arrivals: draw arrivals for a trace that has its own, keeping its rows in order.

    Raises:
        UnknownNameError: no such name in the catalogue, and no such file.
        FileFormatError: the file cannot be read.
        SloBenchError: settings that contradict each other or cannot be read.
    """
    text = str(text).strip()
    choice = None if models is None else parse_models(models)
    from .mix import is_mix

    drawn = arrivals == "poisson" and not sessions and not is_mix(text)
    if isinstance(choice, Fleet) and (not drawn or Path(text).exists()):
        raise SloBenchError(
            "fleet(…) draws arrivals of its own, with the lengths of one catalogue workload: leave "
            "arrivals and sessions out; for a trace or a mix use zipf(…) or assign(…)"
        )
    from .inline_specs import is_written, written_source

    if is_mix(text):
        from .mix import parse_mix

        if prompt_tokens or output_tokens or sessions or format:
            raise SloBenchError("set lengths and sessions in the sources of a mix, not for the mix")
        return parse_mix(text, arrivals, choice)
    process = parse_arrivals(arrivals)
    if is_written(text):
        if prompt_tokens or output_tokens or sessions or format:
            raise SloBenchError(f"{text} says its own lengths, and has no sessions and no format")
        return written_source(parse_call(text), process, choice)
    talks = None if sessions is None else parse_sessions(sessions)
    prompt = None if prompt_tokens is None else parse_lengths(prompt_tokens)
    output = None if output_tokens is None else parse_lengths(output_tokens)
    if text == "synthetic":
        if prompt is None or output is None:
            raise SloBenchError("workload synthetic needs prompt_tokens and output_tokens")
        origin = f"synthetic: prompt {prompt_tokens}, output {output_tokens}"
        return DrawnSource(
            text, pair(prompt, output), process, origin, sessions=talks, models=choice
        )
    if text not in catalogue.catalogue():
        if not _exists(text):
            raise _unknown(text)
        if prompt or output or talks:
            raise SloBenchError(
                f"{text} has its own lengths; prompt_tokens, output_tokens and "
                "sessions are for catalogue workloads"
            )
        trace = read(text, format)
        keeps = trace.has_arrivals and not redraw_arrivals
        if keeps and process != Poisson():
            raise SloBenchError(
                f"{text} has arrivals of its own; to replace them by {arrivals} say redraw_arrivals"
            )
        return TraceSource(
            Path(text).name, trace, None if keeps else process, f"file {Path(text).name}", choice
        )
    entry = catalogue.find(text)
    lengths = entry.lengths
    if prompt or output:
        parts = (Part(prompt or p.prompt, output or p.output, p.weight) for p in lengths.parts)
        lengths = PairLengths(tuple(parts))
    return DrawnSource(
        name=entry.name,
        lengths=lengths,
        arrivals=process,
        origin=entry.origin,
        notes=(entry.note,),
        natural_rate_rps=entry.natural_rate_rps,
        continuations=_continuations(entry) if talks is None else None,
        sessions=talks,
        models=choice,
    )


def _continuations(entry: catalogue.Entry) -> Continuations | None:
    figures = entry.prefix
    if figures is None:
        return None
    return Continuations(
        share=figures.continuation_share,
        turn_correlation=figures.turn_correlation,
        gap_median_s=figures.gap_median_s,
        gap_sigma=figures.gap_sigma,
        system_blocks=figures.system_blocks,
        block_tokens=figures.block_tokens,
    )


def _exists(text: str) -> bool:
    """Whether there is such a file; a text that can be no name is none."""
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _unknown(text: str) -> SloBenchError:
    if "/" in text or Path(text).suffix:
        return SloBenchError(
            f"there is no file {text}; a workload is a trace file or one of "
            f"{', '.join(sorted(catalogue.catalogue()))}"
        )
    error = UnknownNameError("workload", text, catalogue.catalogue())
    error.args = (f"{error} (the path of a trace file works too)",)
    return error
