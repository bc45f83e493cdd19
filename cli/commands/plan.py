"""`slo-bench plan`: the cheapest GPUs, their number and settings that carry a load."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ...harness.experiments.config.setting import ARRIVES
from ...workloads.errors import SloBenchError
from ..options import declared as options
from ..options.from_schema import Given, offer, with_options
from ..options.names import listed
from ..options.parameters import GPU, flag, option

EXAMPLES = (
    "slo-bench plan --rate 10",
    "slo-bench plan --model llama-3.1-70b --rate 20 --slo ttft=2,tpot=0.1 --gpu h100-80g,a100-80g",
    "slo-bench plan --rate 10 --system vllm --system distserve --target 0.99 --headroom 0.2",
    "slo-bench plan --rate 10 --like 'vllm serve Qwen/Qwen3-8B --max-num-seqs 128'",
    "slo-bench plan --rate 10 --gpu h100-80g,l40s --sweep weight_dtype=bf16,fp8",
    "slo-bench plan --rate 10 --price a100-80g=1.8 --price h100-80g=2.5 --out plans --json",
    "slo-bench plan --rate 10 --profile calibrated.toml --gpu rtx-4090,l40s",
    "slo-bench plan --fleet fleet.toml --system vllm --system distserve",
    "slo-bench plan --rate 10 --prices our-cluster.toml --plans 10 --html plans.html",
)

_choice = partial(option, panel="Deployment")
_load = partial(option, panel=ARRIVES)


_ASKED = (
    *("systems", "sweep", "set", "workload", "arrivals", "slo", "slo_scale", "seed"),
    *("model", "profile", "tp", "pp", "router", "server_version", "front_end", "like"),
)
_SEARCHED = ("gpu", "instances", "tp", "pp", "dp", "ep")

# In `--help`; the others in `--help-all`.
SHOWN = (
    *("--model", "--rate", "--slo", "--workload", "--gpu", "--target", "--headroom", "--fleet"),
    *("--max-gpus", "--prices", "--html", "--out"),
)


@with_options
def plan(
    *,
    experiment_options: Given = offer(only=_ASKED),
    rate: float | None = _load("R", "Offered rate in requests per second."),
    fleet: Path | None = _load(
        "FILE",
        "TOML file with several models and their rates in each hour of a day, instead of --rate "
        "(docs/planning.md#fleets).",
        "--fleet",
    ),
    target: float = _load(
        "SHARE", "Target attainment: minimum share of requests that meet their SLO.", default=0.9
    ),
    headroom: float = _load("SHARE", "Spare capacity, as a share of the rate.", default=0.0),
    gpu: list[str] | None = _choice(
        "G,…",
        "GPU types to choose from. May be repeated. Default: all of `slo-bench list gpus`.",
        *GPU,
        complete=listed("gpus"),
    ),
    price: list[str] | None = _choice(
        "G=USD", "Price of a GPU per hour, instead of the list's. May be repeated."
    ),
    prices: str | None = _choice(
        "LIST",
        "Price list: a TOML file (docs/planning.md#prices) or runpod-serverless. Default: the "
        "catalogue's (large clouds, on demand).",
    ),
    max_gpus: int = _choice("N", "Maximum total number of GPUs.", default=64, min=1),
    plans: int = option("N", "Number of plans to print, the cheapest first.", default=5, min=1),
    folder: options.RunFolder,
    html: Path | None = option(
        "FILE", "Also write an HTML page: plans by price, p99, spare capacity and energy.", "--html"
    ),
    as_json: bool = flag("Print only the plans, as a JSON list.", "--json"),
) -> None:
    """Find the cheapest GPUs, number, parallelism and settings that carry a load within its SLO.

    Every plan is confirmed by long simulations on seeds that the search did not use; its capacity
    has an interval. With --out, the first plan's launch script and experiment are written too.
    """
    from ...harness.load_generator.machine import cores
    from ...harness.policies.systems import DEFAULT_SYSTEM
    from ...tuner.planning.fleet import plan_fleet, read_fleet
    from ...tuner.planning.plan_search import PlanOptions, TargetLoad, plan_cheapest
    from ...tuner.planning.prices import default_prices, read_prices
    from ..interrupts import interruptible
    from ..options.experiment_options import experiment_of
    from ..options.like import with_like
    from ..output.plan_output import show_fleet, show_plans
    from ..output.progress import counted_line

    resumed = folder.resumed is not None
    if (rate is None) is (fleet is None):
        raise SloBenchError("give --rate R or --fleet FILE, one of them")
    if fleet is not None and html is not None:
        raise SloBenchError("--html compares plans for one --rate; leave it out with --fleet")
    experiment_options = with_like(experiment_options, _SEARCHED)
    experiment_options.settings.setdefault("systems", (DEFAULT_SYSTEM,))
    experiment = experiment_of(experiment_options)
    if "tp" not in experiment_options.settings and any(experiment.profile):
        experiment = experiment.model_copy(update={"tp": (None,)})  # the profile's is one of them
    target_load = TargetLoad(1.0 if rate is None else rate, target, headroom, max_gpus, plans)
    price_list = default_prices() if prices is None else read_prices(prices)
    kinds = tuple(name for names in gpu or () for name in names.split(","))
    priced = price_list.changed(_prices(price or []))
    out = folder.out

    def way_on() -> str:
        if out is None or not out.is_dir():  # nothing is kept
            return "interrupted"
        return f"interrupted; go on with the same command and --resume --out {out}"

    with (
        interruptible(way_on),
        counted_line("first simulation") as (say, count),
        options.pool_of(None, cores() if folder.jobs is None else folder.jobs) as pool,
    ):
        plan_options = PlanOptions(kinds, priced, out, resumed, say, count, pool)
        if fleet is None:
            planned = plan_cheapest(experiment, target_load, plan_options)
        else:
            fleet_plan = plan_fleet(read_fleet(fleet, experiment), target_load, plan_options)
    if fleet is None:
        show_plans(planned, experiment, out, html, as_json)
    else:
        show_fleet(fleet_plan, out, as_json)


def _prices(pairs: list[str]) -> dict[str, float]:
    prices = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        try:
            prices[name.strip()] = float(text)
        except ValueError:
            equals = ""
        if not equals:
            raise SloBenchError(f"cannot read --price {pair!r}; write GPU=USD as in a100-80g=1.8")
    return prices
