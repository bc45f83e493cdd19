"""The capacity search: the next rate, the length of its run, and when to stop.

Short runs first bracket the crossing of every target by doubling, halving and bisecting the rate.
Then long runs are made where they are most informative: a little below and a little above the
estimate of the target whose interval is nearest to being narrow enough, until every interval is or
the budget is spent; each target has one of its own for them. Every run has its own seed, so runs
are independent and their scatter is the whole error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...harness.results.stationarity import SETTLED_HORIZONS, requests_in
from ...workloads.errors import SloBenchError
from .curve import CapacityLevel, Crossing, crossing
from .level_samples import LevelRunner, LevelSample, check_refused
from .search_options import (
    LEAST_SHARES,
    WIDEST_BRACKET,
    Budget,
    Capacity,
    CapacitySearch,
    SearchOptions,
    SearchOutcome,
    SpentBudget,
    budget_spent,
)

_ALIKE = 1.25  # times the rate, within which levels share a control variate's coefficient
FARTHEST = 2.0**14  # from the first rate
_LEAST_HORIZONS = 2 * SETTLED_HORIZONS  # of the SLO, that a long run lasts
_LONGER = 4  # times, where a run was too short for a verdict
_CONFIRMATIONS = 3  # of the interval's low end
_CORRELATED = 25  # independent requests that a run counts for
_LEAST_MISSES = 2  # independent misses in a run
_TRIES = 3
_RESOLUTION = 0.001  # an attainment within ±0.1 % is precise enough
_LENGTHEN = 4  # times what the longest run was, at most
_SETTLED_TIMES = 3  # times, that a run is settled, and may bracket
_HORIZONS_OF_AN_ANSWER = 3  # a long bound extends a budget of time less than long answers
_LEAST_RUNS = 8
_LEAST_WORTH = 12.0
_LEAST_LAST = 0.5  # times the least run: a run in the time that is left
_FIRST_BURST, _MOST_BURSTS = 40, 6  # requests
_BURST_S = 8.0  # that a burst lasts, at most about
_GROWN = 1.2  # times, a throughput that still grows
_ROUGH = 2.0  # times the tolerance: a wider interval is no estimate yet
_BELOW_LOGITS, _ABOVE_LOGITS = 0.5, 1.0
_NARROWEST_SIDE, _WIDEST_SIDE = 0.01, 0.06


@dataclass(frozen=True)
class SearchProgress:
    """How far a search is, after every run."""

    sample: LevelSample
    requests_spent: int
    wall_s: float
    crossings: tuple[Crossing | None, ...]  # of the targets, in their order


Foresee = Callable[[float, Sequence[int], int], None]  # rate in req/s, seeds, requests of a run


class _BudgetSpentError(Exception):
    """The budget is too small for the next run."""

    def __init__(self, budget: SpentBudget) -> None:
        super().__init__(budget.left)
        self.budget = budget


def find_capacity(
    runner: LevelRunner,
    *,
    start_rps: float,
    options: SearchOptions | None = None,
    neighbours: Sequence[float] = (),
    earlier_runs: Sequence[LevelSample] = (),
    watch: Callable[[SearchProgress], None] | None = None,
    foresee: Foresee | None = None,
) -> CapacitySearch:
    """The highest rate at which the long-run attainment is at least each target.

    The same runner and arguments give the same search, so an interrupted search can be repeated
    with the samples it has.

    Args:
        runner: makes the runs.
        start_rps: a first guess; a good one saves a few short runs.
        options: targets, tolerance, budget.
        neighbours: capacities of a similar system, where the search begins instead.
        earlier_runs: of seeds that this search does not use; they count as spent.
        watch: called after every run.
        foresee: called with the runs that will be needed next, so that a runner that can make
            several at once may start them.

    Raises:
        SloBenchError: options are invalid, or every run was invalid.
    """
    if not (start_rps > 0 and math.isfinite(start_rps)):
        raise SloBenchError(f"start_rps must be positive but is {start_rps}")
    search = _Search(runner, options or SearchOptions(), watch, foresee, start_rps)
    for sample in earlier_runs:
        search.add(sample.rate_rps, sample)
    return search.search(neighbours)


@dataclass
class _Search:
    _runner: LevelRunner
    _options: SearchOptions
    _watch: Callable[[SearchProgress], None] | None
    _foresee: Foresee | None
    _start_rps: float

    def __post_init__(self) -> None:
        options = self._options
        self._known: dict[float, CapacityLevel] = {}
        self._step = 2.0
        self._spent = 0
        self._wall_s = 0.0
        self._runs = 0
        self._horizon_s = self._stay_s = 0.0
        self._answer_s = math.inf  # the shortest mean time in the system: without a queue
        self._budget_spent: SpentBudget | None = None
        self._own = dict.fromkeys(options.targets, (0, 0.0))  # spent on a target alone
        self._exhausted: dict[float, SpentBudget] = {}  # by target
        self._confirmed = dict.fromkeys(options.targets, 0)
        self._highest_rps = options.high_rps  # no rate above is tried
        self._late_rps: float | None = None  # the lowest rate at which the client is always late
        self._crossings: dict[float, Crossing | None] = dict.fromkeys(options.targets)

    def search(self, neighbours: Sequence[float]) -> CapacitySearch:
        try:
            self._begin(neighbours)
            stopped = self._refine()
        except _BudgetSpentError as spent:
            self._budget_spent = spent.budget
            stopped = str(spent)
        budgets = (self._budget_spent, *self._exhausted.values())
        if any(budget is not None and budget.setting == "max_time_s" for budget in budgets):
            stopped = f"{stopped}; {self._passed()}"
        if not any(level.counted for level in self._levels()):
            raise SloBenchError(
                "no valid run: the client was late at every rate tried; "
                "start lower (--rates) or use a faster client machine"
            )
        capacities = tuple(self._capacity(target) for target in sorted(self._options.targets))
        return CapacitySearch(capacities, tuple(self._levels()), self._spent, self._wall_s, stopped)

    # Results so far.

    def _levels(self) -> list[CapacityLevel]:
        return [self._known[rate] for rate in sorted(self._known)]

    def _usable(self) -> list[CapacityLevel]:
        return [level for level in self._levels() if level.counted]

    def _capacity(self, target: float) -> Capacity:
        estimate = self._crossings[target] = self._cross(target)
        passing, failing = self._decided(target)
        limit = self._exhausted.get(target, self._budget_spent)
        if estimate is not None:
            precise = self._precise(estimate)
            return Capacity(
                target,
                estimate.rate_rps,
                max((rate for rate in passing if rate <= estimate.low_rps), default=0.0),
                min(
                    estimate.high_rps,
                    max((rate for rate in failing if rate > estimate.rate_rps), default=math.inf),
                ),
                precise,
                SearchOutcome.FOUND,
                estimate.slope,
                estimate.dispersion,
                estimate.runs,
                None if precise or limit is None else limit.setting,
            )
        high_rps = min(failing, default=math.inf)
        low_rps = max((rate for rate in passing if rate < high_rps), default=0.0)
        outcome = SearchOutcome.NEVER_MET if failing else SearchOutcome.NEVER_MISSED
        limited_by = None
        if self._budget_spent or bool(passing) == bool(failing):
            outcome = SearchOutcome.UNDECIDED
            limited_by = "requests" if limit is None else limit.setting
        capacity_rps = 0.0 if outcome is SearchOutcome.NEVER_MET else None
        return Capacity(
            target, capacity_rps, low_rps, high_rps, False, outcome, limited_by=limited_by
        )

    def _passed(self) -> str:
        """The highest rate that passed, for every target."""
        parts = []
        for target in sorted(self._options.targets):
            passing, failing = self._decided(target)
            top = min(failing, default=math.inf)
            rate = max((rate for rate in passing if rate < top), default=None)
            if rate is None:
                parts.append(f"no rate passed {target:g}")
            else:
                parts.append(f"the highest rate that passed {target:g} is {rate:g} req/s")
            flattered = [lv for lv in self._usable() if lv.passes(target) is None]
            if rate is None and flattered:
                level = flattered[-1]
                parts[-1] += (
                    f", but at {level.rate_rps:g} req/s {level.attainment:.1%} were in SLO, in "
                    "runs too short to pass"
                )
        return "; ".join(parts)

    def _decided(self, target: float) -> tuple[list[float], list[float]]:
        """Rates that pass and rates that fail; rates that are undecided are in neither."""
        levels = [(level.rate_rps, level.passes(target)) for level in self._usable()]
        return [r for r, ok in levels if ok], [r for r, ok in levels if ok is False]

    def _cross(self, target: float) -> Crossing | None:
        """By the long runs alone, as soon as they suffice."""
        levels = self._usable()
        quantile = self._options.quantile
        estimate = crossing(levels, target, quantile)
        if estimate is None:
            return None
        long = []
        for level in levels:
            needed = self._needed(level.rate_rps, estimate) // 2
            runs = tuple(run for run in level.samples if run.requests >= needed)
            if any(run.valid for run in runs):
                long.append(replace(level, samples=runs))
        return crossing(long, target, quantile) or estimate

    def _precise(self, estimate: Crossing) -> bool:
        return (
            self._width(estimate) <= 1
            and estimate.runs >= _LEAST_RUNS
            and estimate.worth >= _LEAST_WORTH
        )

    def _width(self, estimate: Crossing) -> float:
        """Width of the interval over the requested width."""
        return min(
            estimate.relative_half_width / self._options.tolerance,
            estimate.attainment_half_width / _RESOLUTION,
        )

    def _lacking(self, estimate: Crossing) -> float:
        """How far from precise; more is worse."""
        return max(
            self._width(estimate),
            math.sqrt(_LEAST_WORTH / max(estimate.worth, 0.01)),
            math.sqrt(_LEAST_RUNS / max(estimate.runs, 1)),
        )

    # What is run.

    def _needed(self, rate_rps: float, estimate: Crossing) -> int:
        """Requests in a run near a crossing, so that it shows the long run and not its own
        beginning.
        """

        def lasting(horizons: float) -> int:
            window_s = horizons * max(self._horizon_s, self._stay_s)
            return requests_in(window_s, rate_rps, self._horizon_s)

        longest = max(run.requests for level in self._known.values() for run in level.samples)
        apart = max(_CORRELATED, _LEAST_MISSES / (1 - estimate.target))
        needed = max(
            lasting(self._options.most_horizons),
            min(apart * estimate.dispersion, _LENGTHEN * longest),
        )
        whole = self._options.shares_of or self._budget(rate_rps)
        needed = min(needed, whole.longest_run(rate_rps))
        return max(self._options.requests, math.ceil(max(needed, lasting(_LEAST_HORIZONS))))

    def _bracketing_limit(self, rate_rps: float) -> float:
        """Most requests in a run that only brackets: a share of the budget."""
        budget, least = self._options.shares_of or self._budget(rate_rps), self._options.requests
        limit = float(_LONGER**2 * least)
        if budget.requests is not None:
            limit = min(limit, max(budget.requests / LEAST_SHARES, 2 * _LONGER * least))
        if budget.time_s is not None:
            settle_s = SETTLED_HORIZONS * max(self._horizon_s, self._stay_s)
            long_s = max(budget.time_s / LEAST_SHARES, _SETTLED_TIMES * settle_s)
            limit = min(limit, long_s * rate_rps)
        return limit

    def _budget(self, rate_rps: float) -> Budget:
        """The budget, by what is known of the SLO's horizon, for a run at `rate_rps`.

        Rates far above the capacity do not extend it.
        """
        _, missed = self._decided(min(self._options.targets))
        rate_rps = min((rate_rps, *missed))
        horizon_s = self._horizon_s
        if self._options.budget.time_s is not None:
            horizon_s = max(horizon_s / _HORIZONS_OF_AN_ANSWER, self._answer_s)
        return self._options.budget.extended(horizon_s, rate_rps)

    def _run(self, rate_rps: float, requests: int, target: float | None = None) -> LevelSample:
        """A run; `target` is the one that it refines, None where it serves all.

        Where the time that is left does not suffice for it, it is as long as that allows.
        """
        others = [
            spent_on_target for other, spent_on_target in self._own.items() if other != target
        ]
        spent = self._spent - sum(target_requests for target_requests, _ in others)
        wall_s = self._wall_s - sum(target_s for _, target_s in others)
        limit = budget_spent(
            self._budget(rate_rps), spent, wall_s, requests, self._levels(), rate_rps
        )
        if limit is not None:
            if limit.fitting_requests < _LEAST_LAST * self._options.requests:
                raise _BudgetSpentError(limit)
            requests = limit.fitting_requests
        sample = self._runner.run(rate_rps, self._options.first_seed + self._runs, requests)
        self._runs += 1
        if target is not None:
            target_requests, target_s = self._own[target]
            self._own[target] = target_requests + sample.requests, target_s + sample.wall_s
        self.add(rate_rps, sample)
        runs = [run for level in self._levels() for run in level.samples]
        check_refused(runs, self._options.targets)
        self._note_late(self._known[rate_rps])
        if self._watch is not None:
            crossings = tuple(self._crossings[target] for target in self._options.targets)
            self._watch(SearchProgress(sample, self._spent, self._wall_s, crossings))
        return sample

    def add(self, rate_rps: float, sample: LevelSample) -> None:
        """Count a run at a rate."""
        self._spent += sample.requests
        self._wall_s += sample.wall_s
        before = self._known[rate_rps].samples if rate_rps in self._known else ()
        self._known[rate_rps] = CapacityLevel(
            rate_rps, (*before, sample), self._options.most_growth
        )
        self._correct()
        self._horizon_s = max(self._horizon_s, sample.horizon_s)
        self._answer_s = min(self._answer_s, sample.stay_s)
        if sample.attainment >= min(self._options.targets):  # overloaded, requests stay ever longer
            self._stay_s = max(self._stay_s, sample.stay_s)

    def _correct(self) -> None:
        """Give each level the coefficient of its control variate."""
        sums = {rate: level.control_sums for rate, level in self._known.items()}
        for rate, level in self._known.items():
            near = [
                level_sums
                for other, level_sums in sums.items()
                if max(rate, other) <= _ALIKE * min(rate, other)
            ]
            cross, squares = (math.fsum(column) for column in zip(*near, strict=True))
            beta = max(0.0, cross / squares) if squares else 0.0
            if beta != level.beta:
                self._known[rate] = replace(level, beta=beta)

    def _note_late(self, level: CapacityLevel) -> None:
        """Where the client is late again and again, no higher rate can be judged either."""
        if level.valid or len(level.samples) < _TRIES:
            return
        below = [lv.rate_rps for lv in self._usable() if lv.rate_rps < level.rate_rps]
        if below and level.rate_rps / below[-1] > WIDEST_BRACKET:
            limit = math.sqrt(below[-1] * level.rate_rps)
        else:
            limit = below[-1] if below else level.rate_rps / 2
        if limit < self._highest_rps:
            self._highest_rps, self._late_rps = limit, level.rate_rps

    def _try(self, rate_rps: float) -> None:
        """Short runs of a level until one is valid, then longer ones until it passes or fails."""
        rate_rps = three_digits(rate_rps)
        requests = self._options.requests
        for _ in range(_TRIES):  # the client may have been late by accident
            sample = self._run(rate_rps, requests)
            if sample.valid:
                break
        while (level := self._known[rate_rps]).counted and any(
            level.passes(target) is None for target in self._options.targets
        ):
            settled = sample.requests_to_settle
            if settled <= requests and 2 * requests > self._bracketing_limit(rate_rps):
                return  # too near the limit to tell in a short run
            requests = min(max(settled, 2 * requests), _LONGER * requests)
            sample = self._run(rate_rps, requests)

    # The two stages.

    def _begin(self, neighbours: Sequence[float]) -> None:
        if neighbours:
            self._step = 1.2
        for rate in dict.fromkeys(neighbours or (self._start_rps,)):
            if rate not in self._known:
                self._try(min(max(rate, self._options.low_rps), self._highest_rps))
        while self._widen():
            pass
        for target in sorted(self._options.targets):
            self._narrow(target)

    def _widen(self) -> bool:
        """Try a rate outside those tried, unless every target is bracketed or none may be."""
        levels = self._usable()
        options = self._options
        passing, failing = self._decided(max(options.targets))
        if not levels:
            rate = min(self._known) / 2
        elif not passing and (failing or levels[-1].rate_rps * self._step > self._highest_rps):
            rate = min(self._known) / self._step
        elif passing and passing[0] > min(failing, default=math.inf):  # one of them by chance
            rate = min(self._known) / WIDEST_BRACKET
        elif not self._decided(min(options.targets))[1]:
            rate = levels[-1].rate_rps * self._step
        else:
            return False
        self._step = min(2.0, self._step**2)
        low = max(options.low_rps, self._start_rps / FARTHEST)
        high = min(self._highest_rps, self._start_rps * FARTHEST)
        rate = three_digits(min(max(rate, low), high))
        if rate in self._known:
            return False
        self._try(rate)
        return True

    def _narrow(self, target: float) -> None:
        """Bisect until the rates that pass and fail are near each other."""
        while True:
            passing, failing = self._decided(target)
            passing = [rate for rate in passing if rate < min(failing, default=0)]
            widest = self._options.widest_bracket
            if not failing or not passing or failing[0] <= passing[-1] * widest:
                return
            middle = three_digits(math.sqrt(failing[0] * passing[-1]))
            if middle in self._known:
                return
            self._try(middle)

    def _refine(self) -> str:
        options = self._options
        while True:
            self._crossings = {target: self._cross(target) for target in options.targets}
            crossings = [estimate for estimate in self._crossings.values() if estimate is not None]
            if len(crossings) < len(options.targets) and self._widen():
                continue
            crossings = [
                estimate for estimate in crossings if estimate.target not in self._exhausted
            ]
            rough = [estimate for estimate in crossings if not self._precise(estimate)]
            if rough:
                nearest = min(rough, key=self._lacking)
                self._refine_at(self._next_rate(nearest), nearest)
            elif (unsure := self._unconfirmed(crossings)) is not None:
                self._confirmed[unsure.target] += 1
                self._refine_at(_three_digits_down(unsure.low_rps), unsure)
            else:
                break
        if None in self._crossings.values():
            return self._unbracketed()
        if self._exhausted:
            return "; ".join(
                f"{target:g}: {budget.left}" for target, budget in self._exhausted.items()
            )
        flat = any(estimate.relative_half_width > options.tolerance for estimate in crossings)
        also = f", or ±{_RESOLUTION:.1%} of attainment" if flat else ""
        return f"every interval is within ±{options.tolerance:.1%}{also}"

    def _refine_at(self, rate_rps: float, estimate: Crossing) -> None:
        """Long runs at a rate near a crossing."""
        requests = self._needed(rate_rps, estimate)
        if self._foresee is not None:
            first = self._options.first_seed + self._runs
            self._foresee(rate_rps, range(first, first + self._options.seeds), requests)
        try:
            for _ in range(self._options.seeds):
                self._run(rate_rps, requests, estimate.target)
        except _BudgetSpentError as spent:
            self._exhausted[estimate.target] = spent.budget

    def _unconfirmed(self, crossings: Sequence[Crossing]) -> Crossing | None:
        """A crossing of which no rate close to the interval's low end was run and carried.

        The run for it moves the end, after which a rate twice as far away will do.
        """
        for estimate in crossings:
            confirmed = self._confirmed[estimate.target]
            apart = self._options.tolerance / (1 if confirmed else 2)
            lowest = estimate.low_rps * (1 - apart)
            carried = self._decided(estimate.target)[0]
            if confirmed < _CONFIRMATIONS and not any(
                lowest <= rate <= estimate.low_rps for rate in carried
            ):
                return estimate
        return None

    def _unbracketed(self) -> str:
        levels = self._usable()
        low, high = levels[0].rate_rps, levels[-1].rate_rps
        parts = []
        for target in sorted(t for t, estimate in self._crossings.items() if estimate is None):
            passing, failing = self._decided(target)
            if not passing and not failing:
                parts.append(
                    f"runs from {low:g} to {high:g} req/s are too short to decide on {target:g}; "
                    "give more requests for a run"
                )
            elif passing:
                parts.append(f"no rate up to {high:g} req/s falls below {target:g}")
                if self._late_rps is not None:
                    parts.append(f"at {self._late_rps:g} req/s the client is late")
            else:
                parts.append(f"even {low:g} req/s falls below {target:g}")
        return "; ".join(parts)

    def _next_rate(self, estimate: Crossing) -> float:
        """A rate close to the estimate, on the side with fewer runs.

        It is farther on the side that misses the target, where a request has more information.
        While there are few runs, the middle of the interval replaces the estimate, which may lie at
        its end.
        """
        levels = self._usable()
        rough = estimate.relative_half_width > _ROUGH * self._options.tolerance
        centre = math.sqrt(estimate.low_rps * estimate.high_rps) if rough else estimate.rate_rps
        down, up = (
            min(max(logits / estimate.slope, _NARROWEST_SIDE), _WIDEST_SIDE)
            for logits in (_BELOW_LOGITS, _ABOVE_LOGITS)
        )
        below = above = 0
        for level in levels:
            away = math.log(level.rate_rps / centre)
            if -2 * down <= away <= 0:
                below += level.counted
            elif 0 < away <= 2 * up:
                above += level.counted
        side = -down if below <= above else up
        rate = centre * math.exp(side)
        growing = min((lv.rate_rps for lv in levels if lv.growing), default=math.inf)
        if rate >= growing > centre:
            rate = math.sqrt(centre * growing)
        rate = min(max(rate, self._options.low_rps), self._highest_rps)
        rates = [level.rate_rps for level in levels]
        close = [
            tried_rps for tried_rps in rates if abs(math.log(tried_rps / rate)) < abs(side) / 3
        ]
        return min(close, key=lambda tried_rps: abs(tried_rps - rate), default=three_digits(rate))


def throughput_of_bursts(runner: LevelRunner, *, first_seed: int) -> float:
    """Requests per second that a server completes when more wait than it can serve.

    Bursts grow, each offered within about a second, until the throughput grows no more or one lasts
    twice `_BURST_S`: a first burst of long answers lasts that long, but is too small to fill the
    server. A server takes 15 to 50 s for it; one that completes less than two requests a second is
    known after the first burst.
    """
    requests, best = _FIRST_BURST, 0.0
    for place in range(_MOST_BURSTS):
        sample = runner.run(float(requests), first_seed + place, requests)
        throughput = sample.requests / max(sample.wall_s, 1e-9)
        grown = throughput / best if best else math.inf
        best = max(best, throughput)
        if sample.wall_s >= 2 * _BURST_S or grown < _GROWN:
            break
        requests = math.ceil(min(4 * requests, max(2 * requests, _BURST_S * throughput * _GROWN)))
    return best


def three_digits(rate_rps: float) -> float:
    """The rate rounded to three significant digits."""
    return float(f"{rate_rps:.3g}")


def _three_digits_down(rate_rps: float) -> float:
    """The highest rate with three significant digits that is not above `rate_rps`."""
    rate = three_digits(rate_rps)
    step = 10.0 ** (math.floor(math.log10(rate_rps)) - 2)
    return rate if rate <= rate_rps else three_digits(rate - step)
