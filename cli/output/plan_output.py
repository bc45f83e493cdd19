"""What `slo-bench plan` prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...reports.pages import plan_page
from ...tuner.planning.launch_files import write_launch_files
from .console import print_result

if TYPE_CHECKING:
    from ...harness.experiments.config.schema import ExperimentSchema
    from ...tuner.planning.fleet import FleetPlan
    from ...tuner.planning.plan_search import DeploymentPlan


def show_plans(
    planned: DeploymentPlan,
    experiment: ExperimentSchema,
    out: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Print the plans of one rate; write the first one's files to `out` and the page to `html`."""
    files = []
    if out is not None:
        first = planned.plans[0]
        files += write_launch_files(out, experiment, planned.load, first, planned.prices)
    if html is not None:
        files.append(plan_page.write_plan(planned, experiment, html))
    rows = plan_page.plan_rows(planned)
    if as_json:
        typer.echo(json.dumps(rows, allow_nan=False))
        return
    lines = [
        f"{planned.tried} of {planned.offers} kinds of instance were simulated; the others could "
        "only cost more",
        *plan_page.confirmed_lines(planned.plans, planned.refuted),
        *plan_page.unfitted_lines(rows),
    ]
    lines += plan_page.keeps_lines(rows)
    lines += plan_page.price_lines(planned.prices, planned.plans, planned.kinds)
    lines += [f"{system} has no plan here: {why}" for system, why in planned.absent.items()]
    lines += [f"written: {path}" for path in files]
    if out is None:
        lines.append("with --out DIR: a launch script and the experiment of the first plan")
    print_result(plan_page.plan_table(rows), *lines)


def show_fleet(planned: FleetPlan, out: Path | None, as_json: bool) -> None:
    """Print the plan of each pool; write its files to a folder of its name in `out`."""
    files = []
    if out is not None:
        for pool_plan in planned.pools:
            folder = out / pool_plan.pool.name
            files += write_launch_files(
                folder, pool_plan.pool.experiment, pool_plan.load, pool_plan.plan, planned.prices
            )
    rows = plan_page.fleet_rows(planned)
    if as_json:
        typer.echo(json.dumps(rows, allow_nan=False))
        return
    plans = [pool_plan.plan for pool_plan in planned.pools]
    print_result(
        plan_page.fleet_table(planned),
        *plan_page.hour_lines(planned),
        *plan_page.confirmed_lines(plans, planned.refuted),
        *plan_page.unfitted_lines(rows),
        *plan_page.price_lines(planned.prices, plans, planned.kinds),
        *(f"written: {path}" for path in files),
    )
