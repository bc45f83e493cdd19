"""Search for the cheapest offers that carry a load.

Offers are tried in the order of a lower bound of their cost. For each, the smallest number of
instances is searched that certainly carries the rate: the 95 % interval of attainment lies above
the target and the backlog does not grow. A short run of each of its parameters tells which have a
chance and in which order they are tried. Long runs on seeds that the search did not use confirm
it; if they do not, the next parameters or one more instance are tried. Once enough offers are
found, those that can only cost more are skipped. A capacity search with an interval then gives the
spare capacity of each result.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from ...harness.core.records.request_records import Result
from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.experiments.execution.cell_bands import share_that_keeps
from ...harness.experiments.execution.cell_specs import CellSpec, source
from ...harness.experiments.execution.cells import (
    predicted_output_tokens,
    simulated,
    simulated_figures,
    workload_of,
)
from ...harness.experiments.execution.workers import WorkerPool
from ...harness.results.run_checkpoint import Checkpoint
from ...harness.results.run_folder import Row
from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from ..capacity.capacity_options import SIMULATED_BUDGET_HORIZONS
from ..capacity.capacity_search import find_capacity
from ..capacity.search_options import Budget, Capacity, SearchOptions
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

LEVELS = "plan.jsonl"  # in the folder of a plan: the levels that were simulated
_FRESH_SEEDS = 1_000_000  # from the first seed on: those of the confirmation
_LIGHT_SHARE = 0.05
_LIKELY_SHARE = 0.6  # of the estimated capacity, which knows no SLO
_STEP = 1.3
_MOST_AHEAD = 3  # offers that a pool begins before it is known that they are tried
_TOLERANCE = 0.05
_CAPACITY_REQUESTS = 60_000


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
        self._ahead: Sequence[Offer] = ()  # the next to be tried, in their order
        self._found: list[SizedOffer] = []
        self._refuted: list[SizedOffer] = []
        self._tried: set[str] = set()  # names of offers
        self._most_plans = self.load.plans

    def run(self) -> DeploymentPlan:
        """The cheapest plans on these GPUs; on all with a price where none is named."""
        load, kinds, prices = self.load, self.options.kinds, self.options.prices
        every, refused = offers(self.experiment, load.whole_rps, kinds, prices)
        self._check_arrivals(every[0])
        absent = {name: str(error) for name, error in refused.items()}
        self._try_offers(every, absent)
        if self._found and not any(self._has_fit(plan.offer) for plan in self._found):
            estimated, self._found, self._most_plans = self._found, [], 1
            self._try_offers([offer for offer in every if self._has_fit(offer)], absent)
            self._found = estimated + self._found
        self._ahead = ()
        if not self._found:
            raise SloBenchError(
                f"no offer of up to {load.most_gpus} GPUs carries {load.whole_rps:g} req/s "
                f"with {load.target:.0%} of requests in SLO; allow more (--max-gpus), or a lower "
                "rate: even alone a request may be too slow for the SLO on these GPUs"
            )
        self._levels.drop_begun()
        plans = self._with_capacities()
        ranked = sorted(plans, key=lambda plan: (plan.usd_per_hour, plan.gpus, -_capacity(plan)))
        for name in self.experiment.systems:
            absent.setdefault(
                name, "no offer that could be as cheap carries the load within its SLO"
            )
        for plan in ranked:
            absent.pop(plan.offer.system, None)
        refuted = tuple(self._refuted)
        return DeploymentPlan(
            load, tuple(ranked), len(self._tried), len(every), prices, kinds, absent, refuted
        )

    def _try_offers(self, every: Sequence[Offer], absent: dict[str, str]) -> None:
        """Keep the cheapest plans of these offers, and note why systems have none."""
        for place, offer in enumerate(every):
            least_usd = offer.least_instances * offer.usd_per_hour
            if least_usd >= self._limit_usd:
                absent.setdefault(offer.system, f"it costs at least {least_usd:.2f} USD per hour")
                continue
            if offer.least_instances * offer.gpus > self.load.most_gpus:
                continue
            self._ahead = every[place + 1 :]
            self.options.count(len(self._tried), len(self._tried) + 2 + self._to_try())
            self._tried.add(offer.name)
            sized = self._smallest(offer) if self._quick_enough(offer) else None
            if sized is not None:
                absent[offer.system] = f"its plans cost {sized.usd_per_hour:.2f} USD per hour"
                self._found.append(sized)
                self._found.sort(
                    key=lambda plan: (plan.usd_per_hour, plan.gpus, -plan.verdict.attainment)
                )
                del self._found[self._most_plans :]

    def _has_fit(self, offer: Offer) -> bool:
        """Whether the step times of an offer are fitted."""
        shape = next(offer.shapes(offer.least_instances))
        return shape.spec(self.experiment, self.load.whole_rps).deployment.step_time.fitted

    @property
    def _limit_usd(self) -> float:
        """The price from which on an offer is not among the cheapest."""
        full = len(self._found) >= self._most_plans
        return self._found[-1].usd_per_hour if full else math.inf

    def _to_try(self) -> int:
        """About how many more offers will be tried after the next."""
        affordable = [
            offer
            for offer in self._ahead
            if offer.least_instances * offer.usd_per_hour < self._limit_usd
            and offer.least_instances * offer.gpus <= self.load.most_gpus
        ]
        lacking = self._most_plans - len(self._found)
        a_plan = max(2.0, len(self._tried) / max(1, len(self._found)))  # as many are tried for one
        return min(len(affordable), math.ceil(lacking * a_plan) if lacking else len(affordable))

    def _check_arrivals(self, offer: Offer) -> None:
        spec = next(offer.shapes(offer.least_instances)).spec(self.experiment, 1.0)
        if source(spec.workload).has_arrivals:
            raise SloBenchError(
                f"{spec.workload.workload} has arrivals of its own; choose an arrival process for "
                "another rate: --arrivals poisson"
            )

    def _quick_enough(self, offer: Offer) -> bool:
        """Whether the target is reached at 5 % load, almost without waiting; if not, more instances
        do not help.
        """
        return any(self._carrying(*_light(offer, self.load.whole_rps)))

    def _smallest(self, offer: Offer) -> SizedOffer | None:
        """The fewest instances that carry the load, confirmed, if they cost less than the results
        so far.
        """
        least = offer.least_instances
        while count := self._fewest(offer, least):
            for shape in self._carrying(offer.shapes(count), self.load.whole_rps, SEARCH):
                [(_, level)] = self._levels_of([shape], self.load.whole_rps, CONFIRM)
                confirmed = replace(shape, verdict=self._judged([level])[0])
                if confirmed.verdict.carries:
                    return confirmed
                self._refuted.append(confirmed)
            least = count + 1
        return None

    def _fewest(self, offer: Offer, least: int) -> int:
        """The fewest instances, from `least` on, that carry the load; 0 if none do."""
        max_instances = self._most(offer)
        failing, carrying = least - 1, 0
        count = _likely(offer, least)
        while failing + 1 <= max_instances and (not carrying or failing + 1 < carrying):
            count = min(count, max_instances)
            if any(self._carrying(offer.shapes(count), self.load.whole_rps, SEARCH)):
                carrying = count
            else:
                failing = count
                count = max(failing + 1, math.floor(failing * _STEP))
            if carrying:
                count = (failing + carrying) // 2
        return carrying

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
        return any(self._carrying(plan.resized(instances), whole_rps, length))

    def _carrying(
        self, shapes: Iterable[Deployment], rate_rps: float, length: RunLength
    ) -> Iterator[SizedOffer]:
        """Those that carry the rate, each simulated when it is asked for; in a search the best of a
        short look first, without those that certainly miss the target in it.
        """
        levels = list(self._levels_of(shapes, rate_rps, length))
        if length is SEARCH:
            looks = self._judged([replace(level, length=LOOK) for _, level in levels])
            ranked = sorted(zip(looks, levels, strict=True), key=lambda pair: -pair[0].attainment)
            levels = [level for look, level in ranked if look.high >= self.load.target]
        for deployment, level in levels:
            [verdict] = self._judged([level])
            if verdict.carries:
                yield SizedOffer(**vars(deployment), verdict=verdict)

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

    def _judged(self, levels: Sequence[DeploymentLevel]) -> list[Verdict]:
        """The verdicts on some levels; a pool begins them together, and then what may be next."""
        for level in levels:
            self._levels.begin(level)
        if self.options.pool is not None:
            self._look_ahead(min(self.options.pool.at_once - 1, _MOST_AHEAD))
        return [self._levels.verdict(level) for level in levels]

    def _look_ahead(self, offers: int) -> None:
        """Begin the first levels of the next offers, which are probably tried."""
        rate_rps = self.load.whole_rps
        cheap = (offer for offer in self._ahead if self._most(offer) >= offer.least_instances)
        for offer in islice(cheap, offers):
            for _, light in islice(self._levels_of(*_light(offer, rate_rps)), 1):
                self._levels.begin(light)
                if self._levels.carried(light):
                    count = min(_likely(offer, offer.least_instances), self._most(offer))
                    for _, level in self._levels_of(offer.shapes(count), rate_rps, LOOK):
                        self._levels.begin(level)

    def _most(self, offer: Offer) -> int:
        """The most instances that are allowed and not more expensive than the results so far."""
        affordable = math.ceil(min(self._limit_usd / offer.usd_per_hour, 1e9)) - 1
        return min(self.load.most_gpus // offer.gpus, affordable)

    def _with_capacities(self) -> tuple[SizedOffer, ...]:
        """The plans found, with their capacity; a pool searches several at once."""
        rate_rps, pool = self.load.whole_rps, self.options.pool
        target, seed = self.load.target, self.experiment.seed
        arguments = [
            (sized, sized.spec(self.experiment, rate_rps), rate_rps, target, seed)
            for sized in self._found
        ]
        self.options.count(len(self._tried), len(self._tried) + 1)
        begun = [] if pool is None else [pool.begin(with_capacity, *call) for call in arguments]
        plans = []
        for place, sized in enumerate(self._found):
            self.options.say(f"capacity of {sized.instances} × {sized.offer.name}")
            if begun:
                plans.append(begun[place].result())
            else:
                plans.append(with_capacity(*arguments[place], self.options.runner_of))
        return tuple(plans)


def _light(offer: Offer, rate_rps: float) -> tuple[Iterator[Deployment], float, RunLength]:
    """Deployments, rate and runs of a load at which hardly a request waits."""
    least = offer.least_instances
    return offer.shapes(least), min(rate_rps, _LIGHT_SHARE * offer.alone_rps * least), LIGHT


def _likely(offer: Offer, least: int) -> int:
    """The number of instances with which a search begins."""
    return max(least, round(offer.least_instances / _LIKELY_SHARE))


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
    """
    options = SearchOptions(
        targets=(target,),
        tolerance=_TOLERANCE,
        first_seed=first_seed,
        budget=Budget(_CAPACITY_REQUESTS, horizons=SIMULATED_BUDGET_HORIZONS),
    )
    is_simulated = runner_of is simulated_runner
    [capacity] = find_capacity(
        simulated_runner(spec, controlled=True) if is_simulated else runner_of(spec),
        start_rps=rate_rps,
        options=options,
        neighbours=(rate_rps, rate_rps * 1.2),
    ).capacities
    fitted = spec.deployment.step_time.fitted
    figures = _figures(spec, target) if is_simulated else None
    return replace(sized, capacity=capacity, fitted=fitted, figures=figures)


