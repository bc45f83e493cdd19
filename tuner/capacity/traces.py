"""The capacity of a trace at its own arrivals: nothing is drawn, so there is nothing to estimate.

The same requests arrive at every speed, and a run is repeated by nothing but itself. Capacity is
that of this trace: the rate is bisected until a rate that passes and one that fails are near.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .capacity_search import SearchProgress, three_digits
from .curve import CapacityLevel
from .level_samples import LevelRunner, check_refused
from .search_options import (
    Capacity,
    CapacitySearch,
    SearchOptions,
    SearchOutcome,
    SpentBudget,
    budget_spent,
)

_FARTHEST = 2.0**14


def find_trace_capacity(
    runner: LevelRunner,
    *,
    start_rps: float,
    options: SearchOptions,
    requests: int,
    watch: Callable[[SearchProgress], None] | None = None,
) -> CapacitySearch:
    """The highest mean rate at which the trace's attainment is at least each target.

    The interval ends at the highest rate tried that passes and the lowest above it that fails.

    Args:
        runner: replays the trace at a mean rate.
        start_rps: where to begin.
        options: targets, tolerance, budget; requests and seeds are not used.
        requests: in the trace, or as many of its first ones as are replayed.
        watch: called after every run.
    """
    levels: dict[float, CapacityLevel] = {}
    spent, wall_s = 0, 0.0

    def bounds(target: float) -> tuple[float, float]:
        """Highest rate that passes below the lowest one that fails."""
        failing = [lv.rate_rps for lv in levels.values() if lv.counted and lv.attainment < target]
        top = min(failing, default=math.inf)
        passing = [lv.rate_rps for lv in levels.values() if lv.attainment >= target]
        return max((rate for rate in passing if rate < top), default=0.0), top

    def next_rate(target: float) -> float | None:
        low, high = bounds(target)
        if not levels:
            rate = start_rps
        elif high == math.inf:
            rate = low * 2 if low < start_rps * _FARTHEST else 0.0
        elif low == 0.0:
            rate = high / 2 if high > start_rps / _FARTHEST else 0.0
        elif (high - low) / (high + low) <= options.tolerance:
            return None
        else:
            rate = math.sqrt(low * high)
        rate = three_digits(min(max(rate, options.low_rps), options.high_rps))
        return None if rate in levels or rate == 0.0 else rate

    limit: SpentBudget | None = None
    stopped = f"every interval is within ±{options.tolerance:.1%}"
    for target in sorted(options.targets):
        while (rate := next_rate(target)) is not None:
            short = budget_spent(options.budget, spent, wall_s, requests, levels.values(), rate)
            if short is not None:
                limit, stopped = short, short.left
                break
            sample = runner.run(rate, options.first_seed, requests)
            levels[rate] = CapacityLevel(rate, (sample,), options.most_growth)
            runs = [run for level in levels.values() for run in level.samples]
            check_refused(runs, options.targets)
            spent += sample.requests
            wall_s += sample.wall_s
            if watch is not None:
                watch(SearchProgress(sample, spent, wall_s, (None,) * len(options.targets)))
    capacities = []
    for target in sorted(options.targets):
        low, high = bounds(target)
        precise = high < math.inf and (high - low) / (high + low) <= options.tolerance
        outcome = SearchOutcome.FOUND
        estimate: float | None = math.sqrt(low * high)
        limited_by = None if precise or limit is None else limit.setting
        if limited_by and (low == 0.0 or high == math.inf):
            outcome, estimate = SearchOutcome.UNDECIDED, None
        elif high == math.inf:
            outcome, estimate = SearchOutcome.NEVER_MISSED, None
        elif low == 0.0:
            outcome = SearchOutcome.NEVER_MET
        capacities.append(
            Capacity(target, estimate, low, high, precise, outcome, limited_by=limited_by)
        )
        if not precise and stopped.startswith("every"):
            stopped = (
                f"rates from {min(levels):g} to {max(levels):g} req/s do not bracket {target:g}"
            )
    ordered = tuple(levels[rate] for rate in sorted(levels))
    return CapacitySearch(tuple(capacities), ordered, spent, wall_s, stopped)
