"""`slo-bench sensitivity`: does a ranking of systems hold if the simulation is off?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...workloads.errors import SloBenchError
from ..options.declared import HtmlOrJson
from ..options.from_schema import Given, offer, with_options
from ..options.parameters import option

if TYPE_CHECKING:
    from ...harness.experiments.execution.cell_specs import CellSpec
    from ...tuner.sensitivity.perturbations import Perturbation

EXAMPLES = (
    "slo-bench sensitivity --system vllm --system sarathi",
    "slo-bench sensitivity -s vllm -s sarathi --perturb step-time=0.8:1.2:0.1 --perturb "
    "host=0.5,2,8",
    "slo-bench sensitivity -s sjf -s fifo --perturb prediction=0.2,0.5,1 --metric ttft_p99 --rate "
    "2",
    "slo-bench sensitivity -s ascendra,vllm-v0 --gpus 3 --router least-loaded -m mistral-7b",
    "slo-bench sensitivity -s vllm -s sglang --workload azure-conv --html sensitivity.html",
)
DEFAULT_SYSTEMS = ("vllm", "sarathi")
DEFAULT_REQUESTS = 500


_ASKED = (
    *("systems", "set", "workload", "slo", "requests", "seeds", "seed"),
    *("model", "gpu", "gpus", "tp", "router", "profile", "server_version"),
)
_CHANGED = {
    "systems": {"help": "Systems to compare, two or more. Default: vllm and sarathi."},
    "requests": {"help": f"Requests of each simulated cell. Default: {DEFAULT_REQUESTS}."},
}


@with_options
def sensitivity(
    *,
    experiment_options: Given = offer(only=_ASKED, changed=_CHANGED),
    perturb: list[str] | None = option(
        "NAME[=0.8,1.2|0.8:1.2:0.1]",
        "Quantity to perturb and its values: step-time, weights, attention, host (factors); "
        "prediction (σ of lognormal errors); burstiness (coefficient of variation of gaps). May "
        "be repeated. Default: all, each over its default range.",
    ),
    metric: str = option(
        "M",
        "Metric that ranks the systems: capacity, or at --rate attainment, goodput, throughput, "
        "output_tokens, makespan or weighted_turnaround; ttft_, tpot_, itl_ or e2e_ with mean, "
        "p50, p90 or p99; joules_ or usd_ with per_output_token or per_slo_request.",
        default="capacity",
    ),
    target: float = option("SHARE", "Target attainment of the capacity.", default=0.9),
    rate: float | None = option("R", "Offered rate in req/s, for metrics other than capacity."),
    output: HtmlOrJson,
) -> None:
    """Rank systems in simulation while step times, predictions or burstiness are perturbed.

    One quantity is changed at a time, over a range; the result names the values at which two
    systems change rank.
    """
    from ...reports.pages import sensitivity_page as shown
    from ...reports.terminal.experiment_lines import lines_of_settings
    from ...tuner.sensitivity.study import CAPACITY, Ranked, study
    from ..options.experiment_options import experiment_of
    from ..output.progress import counted

    ranked = Ranked(metric, target)
    if metric != CAPACITY and rate is None:
        raise SloBenchError(f"--metric {metric} is taken at one rate: give --rate")
    if metric == CAPACITY and rate is not None:
        raise SloBenchError("capacity is searched over rates; leave --rate out, or give --metric")
    defaults = {"systems": DEFAULT_SYSTEMS, "requests": DEFAULT_REQUESTS}
    with_defaults = replace(experiment_options, settings=defaults | experiment_options.settings)
    if rate is not None:
        with_defaults.settings["rates"] = (rate,)
    experiment = experiment_of(with_defaults)
    cells = _one_level(list(experiment.plan().cells))
    with counted("points") as progress:
        sensitivity_study = study(cells, _axes(perturb), ranked, progress=progress)
    tested = lines_of_settings(experiment.to_toml())
    output.show(
        sensitivity_study,
        shown.write_sensitivity,
        shown.sensitivity_json,
        lambda shown_study: shown.sensitivity_text(shown_study, tested),
    )


def _one_level(cells: list[CellSpec]) -> list[CellSpec]:
    """Return the middle rate of the default ladder of rates; a search starts there."""
    rates = sorted({(cell.rate_rps or 0.0, cell.replay_speed or 0.0) for cell in cells})
    chosen = rates[len(rates) // 2]
    return [cell for cell in cells if (cell.rate_rps or 0.0, cell.replay_speed or 0.0) == chosen]


def _axes(perturb: list[str] | None) -> list[tuple[Perturbation, tuple[float, ...]]]:
    from ...tuner.sensitivity.perturbations import PERTURBATIONS, perturbation
    from ..options.experiment_options import numbers

    axes: dict[str, tuple[Perturbation, tuple[float, ...]]] = {}
    for text in perturb or PERTURBATIONS:
        name, _, values = (piece.strip() for piece in text.partition("="))
        if name in axes:
            raise SloBenchError(f"--perturb {name} is given twice; keep one of them")
        axis = perturbation(name)
        axes[name] = (axis, numbers(values or None, f"--perturb {name}") or axis.values)
    return list(axes.values())
