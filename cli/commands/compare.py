"""`slo-bench compare`: differences between two sets of results, and which are significant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...workloads.errors import SloBenchError
from ..options.declared import HtmlOrJson
from ..options.from_schema import with_options
from ..options.parameters import argument, option, option_group

if TYPE_CHECKING:
    from ...reports.compare.comparing import Comparison
    from ...workloads.request import Slo

EXAMPLES = (
    "slo-bench compare runs/before runs/after",
    "slo-bench compare runs/quickstart --systems vllm,sarathi --html comparison.html",
    "slo-bench compare runs/before runs/after --metric attainment,ttft_p99 --rates 4,6 --json",
    "slo-bench compare vllm-before.json vllm-after.json --slo ttft=1,tpot=0.15",
    "slo-bench compare runs/before mlperf_log_summary.txt --rates 4",
)

SYSTEMS = option("X,Y", "Compare system X of A with system Y of B, or of A if B is left out.")
METRICS = option(
    "M,…",
    "Metrics to compare: attainment, goodput, throughput, output_tokens, weighted_turnaround; "
    "ttft_, tpot_ or e2e_ with mean, p50, p90 or p99.",
)


@option_group
class Compared:
    """Options of a comparison: rates, SLO and the statistics."""

    rates: str | None = option("2,4|2:8:2", "Compare only these offered rates, req/s.")
    slo: str | None = option(
        "ttft=1s,tpot=150ms", "SLO for all requests, instead of their own bounds."
    )
    allow_different: list[str] | None = option(
        "NAME", "Compare although this condition differs (a setting). May be repeated."
    )
    confidence: float = option(
        "C", "Confidence level of the intervals: 1 − level of significance.", default=0.95
    )
    seed: int = option("N", "Seed of the bootstrap.", default=0)

    def comparison(
        self,
        a: Path,
        b: Path | None,
        systems: str | None,
        metric: str | None,
        *,
        gated: bool = False,
    ) -> Comparison:
        """Compare two sets of results; show progress if it is slow.

        Raises:
            SloBenchError: an option cannot be read, or A and B cannot be compared.
        """
        from ...reports.compare import comparing
        from ...reports.compare.results import COMPARED, GATED, metrics_named
        from ..options.experiment_options import numbers
        from ..output.progress import counted

        pair = _pair(systems)
        if b is None and pair is None:
            raise SloBenchError(
                "give a second set of results, or --systems X,Y to compare within one"
            )
        metrics = metrics_named(
            ",".join(GATED if gated else COMPARED) if metric is None else metric
        )
        results_a = comparing.read_results(a)
        results_b = results_a if b is None else comparing.read_results(b)
        with counted("levels") as progress:
            return comparing.compare(
                results_a,
                results_b,
                metrics=metrics,
                systems=pair,
                rates=numbers(self.rates, "--rates"),
                slo=None if self.slo is None else one_slo(self.slo),
                allow_different=self.allow_different or (),
                confidence=self.confidence,
                seed=self.seed,
                progress=progress,
            )


@with_options
def compare(
    *,
    a: Path = argument(
        "A",
        "Run folder, or a result file of `vllm bench serve` (--save-detailed), SGLang's "
        "bench_serving (--output-details), guidellm (benchmarks.json), aiperf "
        "(profile_export.jsonl), inference-perf (per_request_lifecycle_metrics.json), genai-bench, "
        "llmperf (individual_responses.json), evalscope (benchmark_data.db) or MLPerf "
        "(mlperf_log_summary.txt).",
    ),
    b: Path | None = argument(
        "[B]", "Run folder or result file, as A. If left out: A, with --systems.", default=None
    ),
    systems: str | None = SYSTEMS,
    metric: str | None = METRICS,
    compared: Compared,
    output: HtmlOrJson,
) -> None:
    """Compare two sets of results: differences, their intervals, and which are significant."""
    from ...reports.compare.loadgen import is_summary
    from ...reports.compare.output import comparison_json, comparison_text, write_comparison

    if b is not None and (is_summary(a) or is_summary(b)):
        has_other_options = any(setting is not None for setting in (output.html, systems, metric))
        if has_other_options or compared != Compared(rates=compared.rates):
            raise SloBenchError(
                "LoadGen's summary has no single requests: of the options only --rates and --json "
                "go with it"
            )
        _beside_summary(a, b, compared, output)
        return
    output.show(
        compared.comparison(a, b, systems, metric),
        write_comparison,
        comparison_json,
        comparison_text,
    )


def _beside_summary(a: Path, b: Path, compared: Compared, output: HtmlOrJson) -> None:
    """Show runs and LoadGen's summaries figure by figure."""
    from rich.console import Group
    from rich.text import Text

    from ...reports.compare.loadgen import beside_table, summaries
    from ..options.experiment_options import numbers
    from ..output.console import print_result

    rates = numbers(compared.rates, "--rates")
    figures = [summary for path in (a, b) for summary in summaries(path, rates)]
    if output.as_json:
        typer.echo(json.dumps([summary.plain() for summary in figures], ensure_ascii=False))
        return
    note = (
        "Single figures without intervals: a summary of LoadGen has no single requests. "
        "Percentiles count requests that did not finish."
    )
    print_result(Group(beside_table(figures).rich(), Text(note)))


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
            f"--slo {text!r} must be fixed bounds for all requests, as in ttft=1s,tpot=150ms"
        )
    return Slo(**{f"{short}_s": seconds for short, seconds in fixed.items()})
