"""Plans, and the plan of a fleet: tables for a terminal, rows for machines, and a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...predictors.specs import gpu, gpus
from ...tuner.planning.fleet import totals
from ...tuner.planning.offers import spread_text
from ...tuner.planning.prices import default_prices
from ...workloads.parsing import finite
from ..figures.drawing import page_data
from ..figures.figure import ONLY, Axis, Figure, View, curve, percent_text, seconds_text
from ..terminal.screen import Screen
from .document import page, write_page
from .slo_text import written_slo_text
from .table import Cell, Table, one_group

if TYPE_CHECKING:
    from ...harness.experiments.config.schema import ExperimentSchema
    from ...tuner.planning.fleet import FleetPlan, PoolPlan
    from ...tuner.planning.plan_search import DeploymentPlan, SizedOffer, TargetLoad
    from ...tuner.planning.prices import PriceList


def plan_rows(planned: DeploymentPlan) -> list[dict[str, Any]]:
    """One row for each plan, the cheapest first; rates in requests per second."""
    return [plan_row(plan, planned.load, planned.prices) for plan in planned.plans]


def plan_row(plan: SizedOffer, load: TargetLoad, prices: PriceList) -> dict[str, Any]:
    """The figures of a plan."""
    return {
        "system": plan.offer.system,
        "gpu": plan.offer.gpu,
        "gpus": plan.gpus,
        "instances": plan.instances,
        "tp": plan.offer.tp,
        "pp": plan.offer.pp,
        "dp": plan.offer.dp,
        "weight_dtype": plan.offer.weight_dtype,
        "kv_dtype": plan.offer.kv_dtype,
        "deployment": dict(plan.offer.deployment),
        "parameters": dict(plan.parameters),
        "usd_per_hour": round(plan.usd_per_hour, 6),
        "price_basis": prices.title,
        "catalogue_usd_per_hour": _catalogue_usd(plan),
        "rate_rps": load.rate_rps,
        "headroom": load.headroom,
        "target": load.target,
        "attainment": plan.verdict.attainment,
        "attainment_low": plan.verdict.low,
        "attainment_high": plan.verdict.high,
        "confirmed": plan.verdict.carries,
        "confirmed_runs": plan.verdict.runs,
        "confirmed_requests": plan.verdict.requests,
        **_capacity(plan),
        **_figures(plan),
        "step_time": "fitted" if plan.fitted else "unfitted",
        "simulated": True,
    }


def _figures(plan: SizedOffer) -> dict[str, float | None]:
    figures = plan.figures
    values = {} if figures is None else asdict(figures)
    keeps = values.pop("keeps", None)
    return {
        **{name: _round(value) for name, value in values.items()},
        "gpu_power_limit_w": plan.gpus * gpu(plan.offer.gpu).power_w,
        "keeps_probability": None if keeps is None else round(keeps, 4),
    }


def _catalogue_usd(plan: SizedOffer) -> float | None:
    """The price by the catalogue's list; None where it has none."""
    price = default_prices().price(plan.offer.gpu)
    return None if price is None else round(price * plan.gpus, 6)


def _capacity(plan: SizedOffer) -> dict[str, float | str | None]:
    capacity = plan.capacity
    if capacity is None:
        return dict.fromkeys(("capacity_rps", "low_rps", "high_rps", "outcome"))
    return {
        "capacity_rps": capacity.capacity_rps,
        "low_rps": capacity.low_rps,
        "high_rps": finite(capacity.high_rps),
        "outcome": capacity.outcome.value,
    }


def attainment_text(row: dict[str, Any]) -> str:
    """Percent in SLO, and below it the 95 % interval."""
    low, high = row["attainment_low"], row["attainment_high"]
    return f"{100 * row['attainment']:.1f}\n{100 * low:.3g} to {100 * high:.3g}"


