"""`slo-bench derive-slo`: what each model does alone on GPUs of its own, as SLOs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ...workloads.errors import SloBenchError
from ..options.completion import listed

EXAMPLES = (
    'slo-bench derive-slo --models "fleet(llama-3.1-8b*4, qwen2.5-3b*4)" --rate 4',
    'slo-bench derive-slo --models "fleet(qwen3-8b*2)" --rate 4 --bound ttft --each --json',
)
DEFAULT_DURATION_S = 3600.0


def derive_slo(
    models: Annotated[str, typer.Option(metavar="fleet(…)|zipf(…)", help="As in `run`.")],
    rate: Annotated[float, typer.Option(metavar="R", help="Of all models together, req/s.")],
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            "-w",
            metavar="W",
            help="As in `run`.",
            autocompletion=listed("workloads"),
        ),
    ] = "azure-conv",
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu", "-g", metavar="G", help="The kind of GPU.", autocompletion=listed("gpus")
        ),
    ] = "h100-80g",
    duration: Annotated[
        float, typer.Option(metavar="S", help="Seconds of arrivals.")
    ] = DEFAULT_DURATION_S,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random numbers.")] = 0,
    quantile: Annotated[float, typer.Option(metavar="Q", help="Of each model's latencies.")] = 0.95,
    bound: Annotated[
        list[str] | None,
        typer.Option(metavar="ttft|tpot", help="Only this one. May be repeated."),
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Every copy of a shape apart, not their median.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Derive SLOs: every model serves its own requests on GPUs of its own (simulated).

    Prints what --slo takes; --slo-scale multiplies it.
    """
    from ...harness.experiments.execution.cells import (
        PlacementSpec,
        WorkloadSpec,
        models_of,
        source,
    )
    from ...harness.validation.derived_slo import by_shape, dedicated_slos, slo_text

    if not 0 < quantile <= 1:
        raise SloBenchError(f"--quantile must be above 0 and at most 1 but is {quantile}")
    strangers = set(bound or ()) - {"ttft", "tpot"}
    if strangers:
        raise SloBenchError(f"--bound must be ttft or tpot but is {min(strangers)!r}")
    spec = WorkloadSpec(workload, models=models)
    made = source(spec).make(rate_rps=rate, duration_s=duration, seed=seed)
    # Each has as many GPUs as it needs.
    alone = models_of(PlacementSpec("llama-3.1-8b", gpu, 1), spec, gpus=1 << 30)
    slos = dedicated_slos(made, alone, quantile)
    if not each:
        slos = by_shape(slos)
    if bound:
        slos = {name: {b: found[b] for b in bound} for name, found in slos.items()}
    typer.echo(json.dumps(slos, indent=2) if as_json else slo_text(slos))
