"""Where a request was from its arrival to its end: instances, queues before them, transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.loop.traced_instance import EngineTrace, Place, Stop
from .latency_breakdown import LatencySpan, SpanKind, latency_breakdown

_PARTS = {
    Place.HELD: SpanKind.HELD,
    Place.LOADING: SpanKind.LOADING,
    Place.PREFILLED: SpanKind.PREFILLED,
    Place.TRANSFER: SpanKind.TRANSFER,
}


@dataclass(frozen=True)
class Stage:
    """A stay at one place; `why` says what brought the request there."""

    begin_s: float
    end_s: float
    place: str
    why: str
    spans: Sequence[LatencySpan]

    @property
    def duration_s(self) -> float:
        """Duration of the stage in seconds."""
        return self.end_s - self.begin_s


def visits(
    trace: EngineTrace, request: int, arrival_s: float, end_s: float
) -> list[tuple[Stop, float]]:
    """The stops of a finished request from its arrival on, each with its end; empty ones are left
    out.
    """
    stops = sorted(trace.stops.get(request, []), key=lambda stop: stop.time_s)
    if not stops:
        here = trace.where(request)[0]
        stops = [Stop(arrival_s, Place.INSTANCE, trace.names[here], "on arrival", here)]
    stops[0] = stops[0]._replace(time_s=arrival_s)
    ends_s = [min(following.time_s, end_s) for following in stops[1:]]
    ended = zip(stops, [*ends_s, end_s], strict=True)
    return [(stop, until_s) for stop, until_s in ended if stop.time_s < until_s]


def stages(trace: EngineTrace, request: int, arrival_s: float, end_s: float) -> list[Stage]:
    """All of a finished request's time, without gaps or overlaps."""
    return [
        Stage(stop.time_s, until_s, stop.name, stop.why, _spans(trace, request, stop, until_s))
        for stop, until_s in visits(trace, request, arrival_s, end_s)
    ]


def _spans(trace: EngineTrace, request: int, stop: Stop, until_s: float) -> Sequence[LatencySpan]:
    if stop.place in _PARTS:
        return [LatencySpan(stop.time_s, until_s, _PARTS[stop.place])]
    return latency_breakdown(trace.log(stop.log), request, stop.time_s, until_s)
