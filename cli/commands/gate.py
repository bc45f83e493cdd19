"""`slo-bench gate`: fail a build with results significantly worse than the baseline's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...workloads.errors import SloBenchError
from ...workloads.parsing import finite
from ...workloads.whole_file import write_whole
from ..options.from_schema import with_options
from ..options.parameters import argument, flag, option
from .compare import METRICS, SYSTEMS, Compared

if TYPE_CHECKING:
    from ...reports.compare.comparing import Comparison, Judgement, Regression

EXAMPLES = (
    "slo-bench gate runs/baseline runs/candidate",
    "slo-bench gate runs/baseline runs/candidate --max-regression 2% --metric attainment,ttft_p99",
    "slo-bench gate runs/both runs/both --systems vllm,sarathi --rates 4",
    "slo-bench gate runs/baseline runs/failing --allow-different failures",
)


@with_options
def gate(
    *,
    a: Path = argument("BASELINE", "Run folder or result file."),
    b: Path = argument("CANDIDATE", "Run folder or result file, as BASELINE."),
    max_regression: str = option(
        "5%",
        "Largest regression allowed: percent of the baseline; percentage points for attainment.",
        default="5%",
    ),
    metric: str | None = METRICS,
    systems: str | None = SYSTEMS,
    compared: Compared,
    markdown: Path | None = option(
        "FILE", "Also write the table with intervals, for a pull request.", "--markdown"
    ),
    as_json: bool = flag("Print only JSON.", "--json"),
) -> None:
    """Exit with 1 if the candidate is significantly worse by more than the bound, else with 0.

    Exit with 2 if the two cannot be compared: conditions that differ (workload, SLO, model, backend
    and the like), no request that finished, or no common cell.
    """
    from ...reports.compare.comparing import judge_comparison, parse_regression
    from ...reports.compare.output import judgement_markdown, not_comparable_markdown
    from ...reports.compare.results import NotComparableError
    from ...reports.terminal.screen import Screen
    from ..output.console import print_result

    bound = parse_regression(max_regression)
    try:
        comparison = compared.comparison(a, b, systems, metric, gated=True)
        judgement = judge_comparison(comparison, bound)
    except NotComparableError as error:
        if markdown is not None:
            write_whole(markdown, [not_comparable_markdown(str(error)).encode()])
        if as_json:
            typer.echo(
                json.dumps({"verdict": "not comparable", "passed": False, "reason": str(error)})
            )
            raise typer.Exit(2) from None
        raise SloBenchError(f"not comparable: {error}") from None
    if markdown is not None:
        write_whole(markdown, [judgement_markdown(comparison, judgement).encode()])
    if as_json:
        typer.echo(json.dumps(_json(comparison, judgement), allow_nan=False, ensure_ascii=False))
    else:
        print_result(Screen(comparison.a.tested), *_lines(comparison, judgement))
    if not judgement.passed:
        raise typer.Exit(1)


def _lines(compared: Comparison, judgement: Judgement) -> list[str]:
    from ...reports.compare.output import (
        differing_lines,
        failed_lines,
        headline,
        note_lines,
        overloaded_text,
    )

    lines = failed_lines(compared)
    lines += [f"note: {line}" for line in note_lines(compared)]
    lines += [f"FAIL  {_regression_text(regression)}" for regression in judgement.regressions]
    lines += [
        f"warn  {_regression_text(regression)}: "
        + (
            overloaded_text(regression.row)
            if regression.row.stationary_a is False
            else "may be noise"
        )
        for regression in judgement.open_rows
    ]
    limit = f"{100 * judgement.max_regression:g} %"
    lines += [headline(compared), *differing_lines(compared)]
    lines.append(
        f"passed: nothing is significantly worse by more than {limit}"
        if judgement.passed
        else f"failed: {len(judgement.regressions)} of {len(compared.rows)} figures are "
        f"significantly worse by more than {limit}"
    )
    return lines


def _regression_text(regression: Regression) -> str:
    from ...reports.compare.output import change_bounds_text, change_text, p_text, value_text
    from ...reports.figures.figure import rate_text

    row = regression.row
    where = [row.label] if row.label else []
    where += [] if row.rate_rps is None else [f"{rate_text(row.rate_rps)} req/s"]
    place = f" ({', '.join(where)})" if where else ""
    return (
        f"{row.metric.short}{place}: {value_text(row.metric, row.a)} → "
        f"{value_text(row.metric, row.b)}, {change_text(row)} [{change_bounds_text(row)}], "
        f"p {p_text(row.p_holm)}"
    )


def _json(compared: Comparison, judgement: Judgement) -> dict[str, Any]:
    from ...reports.compare.output import comparison_json, row_json

    def regression_json(regression: Regression) -> dict[str, Any]:
        size, low = finite(regression.size), finite(regression.low)
        return {"regression": size, "regression_low": low, **row_json(regression.row)}

    return {
        "verdict": "passed" if judgement.passed else "failed",
        "passed": judgement.passed,
        "max_regression": judgement.max_regression,
        "regressions": [regression_json(regression) for regression in judgement.regressions],
        "undecided": [regression_json(regression) for regression in judgement.open_rows],
        "comparison": comparison_json(compared),
    }
