"""Search for the cheapest offers that carry a load.

The smallest number of instances of an offer is searched that certainly carries the rate: the 95 %
interval of attainment lies above the target and the backlog does not grow. The search goes in
steps, each longer than the last: hardly any load; a short look at more and more instances; longer
runs of the parameters that have a chance by their look, the best first; long runs on seeds that the
search did not use. Each step may raise what the offer costs at least, and the next step is always
one of the offer that costs least by what is known. Plans are therefore found in the order of their
cost, and long runs are made only of what may be one of them. A capacity search with an interval
then gives the spare capacity of each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heapreplace, nsmallest
from itertools import islice
from pathlib import Path
from typing import TypeVar

from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.experiments.execution.cell_bands import share_that_keeps
from ...harness.experiments.execution.cell_specs import CellSpec, source
from ...harness.experiments.execution.workers import WorkerPool
from ...harness.results.request_fold import RequestSample
from ...harness.results.run_checkpoint import Checkpoint
from ...harness.results.run_folder import Row
from ...harness.results.stationarity import requests_in
from ...workloads.errors import SloBenchError
from ..capacity.capacity_cells import CellRunner, Simulator
from ..capacity.capacity_search import find_capacity
from ..capacity.search_options import LEAST_SHARES, Budget, Capacity, SearchOptions
from .deployment_levels import (
    CONFIRM,
    LIGHT,
    LOOK,
    SEARCH,
    DeploymentLevel,
    Levels,
    RunLength,
    RunnerOf,
    Say,
    Verdict,
    simulated_runner,
)
from .offers import Deployment, Offer, offers
from .prices import PriceList, default_prices

_Result = TypeVar("_Result")
LEVELS = "plan.jsonl"  # in the folder of a plan: the levels that were simulated
_FRESH_SEEDS = 1_000_000  # from the first seed on: those of the confirmation
_LIGHT_SHARE = 0.05
_STEP = 1.1  # times as many instances, where a number does not carry
_MOST_AT_ONCE = 4  # offers of which a pool begins the next step, needed or not
_TOLERANCE = 0.05
_BRACKET = 1.1
_CAPACITY_REQUESTS, _CAPACITY_RUNS = 40_000, 5  # whichever is more, beside the confirming runs


@dataclass(frozen=True)
class TargetLoad:
    """The load to carry. `headroom` is on top, as a share of the rate."""

    rate_rps: float
    target: float = 0.9
    headroom: float = 0.0
    most_gpus: int = 64
    plans: int = 5

    def __post_init__(self) -> None:
        if not 0 < self.rate_rps < math.inf:
            raise SloBenchError(f"rate must be positive but is {self.rate_rps:g}")
        if not 0 < self.target < 1:
            raise SloBenchError(f"target must lie between 0 and 1 but is {self.target:g}")
        if not 0 <= self.headroom <= 10:
            raise SloBenchError(f"headroom must lie in 0..10 but is {self.headroom:g}")
        for name, value in (("gpus", self.most_gpus), ("plans", self.plans)):
            if value < 1:
                raise SloBenchError(f"{name} must be at least 1 but is {value}")

    @property
    def whole_rps(self) -> float:
        """The rate with headroom, in req/s."""
        return self.rate_rps * (1 + self.headroom)


@dataclass(frozen=True)
class PlanFigures:
    """Figures of one long run at the rate; power is None where that of the GPU was not measured.

    `keeps` is the probability that the real server keeps the target; None without residuals.
    """

    ttft_p99_s: float | None
    tpot_p99_s: float | None
    gpu_power_mean_w: float | None  # of all GPUs
    joules_per_output_token: float | None
    keeps: float | None


@dataclass(frozen=True)
class SizedOffer(Deployment):
    """An offer with a number of instances, and the attainment at the wanted rate.

    `verdict` is that of the long runs on fresh seeds which confirmed it.
    """

    verdict: Verdict
    capacity: Capacity | None = None
    fitted: bool = True  # step times, to measurements
    figures: PlanFigures | None = None


@dataclass(frozen=True)
class DeploymentPlan:
    """The cheapest first, with the cheapest on fitted step times; `tried` of `offers` were
    simulated, the others could only cost more.

    `absent` says of each system without a plan why it has none. `refuted` are those that carried
    the load in the search and not in the long runs; none of them is a plan.
    """

    load: TargetLoad
    plans: tuple[SizedOffer, ...]
    tried: int
    offers: int
    prices: PriceList
    kinds: tuple[str, ...] = ()  # GPUs that were asked for; none: all with a price
    absent: Mapping[str, str] = field(default_factory=dict)
    refuted: tuple[SizedOffer, ...] = ()


@dataclass(frozen=True)
class PlanOptions:
    """How to search for plans.

    Attributes:
        kinds: GPUs to choose from; by default all with a price.
        prices: what GPUs cost; by default the catalogue's prices.
        folder: where simulated levels are kept.
        resume: use the levels in `folder`.
        say: called with the name of each level before it is simulated.
        count: called with how far the search is, and an estimate of the whole.
        pool: processes that simulate, several levels at once, with the same results.
        runner_of: makes the runner of a cell, without a pool; by default the simulator.
    """

    kinds: tuple[str, ...] = ()
    prices: PriceList = field(default_factory=default_prices)
    folder: Path | None = None
    resume: bool = False
    say: Say = lambda line: None
    count: Callable[[int, int], None] = lambda done, whole: None
    pool: WorkerPool | None = None
    runner_of: RunnerOf = simulated_runner

    def __post_init__(self) -> None:
        if self.pool is not None and self.runner_of is not simulated_runner:
            raise SloBenchError("a pool simulates: leave it out with a runner_of of your own")


def plan_cheapest(
    experiment: ExperimentSchema, load: TargetLoad, options: PlanOptions | None = None
) -> DeploymentPlan:
    """Search for the cheapest ways to carry a load within its SLOs, by simulation.

    Args:
        experiment: model, workload, SLO, systems and their parameters; GPUs and their number are
            searched.
        load: the rate, the target, and the number of plans.
        options: how to search.

    Raises:
        SloBenchError: no offer carries the load, or something cannot be read.
    """
    return PlanSearch(experiment, load, options or PlanOptions()).run()


@dataclass(frozen=True)
class _Step:
    """Levels whose verdicts an offer needs next, and the instances that it takes at least."""

    instances: int
    levels: Sequence[DeploymentLevel]


_Steps = Generator[_Step, Sequence[Verdict], _Result]


@dataclass
class _Candidate:
    """An offer on its way to a plan, with the fewest instances that it may need."""

    place: int  # among offers
    offer: Offer
    steps: _Steps[SizedOffer | None]
    instances: int

    @cached_property
    def step(self) -> _Step:
        """The next one; of no levels where there is none."""
        return next(self.steps, _Step(self.instances, ()))

    def go_on(self, verdicts: Sequence[Verdict]) -> None:
        """Take the verdicts of the step; StopIteration has the plan, or None."""
        self.step = self.steps.send(verdicts)
        self.instances = self.step.instances

    @property
    def usd_per_hour(self) -> float:
        """What its plan costs at least."""
        return self.instances * self.offer.usd_per_hour

    def __lt__(self, other: _Candidate) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[float, int, int]:
        return self.usd_per_hour, self.instances * self.offer.gpus, self.place


@dataclass
class PlanSearch:
    """A search; its fields are the arguments of `plan_cheapest`."""

    experiment: ExperimentSchema
    load: TargetLoad
    options: PlanOptions

    def __post_init__(self) -> None:
        experiment, load, folder = self.experiment, self.load, self.options.folder
        open_yet = {"gpu": (), "instances": (), "rates": None}
        text = experiment.model_copy(update=open_yet).model_dump_json()
        settings = f"{load.whole_rps:g} {load.target:g} {text}"
        checkpoint = None if folder is None else Checkpoint(folder / LEVELS, settings)
        if checkpoint is not None and checkpoint.path.exists() and not self.options.resume:
            raise SloBenchError(
                f"{folder} holds a plan; continue it with --resume, or choose another --out"
            )
        options = self.options
        self._levels = Levels(checkpoint, options.runner_of, options.pool, options.say)
        self._refuted: list[SizedOffer] = []
        self._tried: set[str] = set()  # names of offers

    def run(self) -> DeploymentPlan:
        """The cheapest plans on these GPUs; on all with a price where none is named."""
        load, kinds, prices = self.load, self.options.kinds, self.options.prices
        every, refused = offers(self.experiment, load.whole_rps, kinds, prices)
        self._check_arrivals(every[0])
        candidates = [
            _Candidate(place, offer, self._steps(offer), offer.least_instances)
            for place, offer in enumerate(every)
            if offer.least_instances * offer.gpus <= load.most_gpus
        ]
        plans = list(islice(self._cheapest(candidates), load.plans))
        absent = {name: str(error) for name, error in refused.items()}
        for candidate in sorted(candidates):
            usd = candidate.usd_per_hour
            absent.setdefault(candidate.offer.system, f"it costs at least {usd:.2f} USD per hour")
        if plans and not any(self._has_fit(plan.offer) for plan in plans):
            fitted = [candidate for candidate in candidates if self._has_fit(candidate.offer)]
            plans += islice(self._cheapest(fitted), 1)
        if not plans:
            least = min(offer.least_instances * offer.gpus for offer in every)
            way_on = "allow more (--max-gpus), a lower rate, or a longer SLO if one alone misses it"
            if least > load.most_gpus:
                way_on = f"it takes at least {least:,}: allow more (--max-gpus), or a lower rate"
            raise SloBenchError(
                f"no offer of up to {load.most_gpus} GPUs carries {load.whole_rps:g} req/s with "
                f"{load.target:g} of requests in SLO; {way_on}"
            )
        self._levels.drop_begun()
        ranked = sorted(
            self._with_capacities(plans),
            key=lambda plan: (plan.usd_per_hour, plan.gpus, -_capacity(plan)),
        )
        for name in self.experiment.systems:
            absent.setdefault(name, "no offer carries the load within its SLO")
        for plan in ranked:
            absent.pop(plan.offer.system, None)
        refuted = tuple(self._refuted)
        return DeploymentPlan(
            load, tuple(ranked), len(self._tried), len(every), prices, kinds, absent, refuted
        )

    def _cheapest(self, candidates: list[_Candidate]) -> Iterator[SizedOffer]:
        """Plans in the order of their cost; `candidates` becomes a heap of those that remain."""
        heapify(candidates)
        plans = 0
        while candidates:
            self.options.count(plans, 2 * self.load.plans)
            if self.options.pool is not None:
                ahead = min(self.options.pool.at_once, _MOST_AT_ONCE)
                for candidate in nsmallest(ahead, candidates):
                    for level in candidate.step.levels:
                        self._levels.begin(level)
            candidate = candidates[0]
            self._tried.add(candidate.offer.name)
            try:
                candidate.go_on([self._levels.verdict(level) for level in candidate.step.levels])
                heapreplace(candidates, candidate)
            except StopIteration as end:
                heappop(candidates)
                if end.value is not None:
                    plans += 1
                    yield end.value

    def _has_fit(self, offer: Offer) -> bool:
        """Whether the step times of an offer are fitted."""
        shape = next(offer.shapes(offer.least_instances))
        return shape.spec(self.experiment, self.load.whole_rps).deployment.step_time.fitted

    def _check_arrivals(self, offer: Offer) -> None:
        spec = next(offer.shapes(offer.least_instances)).spec(self.experiment, 1.0)
        if source(spec.workload).has_arrivals:
            raise SloBenchError(
                f"{spec.workload.workload} has arrivals of its own; choose an arrival process for "
                "another rate: --arrivals poisson"
            )

    def _steps(self, offer: Offer) -> _Steps[SizedOffer | None]:
        """The fewest instances that carry the load, confirmed.

        None where 5 % load, almost without waiting, misses the target, so that more instances do
        not help, or no number that is allowed carries it.
        """
        least, rate_rps = offer.least_instances, self.load.whole_rps
        light_rps = min(rate_rps, _LIGHT_SHARE * offer.alone_rps * least)
        light = self._levels_of(offer.shapes(least), light_rps, LIGHT)
        if (yield from _first_carrying(light, least)) is None:
            return None
        while count := (yield from self._fewest(offer, least)):
            refuted: list[Deployment] = []
            while deployment := (yield from self._carrying(offer, count, count, refuted)):
                [(_, level)] = self._levels_of([deployment], rate_rps, CONFIRM)
                [verdict] = yield _Step(count, [level])
                plan = SizedOffer(**vars(deployment), verdict=verdict)
                if verdict.carries:
                    return plan
                self._refuted.append(plan)
                refuted.append(deployment)
            least = count + 1
        return None

    def _fewest(self, offer: Offer, least: int) -> _Steps[int]:
        """The fewest instances, from `least` on, that carry the load; 0 if none do."""
        max_instances = self.load.most_gpus // offer.gpus
        failing, carrying, count = least - 1, 0, least
        while failing < max_instances and failing + 1 != carrying:
            count = min(max(count, failing + 1), max_instances)
            if (yield from self._carrying(offer, count, failing + 1)):
                carrying = count
            else:
                failing = count
            count = (failing + carrying) // 2 if carrying else math.floor(failing * _STEP)
        return carrying

    def _carrying(
        self, offer: Offer, count: int, least: int, refuted: Sequence[Deployment] = ()
    ) -> _Steps[Deployment | None]:
        """Of `count` instances, those that carry the load in a search and are not `refuted`: the
        best of a short look first, without those that certainly miss the target in it.

        None looks better than a first one that misses nothing, so that it is searched first.
        """
        shapes = [shape for shape in offer.shapes(count) if shape not in refuted]
        levels = list(self._levels_of(shapes, self.load.whole_rps, SEARCH))
        short = [replace(level, length=LOOK) for _, level in levels]
        looks = [*(yield _Step(least, short[:1]))]
        if looks and looks[0].attainment == 1:
            carrying = yield from _first_carrying(levels[:1], least)
            if carrying is not None:
                return carrying
        looks += yield _Step(least, short[1:])
        ranked = sorted(zip(looks, levels, strict=True), key=lambda pair: -pair[0].attainment)
        chances = [level for look, level in ranked if look.high >= self.load.target]
        return (yield from _first_carrying(chances, least))

    def fewest_for(self, plan: SizedOffer, rates_rps: Sequence[float]) -> tuple[int, ...]:
        """The fewest instances of a plan that carry each rate, the headroom included; 0 for 0.

        None is above that of the plan. Every number is confirmed at the highest of its rates.
        """
        ordered = sorted({rate for rate in rates_rps if rate > 0}, reverse=True)
        needed = {0.0: 0}
        first = 0  # the rates before it need more instances
        for fewer in range(plan.instances - 1, plan.offer.minimum - 1, -1):
            carried = bisect_left(
                ordered[first:], True, key=lambda rate: self._holds(plan, fewer, rate, SEARCH)
            )
            carried += first
            while carried < len(ordered) and not self._holds(
                plan, fewer, ordered[carried], CONFIRM
            ):
                carried += 1
            needed |= dict.fromkeys(ordered[first:carried], fewer + 1)
            first = carried
            if first == len(ordered):
                break
        needed |= dict.fromkeys(ordered[first:], plan.offer.minimum)
        return tuple(needed[rate] for rate in rates_rps)

    def _holds(self, plan: SizedOffer, instances: int, rate_rps: float, length: RunLength) -> bool:
        """Whether that many instances of a plan carry a rate, before its headroom."""
        whole_rps = rate_rps * (1 + self.load.headroom)
        levels = self._levels_of(plan.resized(instances), whole_rps, length)
        return any(self._levels.verdict(level).carries for _, level in levels)

    def _levels_of(
        self, shapes: Iterable[Deployment], rate_rps: float, length: RunLength
    ) -> Iterator[tuple[Deployment, DeploymentLevel]]:
        """The levels of these deployments."""
        seed = self.experiment.seed + (_FRESH_SEEDS if length is CONFIRM else 0)
        for deployment in shapes:
            try:
                spec = deployment.spec(self.experiment, rate_rps)
            except SloBenchError:  # the system cannot have that number of instances
                continue
            target = self.load.target
            yield deployment, DeploymentLevel(deployment.name, spec, rate_rps, target, seed, length)

    def _with_capacities(self, plans: Sequence[SizedOffer]) -> Iterator[SizedOffer]:
        """The plans with their capacity; a pool searches several at once."""
        rate_rps, pool = self.load.whole_rps, self.options.pool
        target, seed = self.load.target, self.experiment.seed
        arguments = [
            (sized, sized.spec(self.experiment, rate_rps), rate_rps, target, seed)
            for sized in plans
        ]
        begun = [pool.begin(with_capacity, *call) for call in arguments] if pool else ()
        for place, sized in enumerate(plans):
            self.options.count(len(plans) + place, 2 * len(plans))
            self.options.say(f"capacity of {sized.instances} × {sized.offer.name}")
            call = (*arguments[place], self.options.runner_of)
            yield begun[place].result() if begun else with_capacity(*call)


def _first_carrying(
    levels: Iterable[tuple[Deployment, DeploymentLevel]], least: int
) -> _Steps[Deployment | None]:
    """The first of these that carries its load; each is simulated when none before it does."""
    for deployment, level in levels:
        [verdict] = yield _Step(least, [level])
        if verdict.carries:
            return deployment
    return None


def with_capacity(
    sized: SizedOffer,
    spec: CellSpec,
    rate_rps: float,
    target: float,
    first_seed: int,
    runner_of: RunnerOf = simulated_runner,
) -> SizedOffer:
    """The offer with its capacity, whether its step times are fitted, and figures at its rate;
    these are simulated ones, and None with another runner.

    The runs that confirmed the offer are part of the search. Its runs are twice as long as those
    had to be at least, since requests stay longer near the capacity.
    """
    confirmed = sized.verdict
    requests = SEARCH.requests
    for run in confirmed.samples:
        lasting_s = 2 * CONFIRM.horizons * max(run.horizon_s, run.stay_s)
        requests = max(requests, requests_in(lasting_s, rate_rps, run.horizon_s))
    options = SearchOptions(
        targets=(target,),
        tolerance=_TOLERANCE,
        requests=requests,
        seeds=1,
        first_seed=first_seed,
        budget=Budget(confirmed.requests + max(_CAPACITY_REQUESTS, _CAPACITY_RUNS * requests)),
        shares_of=Budget(2 * LEAST_SHARES * requests),
        widest_bracket=_BRACKET,
    )
    at_most_rps = sized.instances * sized.offer.alone_rps
    is_simulated = runner_of is simulated_runner
    runs: list[tuple[float, RequestSample]] = []
    simulated = CellRunner(spec, "plan", Simulator(samples=runs), None)
    [capacity] = find_capacity(
        simulated if is_simulated else runner_of(spec),
        start_rps=rate_rps,
        options=options,
        neighbours=(rate_rps, max(at_most_rps, rate_rps * _BRACKET)),
        earlier_runs=confirmed.samples,
    ).capacities
    if capacity.capacity_rps is not None:
        low_rps = max(capacity.low_rps, min(rate_rps, capacity.capacity_rps))
        capacity = replace(capacity, low_rps=low_rps)
    fitted = spec.deployment.step_time.fitted
    figures = _figures(spec, target, confirmed, runs) if is_simulated else None
    return replace(sized, capacity=capacity, fitted=fitted, figures=figures)


def _figures(
    spec: CellSpec, target: float, confirmed: Verdict, runs: list[tuple[float, RequestSample]]
) -> PlanFigures:
    """Those of the first confirming run; with it, `runs` at other rates and short further ones tell
    how probable the target is.
    """
    rate_rps = spec.rate_rps or 0.0
    loaded, rows = [(run_rps / rate_rps, sample) for run_rps, sample in runs], list[Row]()
    runner = simulated_runner(spec, Simulator(samples=runs), rows)

    def at_load(factor: float, requests: int = SEARCH.requests) -> RequestSample:
        runner.run(factor * rate_rps, spec.seed + _FRESH_SEEDS, requests)
        return runs[-1][1]

    first_requests = confirmed.samples[0].requests
    sample, row = confirmed.first_run or (at_load(1.0, first_requests), rows[-1])
    columns = ("ttft_p99_s", "tpot_p99_s", "gpu_power_mean_w", "joules_per_output_token")
    figures = {
        column: value if isinstance(value := row[column], float) and math.isfinite(value) else None
        for column in columns
    }
    keeps = share_that_keeps(spec, sample, row, target, at_load, loaded)
    return PlanFigures(**figures, keeps=keeps)


def _capacity(sized: SizedOffer) -> float:
    if sized.capacity is None or sized.capacity.capacity_rps is None:
        return math.inf
    return sized.capacity.capacity_rps
