"""Which requests of a run count, and the seconds that its rates divide by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import SloBenchError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class RateWindow:
    """The window of arrivals and the drain of one run, in seconds.

    Attributes:
        arrivals_s: from the first counted arrival, or from the end of the warm-up, to the last
            arrival.
        drain_s: from the last arrival to the last finish of a counted request; 0 where nothing
            finishes later.
        offered: whether requests are offered at a rate. In a closed loop they are not: each
            arrives when another ends.
    """

    arrivals_s: float
    drain_s: float
    offered: bool = True

    @property
    def makespan_s(self) -> float:
        """Window of arrivals and drain: throughput divides by it."""
        return self.arrivals_s + self.drain_s

    @property
    def goodput_s(self) -> float:
        """Goodput divides by it: the window of arrivals, so that a long drain of a few requests
        does not lower it; the makespan where no rate is offered (closed loop, all at once).
        """
        return self.arrivals_s if self.offered and self.arrivals_s > 0 else self.makespan_s


class WindowFold:
    """The window of a run whose counted requests come in blocks; NaN stands for an arrival or a
    finish that never came.
    """

    def __init__(self) -> None:
        self._first_s, self._last_s, self._end_s = math.inf, -math.inf, -math.inf

    def add(self, arrival_s: Floats, finish_s: Floats) -> None:
        """Add counted requests: arrival and last token of each, in seconds from the start."""
        arrival_s, finish_s = arrival_s[np.isfinite(arrival_s)], finish_s[np.isfinite(finish_s)]
        self._first_s = float(arrival_s.min(initial=self._first_s))
        self._last_s = float(arrival_s.max(initial=self._last_s))
        self._end_s = float(finish_s.max(initial=self._end_s))

    def window(self, warmup_s: float = 0.0, *, offered: bool = True) -> RateWindow:
        """The window; requests that arrive before `warmup_s` do not count (`offered`: see
        `RateWindow`).
        """
        if math.isinf(self._last_s):
            return RateWindow(0.0, 0.0, offered)
        begin_s = warmup_s if warmup_s > 0 else self._first_s
        return RateWindow(self._last_s - begin_s, max(0.0, self._end_s - self._last_s), offered)


def counted_requests(arrival_s: Floats, warmup_s: float) -> Mask:
    """Requests that do not arrive during the warm-up; one that never arrived (NaN) counts."""
    counted: Mask = ~(arrival_s < warmup_s)
    return counted


def measured_window(arrival_s: Floats, warmup_s: float) -> Mask:
    """The requests that count: all, or those that arrive from `warmup_s` on.

    A follow-up that never arrived, because what it waits for was never answered, counts (missed).

    Raises:
        SloBenchError: the warm-up leaves nothing to measure.
    """
    counted = counted_requests(arrival_s, warmup_s)
    if not counted.any():
        check_counted(0, warmup_s, float(np.nanmax(arrival_s)))
    return counted


def check_counted(counted: int, warmup_s: float, last_s: float) -> None:
    """Raise SloBenchError if no request counts, of those that arrive until `last_s`."""
    if not counted:
        raise SloBenchError(
            f"warmup_s = {warmup_s:g} leaves no request to measure: "
            f"the last one arrives after {last_s:g} s; give more requests, "
            "a longer duration or a shorter warm-up"
        )


def rate_window(
    arrival_s: Floats, finish_s: Floats, warmup_s: float = 0.0, *, offered: bool = True
) -> RateWindow:
    """The window of a run of which all requests are known (`WindowFold`)."""
    fold = WindowFold()
    counted = counted_requests(arrival_s, warmup_s)
    fold.add(arrival_s[counted], finish_s[counted])
    return fold.window(warmup_s, offered=offered)


def per_second(count: float, seconds: float) -> float:
    """A rate; NaN over no time."""
    return count / seconds if seconds > 0 else math.nan
