"""Arrival processes, whose mean rate is the offered rate.

Arrivals are drawn in advance and never rescaled to fit a span. The same random numbers at another
rate give the same pattern, faster or slower. Processes with a rate that changes in time are Poisson
processes on a clock that runs at that rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .arrays import Floats
from .call_parser import Call, build, parse_call, positive
from .errors import SloBenchError, UnknownNameError, by_name
from .machine_memory import check_memory
from .workload import MOST_S

MADE_BYTES = 200  # of a request's columns, measured
Rng = np.random.Generator


@dataclass(frozen=True)
class Extent:
    """How far to draw: a number of requests, a duration, or both, whichever ends first.

    `at_once`: how many are in memory at the same time; all of them by default.
    """

    rate_rps: float
    requests: int | None
    duration_s: float | None
    at_once: float = math.inf

    def __post_init__(self) -> None:
        positive(self.rate_rps, "rate_rps")
        if self.requests is None and self.duration_s is None:
            raise SloBenchError("say how far to draw: requests or duration_s")
        if self.requests is not None and self.requests < 1:
            raise SloBenchError(f"requests must be at least 1 but is {self.requests}")
        if self.duration_s is not None:
            positive(self.duration_s, "duration_s")
        expected = self.span_s * self.rate_rps
        held = min(expected, self.at_once)
        check_memory(held * MADE_BYTES, f"making {held:,.0f} requests")
        if self.span_s > MOST_S:
            raise SloBenchError(
                f"requests at rate_rps={self.rate_rps:g} would arrive for {self.span_s:g} s; the "
                f"most is {MOST_S:g} s (31 years): take a higher rate or fewer requests"
            )

    @property
    def span_s(self) -> float:
        """Expected duration in seconds of the extent."""
        by_count = math.inf if self.requests is None else self.requests / self.rate_rps
        return min(by_count, math.inf if self.duration_s is None else self.duration_s)

    def cut(self, times_s: Floats) -> Floats:
        """Only the arrivals before `duration_s`."""
        if self.duration_s is not None:
            times_s = times_s[: int(np.searchsorted(times_s, self.duration_s, side="left"))]
        if not len(times_s):
            raise SloBenchError(
                f"no request arrives within duration_s={self.duration_s:g} at "
                f"rate_rps={self.rate_rps:g}; make it longer"
            )
        return times_s


class ArrivalProcess(ABC):
    """A process whose mean rate is the offered rate."""

    def times_s(
        self,
        rate_rps: float,
        rng: Rng,
        *,
        requests: int | None = None,
        duration_s: float | None = None,
    ) -> Floats:
        """Arrival times from 0 on, in order: the first `requests`, or all before `duration_s`.

        With both, whichever ends first. The mean rate is `rate_rps`.

        Raises:
            SloBenchError: the rate is not positive, neither bound is given, or nothing arrives.
        """
        return self._draw(Extent(rate_rps, requests, duration_s), rng)

    def blocks_s(self, extent: Extent, rng: Rng) -> Iterator[Floats]:
        """The times of an extent in blocks of `at_once`, the last of which may be shorter.

        Renewal processes draw block by block; of others all times are in memory, 8 bytes each.
        """
        times_s = self._draw(replace(extent, at_once=math.inf), rng)
        rows = int(extent.at_once)
        yield from (times_s[first : first + rows] for first in range(0, len(times_s), rows))

    @abstractmethod
    def _draw(self, extent: Extent, rng: Rng) -> Floats:
        """Arrival times of the extent."""


class RenewalProcess(ArrivalProcess):
    """A process with independent gaps."""

    @abstractmethod
    def gaps(self, n: int, rng: Rng) -> Floats:
        """`n` gaps of mean 1, drawn one after another."""

    def blocks_s(self, extent: Extent, rng: Rng) -> Iterator[Floats]:
        end_s = math.inf if extent.duration_s is None else extent.duration_s
        left: float = math.inf if extent.requests is None else extent.requests
        last = 0.0
        while left > 0:
            gaps = self.gaps(int(min(extent.at_once, left)), rng)
            gaps[0] += last  # as the cumulative sum of all of them would
            times = np.cumsum(gaps)
            last, left = float(times[-1]), left - len(times)
            times_s = times / extent.rate_rps
            if times_s[-1] >= end_s:
                left, times_s = 0, times_s[: int(np.searchsorted(times_s, end_s, side="left"))]
            if len(times_s):
                yield times_s

    def _draw(self, extent: Extent, rng: Rng) -> Floats:
        if extent.requests is not None:
            return extent.cut(np.cumsum(self.gaps(extent.requests, rng)) / extent.rate_rps)
        need = (extent.duration_s or 0.0) * extent.rate_rps
        chunks: list[Floats] = []
        total = 0.0
        while total < need:
            # Gaps are drawn one after another, so the chunk size does not change them.
            chunk = self.gaps(int(max(need - total, 16) * 1.05) + 16, rng)
            chunks.append(chunk)
            total += float(chunk.sum())
        return extent.cut(np.cumsum(np.concatenate(chunks)) / extent.rate_rps)


@dataclass(frozen=True)
class ConstantArrivals(ArrivalProcess):
    """Evenly spaced, the first at 0."""

    def _draw(self, extent: Extent, rng: Rng) -> Floats:
        n = extent.requests
        if n is None:
            n = math.ceil((extent.duration_s or 0.0) * extent.rate_rps)
        return extent.cut(np.arange(n) / extent.rate_rps)


@dataclass(frozen=True)
class Poisson(RenewalProcess):
    """Poisson process: independent exponential gaps."""

    def gaps(self, n: int, rng: Rng) -> Floats:
        return rng.standard_exponential(n)


@dataclass(frozen=True)
class Gamma(RenewalProcess):
    """Independent gamma gaps; give their coefficient of variation, or the shape 1/cv².

    The shape is what vLLM's load generator calls burstiness: below 1 is burstier than Poisson.
    """

    cv: float | None = None
    shape: float | None = None

    def __post_init__(self) -> None:
        if (self.cv is None) == (self.shape is None):
            raise SloBenchError("gamma takes either cv or shape, as in gamma(cv=2)")
        if self.cv is not None and not 0.001 <= self.cv <= 100:
            raise SloBenchError(f"gamma cv must lie in 0.001..100 but is {self.cv:g}")
        if self.shape is not None and not 1e-4 <= self.shape <= 1e6:
            raise SloBenchError(f"gamma shape must lie in 0.0001..1,000,000 but is {self.shape:g}")

    def gaps(self, n: int, rng: Rng) -> Floats:
        shape = self.shape or 1 / (self.cv or 1.0) ** 2
        return rng.standard_gamma(shape, n) / shape


@dataclass(frozen=True)
class Weibull(RenewalProcess):
    """Independent Weibull gaps; a shape below 1 is burstier than Poisson."""

    shape: float

    def __post_init__(self) -> None:
        if not 0.1 <= self.shape <= 100:
            raise SloBenchError(f"weibull shape must lie in 0.1..100 but is {self.shape}")

    def gaps(self, n: int, rng: Rng) -> Floats:
        return rng.weibull(self.shape, n) / math.gamma(1 + 1 / self.shape)


@dataclass(frozen=True)
class RateCycle:
    """A cycle of a changing rate: by `time_s`, `load_s` seconds' worth of mean load has arrived.

    Both columns begin at 0, end at the cycle's length, and do not decrease.
    """

    time_s: Floats
    load_s: Floats

    def time_at(self, load_s: Floats) -> Floats:
        """When the accumulated load reaches each of `load_s`, cycle after cycle."""
        cycle_s = float(self.time_s[-1])
        cycles = np.floor(load_s / cycle_s)
        return cycles * cycle_s + np.interp(load_s - cycles * cycle_s, self.load_s, self.time_s)


def _clock(time_s: Floats, rate: Floats) -> RateCycle:
    """The clock of a rate given at the times of one cycle, straight between them."""
    load = np.concatenate(([0.0], np.cumsum(np.diff(time_s) * (rate[1:] + rate[:-1]) / 2)))
    return RateCycle(time_s, load * (time_s[-1] / load[-1]))


def _step_clock(lengths_s: Floats, rates: Floats) -> RateCycle:
    """The clock of a rate that is constant over each of some lengths."""
    load = np.concatenate(([0.0], np.cumsum(lengths_s * rates)))
    time_s = np.concatenate(([0.0], np.cumsum(lengths_s)))
    return RateCycle(time_s, load * (time_s[-1] / load[-1]))


def _modulated(clock: RateCycle, extent: Extent, rng: Rng) -> Floats:
    """A Poisson process with a time-dependent rate."""
    if extent.requests is not None:
        load_s = np.cumsum(rng.standard_exponential(extent.requests)) / extent.rate_rps
        return extent.cut(clock.time_at(load_s))
    # No moment before the end has more load than whole cycles up to and past it.
    cycle_s = float(clock.time_s[-1])
    horizon_s = math.ceil((extent.duration_s or 0.0) / cycle_s) * cycle_s
    load_s = Poisson().times_s(extent.rate_rps, rng, duration_s=horizon_s)
    return extent.cut(clock.time_at(load_s))


@dataclass(frozen=True)
class OnOff(ArrivalProcess):
    """Bursts: Poisson for `on_s`, nothing for `off_s`, again and again.

    `phases=fixed` keeps both lengths; `phases=random` draws each from an exponential of that
    mean (an interrupted Poisson process), so that a short run may be well off the mean rate.
    """

    on_s: float
    off_s: float
    phases: str = "fixed"

    def __post_init__(self) -> None:
        positive(self.on_s, "onoff on_s")
        positive(self.off_s, "onoff off_s")
        if self.phases not in ("fixed", "random"):
            raise UnknownNameError("onoff phases", self.phases, ("fixed", "random"))

    def _draw(self, extent: Extent, rng: Rng) -> Floats:
        if self.phases == "fixed":
            lengths = np.array([self.on_s, self.off_s])
            return _modulated(_step_clock(lengths, np.array([1.0, 0.0])), extent, rng)
        return self._random_phases(extent, rng)

    def _random_phases(self, extent: Extent, rng: Rng) -> Floats:
        phase_rng = rng.spawn(1)[0]
        unit = rng.standard_exponential(extent.requests or 0)
        load_s = np.cumsum(unit) / extent.rate_rps
        need_load_s = float(load_s[-1]) if extent.requests else 0.0
        need_time_s = 0.0 if extent.requests else extent.duration_s or 0.0
        gain = (self.on_s + self.off_s) / self.on_s
        phases = np.empty(0)
        time_s = load = np.zeros(1)
        while load[-1] < need_load_s or time_s[-1] < need_time_s:
            more = phase_rng.standard_exponential((256, 2)) * (self.on_s, self.off_s)
            phases = np.concatenate((phases, more.ravel()))
            time_s = np.concatenate(([0.0], np.cumsum(phases)))
            load = np.concatenate(([0.0], np.cumsum(phases * np.resize([gain, 0.0], len(phases)))))
        if not extent.requests:
            horizon_s = float(np.interp(need_time_s, time_s, load))
            load_s = Poisson().times_s(extent.rate_rps, rng, duration_s=horizon_s)
        return extent.cut(np.interp(load_s, load, time_s))


@dataclass(frozen=True)
class Periodic(ArrivalProcess):
    """Poisson with a sinusoidal rate: mean · (1 + amplitude · sin(2π t / period_s))."""

    period_s: float
    amplitude: float = 0.5

    def __post_init__(self) -> None:
        positive(self.period_s, "periodic period_s")
        if not 0 <= self.amplitude <= 1:
            raise SloBenchError(f"periodic amplitude must lie in 0..1 but is {self.amplitude}")

    def _draw(self, extent: Extent, rng: Rng) -> Floats:
        t = np.linspace(0, self.period_s, 2049)
        rate = 1 + self.amplitude * np.sin(2 * np.pi * t / self.period_s)
        return _modulated(_clock(t, rate), extent, rng)


@dataclass(frozen=True)
class Ramp(ArrivalProcess):
    """Poisson with a rate that rises (or falls) in a line from `start` to `end`.

    Both are relative: their mean is scaled to the offered rate. Without `over_s` the ramp takes
    the whole run (its expected length); with it, it begins anew every `over_s`.
    """

    start: float
    end: float
    over_s: float | None = None

    def __post_init__(self) -> None:
        if not (self.start >= 0 and self.end >= 0 and self.start + self.end > 0):
            raise SloBenchError("ramp start and end must not be negative, nor both zero")
        if self.over_s is not None:
            positive(self.over_s, "ramp over_s")

    def _draw(self, extent: Extent, rng: Rng) -> Floats:
        t = np.linspace(0, self.over_s or extent.span_s, 2049)
        return _modulated(_clock(t, np.linspace(self.start, self.end, 2049)), extent, rng)


@dataclass(frozen=True)
class StepArrivals(ArrivalProcess):
    """Poisson with a rate that takes relative `levels` in turn, `every_s` each, again and again.

    The mean of the levels is scaled to the offered rate. Without `every_s` one round of the
    levels takes the whole run.
    """

    levels: tuple[float, ...]
    every_s: float | None = None

    def __post_init__(self) -> None:
        if not self.levels or any(not x >= 0 for x in self.levels) or not sum(self.levels) > 0:
            raise SloBenchError(
                "steps need levels from 0 on, one above zero: steps(1,4,every_s=60)"
            )
        if self.every_s is not None:
            positive(self.every_s, "steps every_s")

    def _draw(self, extent: Extent, rng: Rng) -> Floats:
        every_s = self.every_s or extent.span_s / len(self.levels)
        clock = _step_clock(np.full(len(self.levels), every_s), np.array(self.levels))
        return _modulated(clock, extent, rng)


@dataclass(frozen=True)
class Concurrency(ArrivalProcess):
    """Closed loop: `users` requests in flight; a next one arrives when any ends.

    There is no rate, and the times are all 0.
    """

    users: int

    def __post_init__(self) -> None:
        if self.users < 1:
            raise SloBenchError(f"concurrency must be at least 1 but is {self.users}")

    def _draw(self, extent: Extent, rng: Rng) -> Floats:
        if extent.requests is None:
            raise SloBenchError("a closed loop (concurrency) needs requests, not duration_s")
        return np.zeros(extent.requests)


ARRIVALS: dict[str, type[ArrivalProcess]] = {
    "constant": ConstantArrivals,
    "poisson": Poisson,
    "gamma": Gamma,
    "weibull": Weibull,
    "onoff": OnOff,
    "periodic": Periodic,
    "ramp": Ramp,
    "steps": StepArrivals,
    "concurrency": Concurrency,
}


def parse_arrivals(text: str | Call) -> ArrivalProcess:
    """Read `poisson`, `constant`, `gamma(cv=2)`, `weibull(shape=0.7)`, `onoff(on_s=10,off_s=20)`,
    `periodic(period_s=600,amplitude=0.5)`, `ramp(1,3)`, `steps(1,4,every_s=60)` or
    `concurrency(16)`.

    Raises:
        SloBenchError: the text has another form or a value makes no sense.
        UnknownNameError: no such process.
    """
    call = parse_call(text) if isinstance(text, str) else text
    return build(by_name("arrival process", call.name, ARRIVALS), call)