def _figures(spec: CellSpec, target: float) -> PlanFigures:
    """Those of one run as long as the confirming ones."""
    spec = replace(spec, requests=CONFIRM.requests, seed=spec.seed + _FRESH_SEEDS)
    workload = workload_of(spec)
    result = simulated(spec, workload, predicted_output_tokens(spec, workload))
    row: Row = dict(simulated_figures(spec, workload, result))
    columns = ("ttft_p99_s", "tpot_p99_s", "gpu_power_mean_w", "joules_per_output_token")
    figures = {
        column: value if isinstance(value := row[column], float) and math.isfinite(value) else None
        for column in columns
    }

    def at_speed(speed: float) -> tuple[Workload, Result]:
        """The run of a server that is faster by a factor: of the same requests, further apart."""
        arrival_s = workload.arrival_s * speed
        deadline_s = workload.deadline_s + arrival_s - workload.arrival_s
        sooner = replace(workload, arrival_s=arrival_s, deadline_s=deadline_s)
        return sooner, simulated(spec, sooner, predicted_output_tokens(spec, sooner))

    keeps = share_that_keeps(spec, workload, result, row, target, at_speed)
    return PlanFigures(**figures, keeps=keeps)


def _capacity(sized: SizedOffer) -> float:
    if sized.capacity is None or sized.capacity.capacity_rps is None:
        return math.inf
    return sized.capacity.capacity_rps
