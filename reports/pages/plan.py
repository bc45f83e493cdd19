"""Plans as a table for the terminal, and as rows for machines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

from ...predictors.specs import gpu, gpus
from ...tuner.planning.offers import spread_text
from ...tuner.planning.prices import default_prices
from .table import one_group

if TYPE_CHECKING:
    from ...tuner.planning import DeploymentPlan, PriceList, SizedOffer, TargetLoad


def plan_rows(planned: DeploymentPlan) -> list[dict[str, Any]]:
    """One row for each plan, the cheapest first; rates in requests per second."""
    return [plan_row(one, planned.wanted, planned.prices) for one in planned.plans]


def plan_row(one: SizedOffer, wanted: TargetLoad, prices: PriceList) -> dict[str, Any]:
    """The figures of a plan."""
    return {
        "system": one.offer.system,
        "gpu": one.offer.gpu,
        "gpus": one.gpus,
        "instances": one.instances,
        "tp": one.offer.tp,
        "pp": one.offer.pp,
        "dp": one.offer.dp,
        "weight_dtype": one.offer.weight_dtype,
        "kv_dtype": one.offer.kv_dtype,
        "deployment": dict(one.offer.deployment),
        "parameters": dict(one.parameters),
        "usd_per_hour": round(one.usd_per_hour, 6),
        "price_basis": prices.title,
        "catalogue_usd_per_hour": _catalogue_usd(one),
        "rate_rps": wanted.rate_rps,
        "headroom": wanted.headroom,
        "target": wanted.target,
        "attainment": one.verdict.attainment,
        "attainment_low": one.verdict.low,
        "attainment_high": one.verdict.high,
        "confirmed": one.verdict.carries,
        "confirmed_runs": one.verdict.runs,
        "confirmed_requests": one.verdict.requests,
        **_capacity(one),
        **_figures(one),
        "step_time": "fitted" if one.fitted else "unfitted",
        "simulated": True,
    }


def _figures(one: SizedOffer) -> dict[str, float | None]:
    found = one.figures
    known = {} if found is None else asdict(found)
    keeps = known.pop("keeps", None)
    limit_w = one.gpus * gpu(one.offer.gpu).power_w
    rounded = {name: None if value is None else round(value, 6) for name, value in known.items()}
    return {
        **rounded,
        "gpu_power_limit_w": limit_w,
        "keeps_probability": None if keeps is None else round(keeps, 4),
    }


def _catalogue_usd(one: SizedOffer) -> float | None:
    """The price by the catalogue's list; None where it has none."""
    price = default_prices().price(one.offer.gpu)
    return None if price is None else round(price * one.gpus, 6)


def _capacity(one: SizedOffer) -> dict[str, float | str | None]:
    found = one.capacity
    if found is None:
        return {"capacity_rps": None, "low_rps": None, "high_rps": None, "outcome": None}
    high = found.high_rps if math.isfinite(found.high_rps) else None
    return {
        "capacity_rps": found.capacity_rps,
        "low_rps": found.low_rps,
        "high_rps": high,
        "outcome": found.outcome.value,
    }


def plan_table(rows: Iterable[dict[str, Any]]) -> RichTable:
    """Plans side by side, the cheapest first; intervals stand below their figure."""
    lines = []
    for row in rows:
        name = "\n".join(plan_parts(row))
        price = f"{row['usd_per_hour']:.2f}"
        if row["catalogue_usd_per_hour"] != row["usd_per_hour"]:
            of_catalogue = row["catalogue_usd_per_hour"]
            price += "\n(–)" if of_catalogue is None else f"\n({of_catalogue:.2f})"
        spare = spare_of(row)
        shown = "" if spare is None else f"{spare:+.0%}"
        share = attainment_text(row)
        lines.append((name, price, share, _interval(row), shown, _keeps(row)))
    heads = ("plan", "USD/h", "in SLO %", "carries", "spare", "P(SLO)")
    return one_group("Plans", heads, lines).rich("cheapest plans (simulated; rates in req/s)")


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


def price_lines(prices: PriceList, plans: Sequence[SizedOffer], kinds: Sequence[str]) -> list[str]:
    """The basis of the prices, that of the catalogue where they differ, and what has no price.

    `kinds` are the GPUs that were asked for, none if all.
    """
    catalogue = default_prices()
    lines = [f"prices: {prices.title}"]
    if guessed := sorted({one.offer.gpu for one in plans} & prices.estimates):
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
    runs = [one.verdict for one in plans]
    each = [one.requests // one.runs for one in runs]
    lengths = f"{min(each):,}" + (f" to {max(each):,}" if max(each) > min(each) else "")
    lines = [
        f"in SLO: at least {min(one.runs for one in runs)} runs of {lengths} requests a plan, on "
        "seeds that the search did not use; below, the 95 % interval"
    ]
    if refuted:
        worst = min(refuted, key=lambda one: one.verdict.attainment)
        lines.append(
            f"{len(refuted)} carried the load in the search and not in these runs, and are left "
            f"out; the worst had {worst.verdict.attainment:.1%} in SLO: {worst.name}"
        )
    return lines


def _interval(row: dict[str, Any]) -> str:
    low = "" if row["low_rps"] is None else f"{row['low_rps']:.3g}"
    if row["capacity_rps"] is None:
        undecided = "undecided\n" * (row["outcome"] == "undecided")
        return f"{undecided}over {low}" if low else ""
    high = "" if row["high_rps"] is None else f" to {row['high_rps']:.3g}"
    return f"{row['capacity_rps']:.3g}\n{low}{high}"


def _keeps(row: dict[str, Any]) -> str:
    keeps = row["keeps_probability"]
    return "–" if keeps is None else f"{keeps:.0%}"


def spare_of(row: dict[str, Any]) -> float | None:
    """Capacity over the rate, minus one; None where no capacity is known."""
    most = row["capacity_rps"] or row["low_rps"]
    return None if most is None else most / row["rate_rps"] - 1
