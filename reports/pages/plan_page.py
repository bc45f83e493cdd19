"""The page of a plan: every plan by price, latency, spare capacity and energy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..figures.drawing import page_data
from ..figures.figure import ONLY, Axis, Figure, View, percent_text, seconds_text
from .document import page, write_page
from .plan import (
    confirmed_lines,
    plan_parts,
    plan_rows,
    price_lines,
    spare_of,
    unfitted_lines,
)
from .table import Cell, Table, one_group

if TYPE_CHECKING:
    from ...tuner.planning import DeploymentPlan

Row = dict[str, Any]

FRONT, OTHERS = "not beaten in all", "beaten in all"
_AXES = {
    "ttft_p99_s": Axis("TTFT p99", "seconds"),
    "tpot_p99_s": Axis("TPOT p99", "seconds"),
    "spare": Axis("spare capacity over the rate", "percent"),
    "joules_per_output_token": Axis("J per output token", "number"),
}
_MORE_IS_BETTER = ("spare",)


def write_plan(planned: DeploymentPlan, out: Path) -> Path:
    """Write the page, whole or not at all, and return where it is.

    Raises:
        SloBenchError: it cannot be written.
    """
    rows = [{**row, "spare": spare_of(row)} for row in plan_rows(planned)]
    best = undominated(rows)
    prices = price_lines(planned.prices, planned.plans, planned.kinds)
    figures = [figure for name in _AXES if (figure := _figure(rows, best, name)) is not None]
    wanted = planned.wanted
    text = page(
        "plan.html",
        page_data([FRONT, OTHERS], "simulated", figures),
        heading=f"Plans for {wanted.rate_rps:g} req/s",
        facts=[f"at least {wanted.target:.4g} of requests in SLO", prices[0]],
        answer=_answer(rows[0]),
        figures=figures,
        plans=_table(rows, best),
        notes=[
            *unfitted_lines(rows),
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
    return [not any(_beats(one, row) for one in rows if one is not row) for row in rows]


def _beats(one: Row, other: Row) -> bool:
    names = ("usd_per_hour", *_AXES)
    both = [name for name in names if None not in (one.get(name), other.get(name))]
    gains = [(one[name] - other[name]) * (1 if name in _MORE_IS_BETTER else -1) for name in both]
    return bool(min(gains) >= 0 and max(gains) > 0)


def _figure(rows: Sequence[Row], best: Sequence[bool], name: str) -> Figure | None:
    """Plans by price and one more figure; None where no plan has it."""
    curves: list[View] = []
    for place, wanted in enumerate((True, False)):
        chosen = [
            row
            for row, is_best in zip(rows, best, strict=True)
            if is_best is wanted and row.get(name) is not None
        ]
        if chosen:
            curves.append(
                {
                    "s": place,
                    "x": [row["usd_per_hour"] for row in chosen],
                    "y": [row[name] for row in chosen],
                    "labels": [", ".join(plan_parts(row)[:2]) for row in chosen],
                }
            )
    if not curves:
        return None
    better = "higher" if name in _MORE_IS_BETTER else "lower"
    return Figure(
        id=f"price-{name}",
        kind="lines",
        title=f"Price and {_AXES[name].label}",
        note=f"Left and {better} is better. The front is that of price and all four figures.",
        x=Axis("USD per hour", "number"),
        y=_AXES[name],
        views={ONLY: {"series": curves, "lines": [], "scatter": True}},
        hover="point",
    )


def _answer(row: Row) -> str:
    name = ", ".join(plan_parts(row)[:2])
    return (
        f"Cheapest: {name}, for {row['usd_per_hour']:.2f} USD per hour "
        f"with {row['attainment']:.1%} of requests in SLO."
    )


def _table(rows: Sequence[Row], best: Sequence[bool]) -> Table:
    heads = (
        *("plan", "USD per hour", "catalogue USD per hour", "in SLO", "95 % interval", "spare"),
        *("TTFT p99", "TPOT p99", "J per output token", "mean power", "power limit", "P(SLO)"),
    )
    lines: list[list[str | Cell]] = []
    for row, is_best in zip(rows, best, strict=True):
        of_catalogue = row["catalogue_usd_per_hour"]
        lines.append(
            [
                Cell(", ".join(plan_parts(row)), best=is_best),
                f"{row['usd_per_hour']:.2f}",
                "–" if of_catalogue is None else f"{of_catalogue:.2f}",
                percent_text(row["attainment"]),
                f"{row['attainment_low']:.1%} to {row['attainment_high']:.1%}",
                "–" if row["spare"] is None else f"{row['spare']:+.0%}",
                *(seconds_text(row[name] or math.nan) for name in ("ttft_p99_s", "tpot_p99_s")),
                _number(row["joules_per_output_token"], "J"),
                _number(row["gpu_power_mean_w"], "W"),
                _number(row["gpu_power_limit_w"], "W"),
                "–" if row["keeps_probability"] is None else f"{row['keeps_probability']:.0%}",
            ]
        )
    note = (
        "Bold: no other plan is as good in price, TTFT, TPOT, spare and energy and better in one."
    )
    return one_group("Plans", heads, lines, note=note)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"
