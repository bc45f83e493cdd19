"""The plan of a fleet as a table for the terminal, and as rows for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

from ...tuner.planning.fleet import totals
from ...tuner.planning.prices import default_prices
from .plan import attainment_text, plan_parts, plan_row
from .table import one_group

if TYPE_CHECKING:
    from ...tuner.planning.fleet import FleetPlan, PoolPlan

_WAYS = {"fixed": False, "autoscaled": True}


def fleet_rows(planned: FleetPlan) -> list[dict[str, Any]]:
    """One row for each pool: its plan, its instances by hour, GPU-hours and USD of a day."""
    catalogue = default_prices()
    return [
        {
            "pool": one.pool.name,
            "model": one.pool.asked.model[0],
            **plan_row(one.plan, one.wanted, planned.prices),
            "rates_rps": list(one.pool.rates_rps),
            "instances_by_hour": list(one.instances),
            **{f"gpu_hours_{way}": _round(one.gpu_hours(scaled)) for way, scaled in _WAYS.items()},
            **{
                f"usd_per_day_{way}": _round(one.usd_per_day(planned.prices, scaled))
                for way, scaled in _WAYS.items()
            },
            **{
                f"catalogue_usd_per_day_{way}": _round(one.usd_per_day(catalogue, scaled))
                for way, scaled in _WAYS.items()
            },
        }
        for one in planned.pools
    ]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def fleet_table(planned: FleetPlan) -> RichTable:
    """The pools and their sum; what the catalogue's prices give stands in brackets."""
    lines = []
    for one, row in zip(planned.pools, fleet_rows(planned), strict=True):
        name = "\n".join([f"{one.pool.name}: {row['model']}", *plan_parts(row)])
        share = attainment_text(row)
        lines.append((name, share, *(_day(planned, [one], scaled) for scaled in _WAYS.values())))
    if len(planned.pools) > 1:
        every = planned.pools
        lines.append(
            ("all pools", "", *(_day(planned, every, scaled) for scaled in _WAYS.values()))
        )
    heads = ("pool", "in SLO %", "fixed", "autoscaled")
    return one_group("Fleet", heads, lines).rich(
        "cheapest day (simulated; USD and GPU-hours a day)"
    )


def _day(planned: FleetPlan, pools: list[PoolPlan] | tuple[PoolPlan, ...], scaled: bool) -> str:
    usd, catalogue = totals(pools, planned.prices, scaled), totals(pools, default_prices(), scaled)
    text = f"{usd:,.2f} USD"
    if planned.prices != default_prices():
        text += "\n(–)" if catalogue is None else f"\n({catalogue:,.2f})"
    return f"{text}\n{sum(one.gpu_hours(scaled) for one in pools):,.4g} GPU-h"


def hour_lines(planned: FleetPlan) -> list[str]:
    """The instances of each pool, hour by hour from midnight on."""
    return [
        f"{one.pool.name}, instances from 0 h to 23 h: {' '.join(map(str, one.instances))}"
        for one in planned.pools
    ]
