"""The times that the rates of a run divide by: the window of arrivals, and the drain after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def counted_requests(arrival_s: Floats, warmup_s: float) -> Mask:
    """Requests that do not arrive during the warm-up; one that never arrived (NaN) counts."""
    counted: Mask = ~(arrival_s < warmup_s)
    return counted


def rate_window(
    arrival_s: Floats, finish_s: Floats, warmup_s: float = 0.0, *, offered: bool = True
) -> RateWindow:
    """The window of a run; NaN stands for an arrival or a finish that never came.

    Args:
        arrival_s: arrival of each request, in seconds from the start of the run.
        finish_s: its last token.
        warmup_s: requests that arrive earlier do not count.
        offered: see `RateWindow`.
    """
    counted = counted_requests(arrival_s, warmup_s)
    arrivals_s, ends_s = arrival_s[counted], finish_s[counted]
    arrivals_s, ends_s = arrivals_s[np.isfinite(arrivals_s)], ends_s[np.isfinite(ends_s)]
    if not len(arrivals_s):
        return RateWindow(0.0, 0.0, offered)
    begin_s = warmup_s if warmup_s > 0 else float(arrivals_s.min())
    last_s = float(arrivals_s.max())
    drain_s = max(0.0, float(ends_s.max(initial=last_s)) - last_s)
    return RateWindow(last_s - begin_s, drain_s, offered)


def per_second(count: float, seconds: float) -> float:
    """A rate; NaN over no time."""
    return count / seconds if seconds > 0 else float("nan")