def plan_parts(row: dict[str, Any]) -> list[str]:
    """What a plan is, part by part: its GPUs, its instances, formats and parameters."""
    star = "" if row["step_time"] == "fitted" else " *"
    spread = spread_text(row["tp"], row["pp"], row["dp"])
    dtypes = {name: row[name] for name in ("weight_dtype", "kv_dtype")}
    set_to = {**dtypes, **row["deployment"], **row["parameters"]}
    return [
        f"{row['gpus']} × {row['gpu']}{star}",
        f"{row['instances']} × {spread}, {row['system']}",
        *(f"{parameter}={value}" for parameter, value in set_to.items()),
    ]


def unfitted_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the star of `plan_parts` says, where a plan has it."""
    if all(row["step_time"] == "fitted" for row in rows):
        return []
    return ["* step times estimated from the GPU's data sheet, not fitted to measurements"]


def decided_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where the cheapest plan has no fitted step times: the cheapest that has, and what decides."""
    first = rows[0]
    if first["step_time"] == "fitted":
        return []
    fitted = next((row for row in rows if row["step_time"] == "fitted"), None)
    if fitted is None:
        return ["no plan on fitted step times carries the load"]
    spare, place = spare_of(first), f"{first['gpu']}, tp {first['tp']}"
    limit = "" if spare is None else f" by more than {max(spare, 0):.0%}"
    return [
        f"cheapest on fitted step times: {', '.join(plan_parts(fitted)[:2])}, "
        f"{fitted['usd_per_hour']:.2f} USD an hour; it may be the cheaper one if steps on {place}, "
        f"take longer than estimated{limit}: slo-bench profile run --gpu {first['gpu']} "
        "measures them"
    ]


def keeps_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What P(SLO) is, where a plan has it."""
    if all(row["keeps_probability"] is None for row in rows):
        return []
    return [
        "P(SLO): probability that the real server keeps the target at this rate, by how far "
        "earlier predictions were from measurements (docs/accuracy.md#bands)"
    ]


def price_lines(prices: PriceList, plans: Sequence[SizedOffer], kinds: Sequence[str]) -> list[str]:
    """The basis of the prices, that of the catalogue where they differ, and what has no price.

    `kinds` are the GPUs that were asked for, none if all.
    """
    catalogue = default_prices()
    lines = [f"prices: {prices.title}"]
    if guessed := sorted({plan.offer.gpu for plan in plans} & prices.estimates):
        lines[0] += f"; estimated: {', '.join(guessed)}"
    if prices != catalogue:
        lines.append(f"in brackets: {catalogue.title}")
    without = [name for name in gpus() if prices.price(name) is None]
    if without and not kinds:
        lines.append(
            f"left out, without a price: {', '.join(without)}; give one with --price GPU=USD or "
            "--prices FILE"
        )
    return lines


def confirmed_lines(plans: Sequence[SizedOffer], refuted: Sequence[SizedOffer]) -> list[str]:
    """How long the runs were that confirmed the plans, and what they refuted."""
    runs = [plan.verdict for plan in plans]
    each = [run.requests // run.runs for run in runs]
    lengths = f"{min(each):,}" + (f" to {max(each):,}" if max(each) > min(each) else "")
    lines = [
        f"in SLO: at least {min(run.runs for run in runs)} runs of {lengths} requests a plan, on "
        "seeds that the search did not use"
    ]
    if refuted:
        worst = min(refuted, key=lambda plan: plan.verdict.attainment)
        lines.append(
            f"{len(refuted)} carried the load in the search and not in these runs, and are left "
            f"out; the worst had {percent_text(worst.verdict.attainment)} in SLO: {worst.name}"
        )
    return lines


def or_dash(value: float | None, form: str) -> str:
    """The value in the format `form`; a dash where there is none."""
    return "–" if value is None else f"{value:{form}}"


def spare_of(row: dict[str, Any]) -> float | None:
    """Capacity over the rate, minus one; None where no capacity is known."""
    capacity_rps = row["capacity_rps"] or row["low_rps"]
    return None if capacity_rps is None else capacity_rps / row["rate_rps"] - 1


_WAYS = {"fixed": False, "autoscaled": True}


def fleet_rows(planned: FleetPlan) -> list[dict[str, Any]]:
    """One row for each pool: its plan, its instances by hour, GPU-hours and USD of a day."""
    return [
        {
            "pool": pool_plan.pool.name,
            "model": pool_plan.pool.experiment.model[0],
            **plan_row(pool_plan.plan, pool_plan.load, planned.prices),
            "rates_rps": list(pool_plan.pool.rates_rps),
            "instances_by_hour": list(pool_plan.instances),
            **_by_way("gpu_hours", pool_plan.gpu_hours),
            **_by_way("usd_per_day", partial(pool_plan.usd_per_day, planned.prices)),
            **_by_way("catalogue_usd_per_day", partial(pool_plan.usd_per_day, default_prices())),
        }
        for pool_plan in planned.pools
    ]


def _by_way(name: str, amount: Callable[[bool], float | None]) -> dict[str, float | None]:
    """An amount of a day for each of `_WAYS`."""
    return {f"{name}_{way}": _round(amount(scaled)) for way, scaled in _WAYS.items()}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def fleet_table(planned: FleetPlan) -> Screen:
    """The pools and their sum; what the catalogue's prices give stands in brackets."""
    lines = []
    for pool_plan, row in zip(planned.pools, fleet_rows(planned), strict=True):
        name = "\n".join([f"{pool_plan.pool.name}: {row['model']}", *plan_parts(row)])
        days = (_day(planned, [pool_plan], scaled) for scaled in _WAYS.values())
        lines.append((name, attainment_text(row), *days))
    if len(planned.pools) > 1:
        days = (_day(planned, planned.pools, scaled) for scaled in _WAYS.values())
        lines.append(("all pools", "", *days))
    table = one_group("Fleet", ("pool", "in SLO %", *_WAYS), lines)
    return table.rich("cheapest day (simulated; USD and GPU-hours a day)")


