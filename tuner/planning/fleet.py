"""Fleets: several models with a load for every hour of the day, a pool of instances each.

    startup_s = 300            # that a new instance is paid before it serves

    [pools.chat]
    model = "llama-3.1-8b"
    slo = "ttft=1,tpot=0.1"
    rate_rps = [1, 1, 1, 1, 1, 2, 4, 6, 8, 9, 9, 8, 8, 9, 9, 8, 7, 6, 5, 4, 3, 2, 2, 1]

    [pools.code]
    model = "llama-3.1-70b"
    workload = "azure-code"
    rate_rps = 0.5             # the whole day

Any setting of an experiment may stand in a pool; those of the command line hold for all pools.
Every pool gets the plan that costs least over the day, among those that are cheapest at its highest
rate. An hour is long against any SLO, so each hour is a steady state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ...harness.experiments.config.experiment_file import (
    SettingError,
    all_anchored,
    line_of,
    read_toml,
    setting_error,
)
from ...harness.experiments.config.schema import ExperimentSchema
from ...workloads.errors import FileFormatError, SloBenchError
from .plan_search import PlanOptions, PlanSearch, SizedOffer, TargetLoad
from .prices import PriceList

HOURS = 24

_Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Day = Annotated[
    list[_Rate],
    BeforeValidator(lambda value: value if isinstance(value, list) else [value] * HOURS),
    Field(min_length=HOURS, max_length=HOURS),
]


class _PoolTable(BaseModel):
    model_config = ConfigDict(extra="allow")
    rate_rps: _Day


class _FleetTable(BaseModel):
    model_config = ConfigDict(extra="forbid")
    startup_s: _Rate = 0.0
    pools: Annotated[dict[str, _PoolTable], Field(min_length=1)]


@dataclass(frozen=True)
class Pool:
    """A model with its rate in req/s in each hour of the day; `experiment` is its own."""

    name: str
    experiment: ExperimentSchema
    rates_rps: tuple[float, ...]


@dataclass(frozen=True)
class Fleet:
    """Pools; a new instance is paid for `startup_s` seconds before it serves."""

    pools: tuple[Pool, ...]
    startup_s: float = 0.0


@dataclass(frozen=True)
class PoolPlan:
    """The plan of a pool at its highest rate, and how many of its instances each hour needs."""

    pool: Pool
    load: TargetLoad
    plan: SizedOffer
    instances: tuple[int, ...]
    startup_s: float = 0.0

    def gpu_hours(self, autoscaled: bool) -> float:
        """GPU-hours a day, with all instances all day or those that each hour needs."""
        if not autoscaled:
            return float(HOURS * self.plan.gpus)
        before = (self.instances[-1], *self.instances)
        started = sum(max(0, n - old) for old, n in zip(before, self.instances, strict=False))
        return (sum(self.instances) + started * self.startup_s / 3600) * self.plan.offer.gpus

    def usd_per_day(self, prices: PriceList, autoscaled: bool) -> float | None:
        """USD a day by a price list; None: it does not have the GPU."""
        kind = self.plan.offer.gpu
        price = prices.price(kind)
        if price is None:
            return None
        on_hours = self.gpu_hours(autoscaled)
        off_hours = max(0.0, HOURS * self.plan.gpus - on_hours)
        return on_hours * price + off_hours * prices.price_off(kind)


@dataclass(frozen=True)
class FleetPlan:
    """The plans of all pools, in their order."""

    pools: tuple[PoolPlan, ...]
    prices: PriceList
    kinds: tuple[str, ...] = ()  # GPUs that were asked for; none: all with a price
    refuted: tuple[SizedOffer, ...] = ()  # by the long runs


def read_fleet(path: Path, base: ExperimentSchema) -> Fleet:
    """The fleet in a file; settings of `base` hold where a pool has none.

    Raises:
        FileFormatError: it cannot be read, or a field or a setting in it is wrong (with its line).
    """
    table, text = read_toml(path)
    try:
        fleet_table = _FleetTable.model_validate(table)
    except ValidationError as error:
        problem = setting_error(error, _FleetTable, "field")
        location = problem.location
        shown = ".".join(str(part) for part in location)
        wrong = str(error.errors()[0]["msg"])
        raise FileFormatError(path, line_of(text, location), f"{shown}: {wrong}") from None
    pools = []
    for name, pool in fleet_table.pools.items():
        settings: dict[str, Any] = dict(pool.model_extra or {})
        settings |= all_anchored(settings, path.resolve().parent, type(base))
        if not max(pool.rate_rps) > 0:
            line = line_of(text, ("pools", name, "rate_rps"))
            raise FileFormatError(path, line, f"pools.{name}.rate_rps is 0 all day")
        try:
            experiment = type(base)(**{**base.model_dump(exclude_unset=True), **settings})
        except SettingError as error:
            line = line_of(text, ("pools", name, *error.location))
            raise FileFormatError(path, line, str(error)) from None
        pools.append(Pool(name, experiment, tuple(pool.rate_rps)))
    return Fleet(tuple(pools), fleet_table.startup_s)


def plan_fleet(fleet: Fleet, load: TargetLoad, options: PlanOptions | None = None) -> FleetPlan:
    """For every pool the plan that costs least over an autoscaled day.

    The rate of `load` is not used, its limits hold for each pool. Levels of a pool are kept in a
    folder of its name.

    Raises:
        SloBenchError: no offer carries the load of a pool, or something cannot be read.
    """
    how = options or PlanOptions()
    plans: list[PoolPlan] = []
    refuted: list[SizedOffer] = []
    for pool in fleet.pools:
        pool_load = replace(load, rate_rps=max(pool.rates_rps))
        kept = None if how.folder is None else how.folder / pool.name

        def say(line: str, name: str = pool.name) -> None:
            how.say(f"{name}: {line}")

        resume = how.resume and kept is not None and kept.exists()
        pool_options = replace(how, folder=kept, resume=resume, say=say)
        search = PlanSearch(pool.experiment, pool_load, pool_options)
        try:
            pool_plans = search.run()
        except SloBenchError as error:
            raise SloBenchError(f"pool {pool.name}: {error}") from None
        days = [
            PoolPlan(
                pool, pool_load, sized, search.fewest_for(sized, pool.rates_rps), fleet.startup_s
            )
            for sized in pool_plans.plans
        ]
        refuted += pool_plans.refuted
        plans.append(min(days, key=lambda day: day.usd_per_day(how.prices, autoscaled=True) or 0.0))
    return FleetPlan(tuple(plans), how.prices, how.kinds, tuple(refuted))


def totals(plans: Sequence[PoolPlan], prices: PriceList, autoscaled: bool) -> float | None:
    """USD a day of several pools; None where the list lacks a GPU of one."""
    each = [plan.usd_per_day(prices, autoscaled) for plan in plans]
    return None if None in each else sum(usd for usd in each if usd is not None)
