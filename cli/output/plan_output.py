"""What `slo-bench plan` prints and writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...harness.policies.systems import system
from ...predictors.dtypes import AUTO
from ...predictors.operators.assembly import is_file
from ...predictors.profiles.profile_format import outside_scope
from ...predictors.profiles.scope import middle_range
from ...predictors.specs import model
from ...reports.pages import plan_page
from ...reports.pages.slo_text import written_slo_text
from ...reports.terminal.screen import Column, Group, Screen
from ...tuner.planning.launch_files import write_launch_files
from ...tuner.planning.offers import spread_text
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
        *_texts_of_columns(rows),
        f"{planned.tried} of {planned.offers} kinds of instance were simulated; the others could "
        "only cost more",
        *plan_page.confirmed_lines(planned.plans, planned.refuted),
        *plan_page.unfitted_lines(rows),
        *plan_page.decided_lines(rows),
    ]
    lines += plan_page.price_lines(planned.prices, planned.plans, planned.kinds)
    lines += _beyond_profile(planned, experiment)
    lines += [f"{system} has no plan here: {why}" for system, why in planned.absent.items()]
    if files:
        lines.append(f"written: {_listed_files(files)}")
    if out is None:
        lines.append("with --out DIR: a launch script and the experiment of the first plan")
    print_result(_screen(_question(planned, experiment), rows, experiment, lines))


def _listed_files(files: Sequence[Path]) -> str:
    """`plans/ (experiment.toml, launch.sh), plans.html`: several files of a folder after it."""
    names: dict[Path, list[str]] = {}
    for path in files:
        names.setdefault(path.parent, []).append(path.name)
    return ", ".join(
        str(folder / members[0]) if len(members) == 1 else f"{folder}/ ({', '.join(members)})"
        for folder, members in names.items()
    )


def _beyond_profile(planned: DeploymentPlan, experiment: ExperimentSchema) -> Iterator[str]:
    """A line where plans use a calibrated profile outside the loads that it was made with."""
    from ...harness.experiments.execution.cells import workload_of

    for plan in planned.plans:
        rate_rps = planned.load.whole_rps
        spec = plan.spec(experiment, rate_rps)
        name = spec.placement.profile
        if is_file(name):
            workload = workload_of(spec)
            lengths = ("prompt_tokens", "output_tokens")
            uses = {side: middle_range(getattr(workload, side)) for side in lengths}
            uses["rate_rps"] = rate_rps / plan.instances, rate_rps / plan.instances
            if text := outside_scope(str(name), uses):
                yield f"{plan.name}: {text}"


def _question(planned: DeploymentPlan, experiment: ExperimentSchema) -> str:
    """What the plans answer: the load, what is served, and when a request is in time."""
    load = planned.load
    spare = f" + {load.headroom:.0%}" if load.headroom else ""
    slos = " or ".join(written_slo_text(str(slo)) or "the trace's own" for slo in experiment.slo)
    return (
        f"Cheapest GPUs for {load.rate_rps:g} req/s{spare} of {experiment.model[0]}, "
        f"{experiment.workload[0]}, {load.target:.4g} of requests within {slos}, on "
        f"{' or '.join(experiment.systems)} (simulated):"
    )


def _screen(
    question: str, rows: Sequence[dict[str, Any]], experiment: ExperimentSchema, notes: list[str]
) -> Screen:
    """A line for each plan, the cheapest first, with the settings that are not at their default."""
    several = len({row["system"] for row in rows}) > 1
    lines = []
    for row in rows:
        price = f"{row['usd_per_hour']:.2f}"
        if row["catalogue_usd_per_hour"] != row["usd_per_hour"]:
            price += f" ({plan_page.or_dash(row['catalogue_usd_per_hour'], '.2f')})"
        spare = plan_page.spare_of(row)
        lines.append(
            (
                ", ".join(_plan_words(row, experiment, several)),
                price,
                f"{100 * row['attainment']:.1f}\xa0%",
                _capacity_text(row),
                plan_page.or_dash(spare, "+.0%"),
                plan_page.or_dash(row["keeps_probability"], ".0%"),
            )
        )
    columns = (
        Column("plan", words=True),
        *(Column(head) for head in ("USD/h", "in SLO", "carries")),
        Column("spare", optional=True),
        Column("P(SLO)"),
    )
    answer = [f"Cheapest: {lines[0][0]}, {lines[0][1]} USD an hour."] if lines else []
    return Screen([question], columns, [Group(lines)], notes, answer)


def _plan_words(
    row: Mapping[str, Any], experiment: ExperimentSchema, with_system: bool
) -> Iterator[str]:
    """GPUs, how they are divided, the system among several, and settings not at their default."""
    yield f"{row['gpus']} × {row['gpu']}" + (" *" if row["step_time"] == "unfitted" else "")
    if row["gpus"] != row["instances"]:
        yield f"{row['instances']} × {spread_text(row['tp'], row['pp'], row['dp'])}"
    if with_system:
        yield row["system"]
    served = model(experiment.model[0])
    defaults: dict[str, object] = {
        "weight_dtype": served.dtype_of(AUTO),
        "kv_dtype": served.kv_dtype_of(AUTO),
        **system(row["system"]).parameters(),
    }
    values = {name: row[name] for name in ("weight_dtype", "kv_dtype")} | row["parameters"]
    for name, value in values.items():
        if defaults.get(name) != value:
            yield f"{name}={value}"
    for name, value in row["deployment"].items():
        if name not in values:
            yield f"{name}={value}"


def _capacity_text(row: Mapping[str, Any]) -> str:
    """The rate that the plan carries at most, with its interval."""
    low, high = row["low_rps"], row["high_rps"]
    if row["capacity_rps"] is None:
        return (
            "undecided"
            if row["outcome"] == "undecided"
            else f"over {plan_page.or_dash(low, '.3g')}"
        )
    ends = (plan_page.or_dash(end, ".3g") for end in (low, high))
    return f"{row['capacity_rps']:.3g} ({'–'.join(ends)})"


def _texts_of_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the columns hold whose heads do not say it."""
    carries = "carries: highest rate in req/s at the target, with its 95\xa0% interval"
    if any(row["catalogue_usd_per_hour"] != row["usd_per_hour"] for row in rows):
        carries += "; USD in brackets: the catalogue's"
    return [carries, *plan_page.keeps_lines(rows)]


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
        f"written: {_listed_files(files)}" if files else None,
    )