def _day(planned: FleetPlan, pools: list[PoolPlan] | tuple[PoolPlan, ...], scaled: bool) -> str:
    usd, catalogue = totals(pools, planned.prices, scaled), totals(pools, default_prices(), scaled)
    text = f"{usd:,.2f} USD"
    if planned.prices != default_prices():
        text += "\n(–)" if catalogue is None else f"\n({catalogue:,.2f})"
    return f"{text}\n{sum(pool_plan.gpu_hours(scaled) for pool_plan in pools):,.4g} GPU-h"


def hour_lines(planned: FleetPlan) -> list[str]:
    """The instances of each pool, hour by hour from midnight on."""
    return [
        f"{pool_plan.pool.name}, instances from 0 h to 23 h: "
        f"{' '.join(map(str, pool_plan.instances))}"
        for pool_plan in planned.pools
    ]


Row = dict[str, Any]

FRONT, OTHERS = "not beaten in all", "beaten in all"
_AXES = {
    "ttft_p99_s": Axis("TTFT p99", "seconds"),
    "tpot_p99_s": Axis("TPOT p99", "seconds"),
    "spare": Axis("spare capacity over the rate", "percent"),
    "joules_per_output_token": Axis("J per output token", "number"),
}
_MORE_IS_BETTER = ("spare",)


