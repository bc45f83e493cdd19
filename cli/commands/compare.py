"""`slo-bench compare`: what differs between two sets of results, and what of it is noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...workloads.errors import SloBenchError

if TYPE_CHECKING:
    from ...reports.compare.comparing import Comparison
    from ...workloads.request import Slo

EXAMPLES = (
    "slo-bench compare runs/before runs/after",
    "slo-bench compare runs/quickstart --systems vllm,sarathi --html comparison.html",
    "slo-bench compare runs/before runs/after --metric attainment,ttft_p99 --rates 4,6 --json",
    "slo-bench compare vllm-before.json vllm-after.json --slo ttft=1,tpot=0.15",
)

A = Annotated[
    Path,
    typer.Argument(
        metavar="A",
        help="Run folder, or a result file of `vllm bench serve` (--save-detailed), guidellm "
        "(benchmarks.json) or aiperf (profile_export.jsonl).",
    ),
]
MetricNames = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="M,…",
        help="Metrics to compare: attainment, goodput, output_tokens; ttft_, tpot_ or e2e_ with "
        "mean, p50, p90 or p99.",
    ),
]
Systems = Annotated[
    str | None,
    typer.Option(
        metavar="X,Y", help="Compare system X of A with system Y of B, or of A if B is left out."
    ),
]
Rates = Annotated[
    str | None, typer.Option(metavar="2,4|2:8:2", help="Compare only these offered rates, req/s.")
]
OneSlo = Annotated[
    str | None,
    typer.Option(
        metavar="ttft=1,tpot=0.15",
        help="SLO in seconds for all requests, instead of their own bounds.",
    ),
]
Confidence = Annotated[
    float,
    typer.Option(metavar="C", help="Confidence level of the intervals: 1 − level of significance."),
]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the bootstrap.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


def compare(
    a: A,
    b: Annotated[
        Path | None,
        typer.Argument(
            metavar="[B]", help="Run folder or result file, as A. If left out: A, with --systems."
        ),
    ] = None,
    systems: Systems = None,
    metric: MetricNames = None,
    rates: Rates = None,
    slo: OneSlo = None,
    confidence: Confidence = 0.95,
    seed: Seed = 0,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two sets of results: differences, their intervals, and which are significant."""
    from ...reports.compare.text import comparison_json, comparison_text
    from ..output.console import terminal

    compared = compared_by(
        a, b, systems=systems, metric=metric, rates=rates, slo=slo, confidence=confidence, seed=seed
    )
    if html is not None:
        from ...reports.compare.html import write_comparison

        write_comparison(compared, html)
    if as_json:
        typer.echo(json.dumps(comparison_json(compared), allow_nan=False, ensure_ascii=False))
        return
    console = terminal()
    console.print(comparison_text(compared))
    if html is not None:
        console.print(str(html), markup=False, highlight=False, soft_wrap=True)


def compared_by(
    a: Path,
    b: Path | None,
    *,
    systems: str | None,
    metric: str | None,
    rates: str | None,
    slo: str | None,
    confidence: float,
    seed: int,
    gated: bool = False,
) -> Comparison:
    """Return the comparison that the options select; show progress if it is slow.

    Raises:
        SloBenchError: an option cannot be read, or A and B cannot be compared.
    """
    from ...reports.compare import comparing
    from ...reports.compare.results import COMPARED, GATED, metrics_named
    from ..options.experiment import numbers
    from ..output.progress import counted

    pair = _pair(systems)
    if b is None and pair is None:
        raise SloBenchError("give a second set of results, or --systems X,Y to compare within one")
    metrics = metrics_named(metric or ",".join(GATED if gated else COMPARED))
    results_a = comparing.read_results(a)
    results_b = results_a if b is None else comparing.read_results(b)
    with counted("levels") as progress:
        return comparing.compare(
            results_a,
            results_b,
            metrics=metrics,
            systems=pair,
            rates=numbers(rates, "--rates"),
            slo=None if slo is None else one_slo(slo),
            confidence=confidence,
            seed=seed,
            progress=progress,
        )


def _pair(systems: str | None) -> tuple[str, str] | None:
    if systems is None:
        return None
    names = [name.strip() for name in systems.split(",")]
    if len(names) != 2 or not all(names):
        raise SloBenchError(f"cannot read --systems {systems!r}; write two names, as vllm,sarathi")
    return names[0], names[1]


def one_slo(text: str) -> Slo:
    """The same fixed bounds for all requests.

    Raises:
        SloBenchError: they are drawn, by class, or cannot be read.
    """
    from ...workloads.request import Slo
    from ...workloads.slo import FixedBound, parse_slo

    entries = parse_slo(text).entries
    bounds = entries[0].bounds if len(entries) == 1 and entries[0].class_name is None else {}
    fixed = {k: bound.seconds for k, bound in bounds.items() if isinstance(bound, FixedBound)}
    if not fixed or len(fixed) != len(bounds):
        raise SloBenchError(
            f"--slo {text!r} must be fixed bounds for all requests, as in ttft=1,tpot=0.15"
        )
    return Slo(**{f"{short}_s": seconds for short, seconds in fixed.items()})
