"""Predicts the highest rate at which requests of one length keep bounds on latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from ....workloads.arrays import Floats
from ....workloads.errors import SloBenchError
from ....workloads.workload import Workload
from .measurement import HighestRate
from .readers import figures

SPAN_S = 600.0  # of arrivals at a rate
LEAST_REQUESTS, MOST_REQUESTS = 1000, 20_000
WARM_UP = 0.1  # the share of the first requests that are not counted
WITHIN = 0.01  # of a rate that misses a bound
_LOWEST_RPS, _HIGHEST_RPS = 1e-3, 1e4


def highest_rate(
    load: HighestRate, serve: Callable[[Workload], Mapping[str, Floats]]
) -> tuple[float, dict[str, float]]:
    """The highest rate (req/s) that keeps the bounds, and the figures at that rate.

    `serve` gives seconds by metric, a value a request. Gaps between arrivals are the same draws at
    every rate, scaled. The rate is doubled or halved, then bisected.

    Raises:
        SloBenchError: no rate keeps the bounds, or all do.
    """

    @cache
    def figures_at(rate_rps: float) -> dict[str, float]:
        n = min(max(LEAST_REQUESTS, round(rate_rps * SPAN_S)), MOST_REQUESTS)
        workload = Workload(
            np.cumsum(np.random.default_rng(0).exponential(1 / rate_rps, n)),
            np.full(n, load.prompt_tokens),
            np.full(n, load.output_tokens),
            name="measured",
        )
        warm = round(WARM_UP * n)
        return figures({metric: values[warm:] for metric, values in serve(workload).items()})

    def keeps(rate_rps: float) -> bool:
        if not _LOWEST_RPS < rate_rps < _HIGHEST_RPS:
            which = "no rate" if rate_rps < 1 else "every rate"
            raise SloBenchError(f"{which} that was tried ({rate_rps:g} req/s) keeps the bounds")
        return all(
            figures_at(rate_rps).get(name, np.inf) <= bound_s for name, bound_s in load.bounds
        )

    low = 1.0
    while not keeps(low):
        low /= 2
    while keeps(2 * low):
        low *= 2
    high = 2 * low
    while high / low > 1 + WITHIN:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low, figures_at(low)