def write_plan(planned: DeploymentPlan, experiment: ExperimentSchema, out: Path) -> Path:
    """Write the page of the plans for `experiment`, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    rows = [{**row, "spare": spare_of(row)} for row in plan_rows(planned)]
    best = undominated(rows)
    prices = price_lines(planned.prices, planned.plans, planned.kinds)
    figures = [figure for name in _AXES if (figure := _figure(rows, best, name)) is not None]
    load = planned.load
    text = page(
        "plan.html",
        page_data([FRONT, OTHERS], "simulated", figures),
        heading=f"Plans for {load.rate_rps:g} req/s",
        facts=[
            ", ".join(map(str, experiment.model)),
            ", ".join(map(str, experiment.workload)),
            f"SLO: {' or '.join(written_slo_text(slo or '') for slo in experiment.slo)}",
            f"at least {load.target:.4g} of requests in SLO",
            prices[0],
        ],
        answer=_answer(rows[0]),
        figures=figures,
        plans=_table(rows, best),
        notes=[
            *keeps_lines(rows),
            *unfitted_lines(rows),
            *decided_lines(rows),
            *prices,
            *confirmed_lines(planned.plans, planned.refuted),
        ],
        absent=[f"{name} has no plan here: {why}" for name, why in planned.absent.items()],
        footer="Simulated. J per output token: from the mean power of all GPUs, where the power of "
        "the GPU was measured (docs/accuracy.md#energy); the limit is that of the data sheet.",
    )
    return write_page(text, out)


def undominated(rows: Sequence[Row]) -> list[bool]:
    """Whether no other plan is as good in price and all figures that both have, and better in one.

    Returns a flag for each row.
    """
    return [not any(_beats(rival, row) for rival in rows if rival is not row) for row in rows]


def _beats(row: Row, rival: Row) -> bool:
    names = ("usd_per_hour", *_AXES)
    both = [name for name in names if None not in (row.get(name), rival.get(name))]
    gains = [(row[name] - rival[name]) * (1 if name in _MORE_IS_BETTER else -1) for name in both]
    return bool(min(gains) >= 0 and max(gains) > 0)


def _figure(rows: Sequence[Row], best: Sequence[bool], name: str) -> Figure | None:
    """Plans by price and one more figure; None where no plan has it."""
    curves: list[View] = []
    judged = [pair for pair in zip(rows, best, strict=True) if pair[0].get(name) is not None]
    for place, on_front in enumerate((True, False)):
        chosen = [row for row, is_best in judged if is_best is on_front]
        if chosen:
            labels = [", ".join(plan_parts(row)[:2]) for row in chosen]
            marks = [
                str(1 + next(n for n, other in enumerate(rows) if other is row)) for row in chosen
            ]
            x, y = ([row[key] for row in chosen] for key in ("usd_per_hour", name))
            curves.append(curve(place, x, y, labels=labels, marks=marks))
    if not curves:
        return None
    better = "higher" if name in _MORE_IS_BETTER else "lower"
    return Figure(
        id=f"price-{name}",
        title=f"Price and {_AXES[name].label}",
        note=f"Left and {better} is better; numbers are those of the table. The front is that of "
        "price and all four figures.",
        x=Axis("USD per hour", "number"),
        y=_AXES[name],
        views={ONLY: {"series": curves, "scatter": True}},
        hover="point",
    )


def _answer(row: Row) -> str:
    name, keeps = ", ".join(plan_parts(row)[:2]), row["keeps_probability"]
    return (
        f"Cheapest: {name}, for {row['usd_per_hour']:.2f} USD per hour "
        f"with {percent_text(row['attainment'])} of requests in SLO"
        + ("." if keeps is None else f"; P(SLO) {keeps:.0%}.")
    )


def _table(rows: Sequence[Row], best: Sequence[bool]) -> Table:
    priced = any(row["catalogue_usd_per_hour"] != row["usd_per_hour"] for row in rows)
    heads = (
        *("plan", "USD per hour", *["catalogue USD per hour"] * priced),
        *("in SLO", "P(SLO)", "spare", "TTFT p99", "TPOT p99", "J per output token"),
        *("mean power", "power limit"),
    )
    lines: list[list[str | Cell]] = []
    for place, (row, is_best) in enumerate(zip(rows, best, strict=True), 1):
        gpus, instances, *settings = plan_parts(row)
        interval = f"{row['attainment_low']:.1%} to {row['attainment_high']:.1%}"
        lines.append(
            [
                Cell(f"{place}. {gpus}, {instances}", best=is_best, after=", ".join(settings)),
                f"{row['usd_per_hour']:.2f}",
                *[or_dash(row["catalogue_usd_per_hour"], ".2f")] * priced,
                Cell(percent_text(row["attainment"]), after=interval),
                or_dash(row["keeps_probability"], ".0%"),
                or_dash(row["spare"], "+.0%"),
                *(seconds_text(row[name] or math.nan) for name in ("ttft_p99_s", "tpot_p99_s")),
                _number(row["joules_per_output_token"], "J"),
                _number(row["gpu_power_mean_w"], "W"),
                _number(row["gpu_power_limit_w"], "W"),
            ]
        )
    note = (
        "Bold: no other plan is as good in price, TTFT, TPOT, spare and energy and better in one."
    )
    return one_group("Plans", heads, lines, note=note, css="plans")


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"
