"""`slo-bench plan`: which GPUs, how many and set how carry a load at the least cost."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ...harness.experiments.config.setting import ARRIVES
from ...workloads.errors import SloBenchError
from ..options import declared as options
from ..options.completion import listed
from ..options.from_schema import Given, Offer, with_options

EXAMPLES = (
    "slo-bench plan --rate 10",
    "slo-bench plan --model llama-3.1-70b --rate 20 --slo ttft=2,tpot=0.1 --gpu h100-80g,a100-80g",
    "slo-bench plan --rate 10 --system vllm --system distserve --target 0.99 --headroom 0.2",
    "slo-bench plan --rate 10 --price a100-80g=1.8 --price h100-80g=2.5 --out plans --json",
)

_CHOICE = "Deployment"

Rate = Annotated[
    float,
    typer.Option(metavar="R", help="Offered rate in requests per second.", rich_help_panel=ARRIVES),
]
Target = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Target attainment: minimum share of requests that meet their SLO.",
        rich_help_panel=ARRIVES,
    ),
]
Headroom = Annotated[
    float,
    typer.Option(
        metavar="SHARE", help="Spare capacity, as a share of the rate.", rich_help_panel=ARRIVES
    ),
]
Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        "-g",
        metavar="G,…",
        help="GPU types to choose from. May be repeated. Default: all of `slo-bench list gpus`.",
        autocompletion=listed("gpus"),
        rich_help_panel=_CHOICE,
    ),
]
Price = Annotated[
    list[str] | None,
    typer.Option(
        metavar="G=USD",
        help="Price of a GPU per hour, instead of the catalogue's. May be repeated.",
        rich_help_panel=_CHOICE,
    ),
]
MaxGpus = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Maximum total number of GPUs.", rich_help_panel=_CHOICE),
]
Plans = Annotated[
    int, typer.Option(metavar="N", min=1, help="Number of plans to print, the cheapest first.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only the plans, as a JSON list.")]


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
    max_gpus: MaxGpus = 64,
    plans: Plans = 5,
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest GPUs, number, parallelism and settings that carry a load within its SLO.

    Every plan is simulated at the rate until its attainment is certain; its capacity has an
    interval. With --out, the first plan's launch script and experiment are written too.
    """
    from ...reports.pages.plan import plan_rows, plan_table
    from ...tuner.planning import TargetLoad, plan_cheapest
    from ...tuner.planning.launch_files import write_launch_files
    from ..options.experiment import experiment_of
    from ..output.progress import changing_line

    options.resumed_in(out, resume)
    given.settings.setdefault("systems", ("vllm",))
    experiment = experiment_of(given)
    wanted = TargetLoad(rate, target, headroom, max_gpus, plans)
    kinds = tuple(name for one in gpu or () for name in one.split(","))
    try:
        with changing_line("first simulation") as say:
            planned = plan_cheapest(
                experiment,
                wanted,
                kinds=kinds,
                prices=_prices(price or []),
                folder=out,
                resume=resume,
                say=say,
            )
    except KeyboardInterrupt:
        where = "" if out is None else f"; go on with the same command and --resume --out {out}"
        typer.echo(f"interrupted{where}", err=True)
        raise typer.Exit(130) from None
    files = [] if out is None else write_launch_files(out, experiment, wanted, planned.plans[0])
    rows = plan_rows(planned)
    if as_json:
        typer.echo(json.dumps(rows, allow_nan=False))
        return
    from ..output.console import terminal

    console = terminal()
    console.print(plan_table(rows))
    lines = [
        f"{planned.tried} of {planned.offers} kinds of instance were simulated; the others could "
        "only cost more"
    ]
    if any(row["step_time"] != "fitted" for row in rows):
        lines.append("* step times estimated from the GPU's data sheet, not fitted to measurements")
    if not price:
        lines.append("prices are the catalogue's; set yours with --price GPU=USD")
    lines += [f"written: {path}" for path in files]
    if not files:
        lines.append("with --out DIR: a launch script and the experiment of the first plan")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


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
