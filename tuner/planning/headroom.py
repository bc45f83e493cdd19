"""Capacity of an observed server, its headroom, and the change that is the safest to make next.

Everything is simulated with step times fitted to the server's metrics. How far these are off is
seen three times: each tenth of the observed time against a fit to the rest, and latencies of the
observed load, simulated, against those of the server. Capacities and gains are computed again with
step times as long and as short as the worst of these; that makes their bands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ...harness.core.policy import Policy, overrides
from ...harness.experiments.execution.cell_specs import CellSpec
from ...harness.experiments.execution.cells import (
    predicted_output_tokens,
    simulated,
    simulated_figures,
    workload_of,
)
from ...harness.experiments.execution.experiment_plan import plan
from ...harness.experiments.experiment import Experiment
from ...harness.load_generator.observed import ObservedServer
from ...harness.policies.systems import system
from ...harness.results.stationarity import horizon_s
from ...harness.servers.launch.compatibility import refusal
from ...harness.servers.server_kinds import SERVERS, limits_of
from ...harness.validation.calibration.calibrate_server import seen_over_simulated
from ...predictors.scaled import ScaledStepTime
from ...workloads.errors import SloBenchError
from ..capacity.capacity_cells import CellRunner, Simulator
from ..capacity.capacity_search import find_capacity
from ..capacity.search_options import Budget, Capacity, SearchOptions
from ..sensitivity.study import highest_rps

_REQUESTS, _MOST_REQUESTS = 2000, 20_000
_HORIZONS = 4.0
_BUDGET = 60_000
_TOLERANCE = 0.05
_WORTH = 1.02  # a smaller gain is within the search's own tolerance
_UNLIKE = math.log(2)  # latencies of the observed load that are off by more
_INSTEAD = "edf"  # tried in place of first come, first served
_NOT_FOUND = (
    "the search found no rate at which attainment crosses the target; the band is that of short "
    "runs on fixed seeds, and may end where they did not look further"
)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Change:
    """A change of the deployment, and the capacity with it over that of today.

    `gain_low` and `gain_high` are its ends over the band of step times. `unseen`: with it batches
    may be larger than any that was observed. `instances`: of the server, more than today;
    `parameters`: of its system, that change.
    """

    what: str
    how: str
    gain: float = 1.0
    gain_low: float = 1.0
    gain_high: float = 1.0
    unseen: bool = False
    instances: int = 0
    parameters: Mapping[str, int] = field(default_factory=dict)

    @property
    def safe(self) -> bool:
        """Whether it is better at both ends of the band, within what was observed."""
        return not self.unseen and self.gain_low >= _WORTH


@dataclass(frozen=True)
class Headroom:
    """What a server carries, and what would change it.

    Attributes:
        rate_rps: arrival rate that was observed.
        capacity: by simulation, with its statistical interval.
        band_rps: between these the real server's capacity lies, as far as was seen.
        step_time_factors: shortest and longest step times, over the fitted ones.
        seen_over_simulated: latencies of the observed load, by name.
        changes: the best first, by the low end of their gains.
        next_change: the safest; None: none is better for sure.
        notes: what to bear in mind.
    """

    rate_rps: float
    capacity: Capacity
    band_rps: tuple[float, float]
    step_time_factors: tuple[float, float]
    seen_over_simulated: Mapping[str, float]
    changes: tuple[Change, ...]
    next_change: Change | None
    notes: tuple[str, ...]

    @property
    def no_change_because(self) -> str:
        """Why there is no `next_change`, though a change may gain."""
        gaining = [change for change in self.changes if change.gain_low >= _WORTH]
        if not gaining:
            return "none of these changes is better for sure: leave it as it is"
        if any(change.instances for change in gaining) and len(gaining) == 1:
            return "another server would carry more, but this load does not need it"
        return (
            "what gains needs larger batches than were seen, or another server, which this load "
            "does not need: leave it as it is, or try it in a test"
        )

    @property
    def headroom(self) -> float | None:
        """By how much the load may grow, as a share of it; None: no capacity was found."""
        capacity_rps = self.capacity.capacity_rps
        return None if capacity_rps is None else capacity_rps / self.rate_rps - 1

    @property
    def headroom_band(self) -> tuple[float, float]:
        """The same at the ends of the band."""
        low, high = self.band_rps
        return low / self.rate_rps - 1, high / self.rate_rps - 1


def headroom_of(
    server: ObservedServer,
    experiment: Experiment,
    seen_workload: str,
    target: float,
    say: Say = lambda line: None,
) -> Headroom:
    """Capacity, headroom and changes of an observed server.

    Args:
        server: what was seen.
        experiment: one system with the server's settings and the fitted profile, a workload like
            the one that was seen, and its SLO.
        seen_workload: file with the requests that were seen, at their times.
        target: attainment.
        say: called with what is simulated next.

    Raises:
        SloBenchError: the experiment is not of one configuration, or cannot be simulated.
    """
    cells = plan(experiment).cells
    if len(cells) != 1:
        raise SloBenchError("observe takes one system and one value of each setting")
    spec = cells[0]
    rate_rps = server.arrival_rps
    say("simulating the load that was seen")
    compared = seen_over_simulated(spec, server, seen_workload)
    of_steps = {name: ratio for name, ratio in compared.items() if name != "ttft"}
    logs = [*server.step_errors().tolist(), *map(math.log, of_steps.values()), 0.0]
    slow, fast = math.exp(max(logs)), math.exp(min(logs))
    say("searching the capacity")
    capacity = _capacity(spec, rate_rps, target)
    around = capacity.capacity_rps or max(rate_rps, capacity.low_rps)

    def highest(cell: CellSpec, factor: float) -> float:
        return highest_rps(lambda rate: _attainment(cell, rate, factor) >= target, around)

    factors = (slow, 1.0, fast)
    today = [highest(spec, factor) for factor in factors]
    changes = []
    for changed, change in _changes(spec, server):
        say(f"simulating {change.what}")
        after = [highest(changed, factor) for factor in factors]
        gains = [
            a / b if b else (math.inf if a else 1.0) for a, b in zip(after, today, strict=True)
        ]
        changes.append(
            dataclasses.replace(change, gain=gains[1], gain_low=min(gains), gain_high=max(gains))
        )
    changes.sort(key=lambda change: -change.gain_low)
    # What fixed seeds and short runs are off, the search is not.
    capacity_rps = capacity.capacity_rps
    scale = capacity_rps / today[1] if capacity_rps and today[1] else 1.0
    band = (
        min(capacity.low_rps, scale * today[0]),
        max(capacity.high_rps if math.isfinite(capacity.high_rps) else 0.0, scale * today[2]),
    )
    return Headroom(
        rate_rps=rate_rps,
        capacity=capacity,
        band_rps=band,
        step_time_factors=(fast, slow),
        seen_over_simulated=compared,
        changes=tuple(changes),
        next_change=_next(changes, band[0] / rate_rps),
        notes=(*_notes(server, of_steps), *([_NOT_FOUND] if capacity_rps is None else [])),
    )


def _next(changes: list[Change], least_headroom: float) -> Change | None:
    """The safest change: of those that cost nothing the best; another instance only where the load
    may be more than is carried.
    """
    free = next((change for change in changes if change.safe and not change.instances), None)
    if free is not None and least_headroom * free.gain_low >= 1:
        return free
    if least_headroom < 1:
        return next(
            (change for change in changes if change.instances and change.gain_low >= _WORTH), free
        )
    return free


def _notes(server: ObservedServer, of_steps: Mapping[str, float]) -> Iterator[str]:
    yield from server.notes
    if any(abs(math.log(ratio)) > _UNLIKE for ratio in of_steps.values()):
        yield (
            "the simulation of the observed load is off by more than a factor of 2: other things "
            "than these settings decide this server's latencies"
        )


def _attainment(spec: CellSpec, rate_rps: float, factor: float) -> float:
    """Attainment in a run that lasts some horizons of the SLO, so that an overload is seen."""
    spec = dataclasses.replace(spec, rate_rps=rate_rps)
    workload = workload_of(spec)
    least = min(_MOST_REQUESTS, math.ceil(_HORIZONS * horizon_s(workload) * rate_rps))
    if least > len(workload):
        spec = dataclasses.replace(spec, requests=least)
        workload = workload_of(spec)
    step_time = ScaledStepTime(spec.deployment.step_time.model, factor)
    result = simulated(spec, workload, predicted_output_tokens(spec, workload), step_time=step_time)
    return float(simulated_figures(spec, workload, result)["attainment"] or 0.0)


def _capacity(spec: CellSpec, rate_rps: float, target: float) -> Capacity:
    runner = CellRunner(spec, "observed", Simulator(), lambda cell, row: None)
    options = SearchOptions(
        targets=(target,),
        tolerance=_TOLERANCE,
        requests=spec.requests or _REQUESTS,
        first_seed=spec.seed,
        budget=Budget(_BUDGET),
    )
    return find_capacity(runner, start_rps=rate_rps, options=options).capacities[0]


def _changes(spec: CellSpec, server: ObservedServer) -> Iterator[tuple[CellSpec, Change]]:
    """Changes to try; each is one setting away from the server of today."""
    stock = system(spec.system)
    values = stock.with_parameters(**spec.parameters).parameters()
    limits = limits_of(spec.system)
    for limit in ("max_num_seqs", "max_num_batched_tokens"):
        if limit not in limits:
            continue
        name, option = limits[limit]
        for value in (values[name] // 2, values[name] * 2):
            changed = {**spec.parameters, name: value}
            try:
                stock.with_parameters(**changed)
            except SloBenchError:  # beyond what it may be
                continue
            larger = limit == "max_num_seqs" and value > values[name]
            unseen = larger and value > server.peak("running")
            description = f"{name} {value} (today {values[name]})"
            yield (
                dataclasses.replace(spec, parameters=changed),
                Change(description, f"{option} {value}", unseen=unseen, parameters={name: value}),
            )
    in_order = isinstance(stock.policy, Policy) and not overrides(stock.policy, "queue_key")
    if in_order and spec.system in SERVERS and refusal(system(_INSTEAD), spec.system) is None:
        parameters = _known(_INSTEAD, spec.parameters)
        yield (
            dataclasses.replace(spec, system=_INSTEAD, parameters=parameters),
            Change(
                f"earliest deadline first ({_INSTEAD}) in place of first come, first served",
                f"slo-bench serve {_INSTEAD} --backend {spec.system}",
            ),
        )
    more = spec.instances + 1
    yield (
        dataclasses.replace(spec, instances=more, router="least-loaded"),
        Change(
            f"{more} instances behind a router (today {spec.instances})",
            f"{more} servers, least-loaded first",
            instances=1,
        ),
    )


def _known(
    name: str, parameters: Mapping[str, bool | int | float | str]
) -> dict[str, bool | int | float | str]:
    supported = system(name).parameters()
    return {key: value for key, value in parameters.items() if key in supported}
