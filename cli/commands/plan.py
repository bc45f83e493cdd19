"""`slo-bench plan`: the cheapest GPUs, their number and settings that carry a load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ...harness.experiments.config.setting import ARRIVES
from ...workloads.errors import SloBenchError
from ..options import declared as options
from ..options.from_schema import Given, Offer, with_options
from ..options.names import listed
from ..options.parameters import flag, option

EXAMPLES = (
    "slo-bench plan --rate 10",
    "slo-bench plan --model llama-3.1-70b --rate 20 --slo ttft=2,tpot=0.1 --gpu h100-80g,a100-80g",
    "slo-bench plan --rate 10 --system vllm --system distserve --target 0.99 --headroom 0.2",
    "slo-bench plan --rate 10 --gpu h100-80g,l40s --sweep weight_dtype=bf16,fp8",
    "slo-bench plan --rate 10 --price a100-80g=1.8 --price h100-80g=2.5 --out plans --json",
    "slo-bench plan --rate 10 --prices our-cluster.toml --plans 10 --html plans.html",
)

_CHOICE = "Deployment"

Rate = Annotated[float, option("R", "Offered rate in requests per second.", panel=ARRIVES)]
Target = Annotated[
    float,
    option(
        "SHARE", "Target attainment: minimum share of requests that meet their SLO.", panel=ARRIVES
    ),
]
Headroom = Annotated[
    float, option("SHARE", "Spare capacity, as a share of the rate.", panel=ARRIVES)
]
Kinds = Annotated[
    list[str] | None,
    option(
        "G,…",
        "GPU types to choose from. May be repeated. Default: all of `slo-bench list gpus`.",
        "--gpu",
        "-g",
        complete=listed("gpus"),
        panel=_CHOICE,
    ),
]
Price = Annotated[
    list[str] | None,
    option(
        "G=USD",
        "Price of a GPU per hour, instead of the list's. May be repeated.",
        panel=_CHOICE,
    ),
]
Prices = Annotated[
    str | None,
    option(
        "LIST",
        "Price list: a TOML file (docs/planning.md#prices) or runpod-serverless. Default: the "
        "catalogue's (large clouds, on demand).",
        panel=_CHOICE,
    ),
]
MaxGpus = Annotated[int, option("N", "Maximum total number of GPUs.", min=1, panel=_CHOICE)]
Plans = Annotated[int, option("N", "Number of plans to print, the cheapest first.", min=1)]
Html = Annotated[
    Path | None,
    option(
        "FILE",
        "Also write an HTML page: plans by price, p99, spare capacity and energy.",
        "--html",
    ),
]
AsJson = Annotated[bool, flag("Print only the plans, as a JSON list.", "--json")]


_ASKED = (
    *("systems", "sweep", "set", "workload", "arrivals", "slo", "slo_scale", "seed"),
    *("model", "tp", "pp", "router"),
)


@with_options
def plan(
    rate: Rate,
    given: Annotated[Given, Offer(only=_ASKED)],
    target: Target = 0.9,
    headroom: Headroom = 0.0,
    gpu: Kinds = None,
    price: Price = None,
    prices: Prices = None,
    max_gpus: MaxGpus = 64,
    plans: Plans = 5,
    out: options.Out = None,
    resume: options.Resume = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest GPUs, number, parallelism and settings that carry a load within its SLO.

    Every plan is confirmed by long simulations on seeds that the search did not use; its capacity
    has an interval. With --out, the first plan's launch script and experiment are written too.
    """
    from ...reports.pages.plan import confirmed_lines, plan_rows, plan_table, price_lines
    from ...reports.pages.plan_page import write_plan
    from ...tuner.planning import TargetLoad, default_prices, plan_cheapest, read_prices
    from ...tuner.planning.launch_files import write_launch_files
    from ..options.experiment import experiment_of
    from ..output.console import print_result
    from ..output.progress import changing_line, interruptible

    options.resumed_in(out, resume)
    given.settings.setdefault("systems", ("vllm",))
    experiment = experiment_of(given)
    wanted = TargetLoad(rate, target, headroom, max_gpus, plans)
    listed_prices = default_prices() if prices is None else read_prices(prices)
    kinds = tuple(name for one in gpu or () for name in one.split(","))
    where = "" if out is None else f"; go on with the same command and --resume --out {out}"
    with interruptible(f"interrupted{where}"), changing_line("first simulation") as say:
        planned = plan_cheapest(
            experiment,
            wanted,
            kinds=kinds,
            prices=listed_prices.changed(_prices(price or [])),
            folder=out,
            resume=resume,
            say=say,
        )
    files = [] if out is None else write_launch_files(out, experiment, planned)
    if html is not None:
        files.append(write_plan(planned, html))
    rows = plan_rows(planned)
    if as_json:
        typer.echo(json.dumps(rows, allow_nan=False))
        return
    lines = [
        f"{planned.tried} of {planned.offers} kinds of instance were simulated; the others could "
        "only cost more",
        *confirmed_lines(planned),
    ]
    if any(row["step_time"] != "fitted" for row in rows):
        lines.append("* step times estimated from the GPU's data sheet, not fitted to measurements")
    if any(row["keeps_probability"] is not None for row in rows):
        lines.append(
            "P(SLO): probability that the real server keeps the target at this rate, by how far "
            "earlier predictions were from measurements (docs/accuracy.md#bands)"
        )
    lines += price_lines(planned)
    lines += [f"{system} has no plan here: {why}" for system, why in planned.absent.items()]
    lines += [f"written: {path}" for path in files]
    if out is None:
        lines.append("with --out DIR: a launch script and the experiment of the first plan")
    print_result(plan_table(rows), *lines)


def _prices(given: list[str]) -> dict[str, float]:
    found = {}
    for one in given:
        name, equals, text = one.partition("=")
        try:
            found[name.strip()] = float(text)
        except ValueError:
            equals = ""
        if not equals:
            raise SloBenchError(f"cannot read --price {one!r}; write GPU=USD as in a100-80g=1.8")
    return found
