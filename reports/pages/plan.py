"""Plans as a table for the terminal, and as rows for machines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

from .table import one_group

if TYPE_CHECKING:
    from ...tuner.planning import DeploymentPlan, SizedOffer


def plan_rows(planned: DeploymentPlan) -> list[dict[str, Any]]:
    """One row for each plan, the cheapest first; rates in requests per second."""
    return [
        {
            "system": one.offer.system,
            "gpu": one.offer.gpu,
            "gpus": one.gpus,
            "instances": one.instances,
            "tp": one.offer.tp,
            "pp": one.offer.pp,
            "weight_dtype": one.offer.weight_dtype,
            "kv_dtype": one.offer.kv_dtype,
            "deployment": dict(one.offer.deployment),
            "parameters": dict(one.parameters),
            "usd_per_hour": round(one.usd_per_hour, 6),
            "rate_rps": planned.wanted.rate_rps,
            "headroom": planned.wanted.headroom,
            "target": planned.wanted.target,
            "attainment": one.attainment,
            "attainment_low": one.low,
            "attainment_high": one.high,
            **_capacity(one),
            "keeps_probability": None if one.keeps is None else round(one.keeps, 4),
            "step_time": "fitted" if one.fitted else "unfitted",
            "simulated": True,
        }
        for one in planned.plans
    ]


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
    """Plans side by side, the cheapest first."""
    lines = []
    for row in rows:
        spread = f"tp{row['tp']}" + (f" pp{row['pp']}" if row["pp"] > 1 else "")
        set_to = {"weight_dtype": row["weight_dtype"], **row["deployment"], **row["parameters"]}
        star = "" if row["step_time"] == "fitted" else " *"
        parameters = "".join(f"\n  {name}={value}" for name, value in set_to.items())
        shape = f"{row['gpus']} × {row['gpu']}{star}, {row['instances']} × {spread}"
        price, share = f"{row['usd_per_hour']:.2f}", f"{row['attainment']:.1%}".rstrip("%")
        name = f"{shape}: {row['system']}{parameters}"
        lines.append((name, price, share, _interval(row), _spare(row), _keeps(row)))
    heads = ("plan", "USD per h", "in SLO %", "carries", "spare", "P(SLO) %")
    return one_group("Plans", heads, lines).rich("cheapest plans (simulated; rates in req/s)")


def _interval(row: dict[str, Any]) -> str:
    if row["capacity_rps"] is None:
        undecided = "undecided, " * (row["outcome"] == "undecided")
        return "" if row["low_rps"] is None else f"{undecided}over {row['low_rps']:.3g}"
    high = "" if row["high_rps"] is None else f"{row['high_rps']:.3g}"
    return f"{row['capacity_rps']:.3g} [{row['low_rps']:.3g}, {high}]"


def _keeps(row: dict[str, Any]) -> str:
    keeps = row["keeps_probability"]
    return "–" if keeps is None else f"{100 * keeps:.0f}"


def _spare(row: dict[str, Any]) -> str:
    most = row["capacity_rps"] or row["low_rps"]
    return "" if most is None else f"{most / row['rate_rps'] - 1:+.0%}"
