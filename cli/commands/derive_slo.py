"""`slo-bench derive-slo`: SLOs from the latencies of each model on GPUs of its own."""

from __future__ import annotations

import json
from typing import Any

import typer

from ...workloads.errors import SloBenchError
from ..options.from_schema import Given, offer, with_options
from ..options.parameters import flag, option
from ..output.progress import phase

EXAMPLES = (
    'slo-bench derive-slo --models "fleet(llama-3.1-8b*4, qwen2.5-3b*4)" --rate 4',
    'slo-bench derive-slo --models "fleet(qwen3-8b*2)" --rate 4 --bound ttft --each --json',
)
_DEFAULTS: dict[str, Any] = {
    "workload": "azure-conv",
    "gpu": "h100-80g",
    "duration_s": 3600.0,
    "seed": 0,
}
_CHANGED = {
    "workload": {"help": "Workload, as in `run`. Default: azure-conv.", "repeated": False},
    "gpu": {"help": "Kind of GPU. Default: h100-80g."},
    "duration_s": {"help": "Seconds of arrivals. Default: 3600."},
    "seed": {"help": "Seed of the random numbers. Default: 0."},
}


@with_options
def derive_slo(
    models: str = option("fleet(…)|zipf(…)", "Models of the requests, as in `run`.", default=...),
    rate: float = option("R", "Total request rate of all models, req/s.", default=...),
    workload_options: Given = offer(only=_DEFAULTS, changed=_CHANGED),
    quantile: float = option("Q", "Quantile of each model's latencies.", default=0.95),
    bound: list[str] | None = option("ttft|tpot", "Derive only this bound. May be repeated."),
    each: bool = flag("Print every copy of a model, not their median.", "--each"),
    as_json: bool = flag("Print only JSON.", "--json"),
) -> None:
    """Derive SLOs from simulations in which every model has its own GPUs.

    Prints a value for --slo; --slo-scale multiplies it.
    """
    from ...harness.experiments.derived_slo import by_shape, dedicated_slos, slo_text
    from ...harness.experiments.execution.cell_specs import PlacementSpec, WorkloadSpec, source
    from ...harness.experiments.execution.cells import models_of

    if not 0 < quantile <= 1:
        raise SloBenchError(f"--quantile must be above 0 and at most 1 but is {quantile}")
    strangers = set(bound or ()) - {"ttft", "tpot"}
    if strangers:
        raise SloBenchError(f"--bound must be ttft or tpot but is {min(strangers)!r}")
    settings = _DEFAULTS | workload_options.settings
    spec = WorkloadSpec(settings["workload"], models=models)
    workload = source(spec).make(
        rate_rps=rate, duration_s=settings["duration_s"], seed=settings["seed"]
    )
    # Each has as many GPUs as it needs.
    alone = models_of(PlacementSpec("llama-3.1-8b", settings["gpu"], 1), spec, gpus=1 << 30)
    with phase("simulating every model alone"):
        slos = dedicated_slos(workload, alone, quantile)
    if not each:
        slos = by_shape(slos)
    if bound:
        slos = {name: {b: bounds[b] for b in bound} for name, bounds in slos.items()}
    typer.echo(json.dumps(slos, indent=2) if as_json else slo_text(slos))
