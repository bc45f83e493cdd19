"""Write the tables of `docs/accuracy.md` from results of `slo-bench accuracy --out FILE`.

    slo-bench accuracy --out errors.jsonl
    slo-bench accuracy --without h200-141g --out without-h200-141g.jsonl
    python scripts/accuracy_page.py errors.jsonl without-h200-141g.jsonl

Everything between the marks `<!-- NAME -->` and `<!-- end -->` of the page is computed from the
files. Of a file `without-GPU.jsonl` the rows of that GPU count.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from slo_bench.harness.validation.accuracy.aiconfigurator import beside
from slo_bench.harness.validation.accuracy.measurement import Measurement
from slo_bench.harness.validation.accuracy.prediction_errors import ErrorSummary, Judged, summaries
from slo_bench.harness.validation.accuracy.readers import read_folder
from slo_bench.harness.validation.accuracy.shipped import SHIPPED, seen
from slo_bench.predictors.bands import (
    DENSE,
    EXPERTS,
    KINDS,
    METRICS,
    STEP_TIMES,
    coverage,
    model_kind,
    residuals,
)
from slo_bench.predictors.operators.kernels import has_tables
from slo_bench.predictors.specs import model
from slo_bench.reports.pages.accuracy_page import regimes

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
_KIND_NAMES = {DENSE: "dense", EXPERTS: "mixtures of experts"}
CLOSED, OPEN = ("tpot_mean", "ttft_mean"), ("e2e_p50", "e2e_p99", "ttft_p50", "tpot_p50")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _errors(row: ErrorSummary) -> str:
    return f"{row.median_error:.1%} / {row.p90_error:.1%} ({row.bias:+.1%})"


def _wide(
    error_summaries: list[ErrorSummary],
    metrics: Sequence[str],
    seen_groups: set[tuple[str, str, str]],
) -> str:
    groups: dict[tuple[str, str, str, str], dict[str, ErrorSummary]] = {}
    for row in error_summaries:
        if row.metric in metrics:
            groups.setdefault((row.engine, row.gpu, row.model, row.mode), {})[row.metric] = row
    rows = []
    for group, by_metric in groups.items():
        n = max(row.n for row in by_metric.values())
        blind = "no" if group[:3] in seen_groups else "yes"
        errors = [_errors(by_metric[m]) if m in by_metric else "–" for m in metrics]
        rows.append((*group[:3], str(n), *errors, blind))
    return table(("engine", "GPU", "model", "n", *metrics, "blind"), rows)


def _read(file: Path) -> list[Judged]:
    return [Judged(**json.loads(line)) for line in file.read_text().splitlines()]


def _left_out(files: Sequence[Path]) -> list[ErrorSummary]:
    """Closed loops of vLLM and SGLang on each GPU whose tables were not used."""
    rows = []
    for file in files:
        gpu = file.stem.removeprefix("without-")
        rows += [row for row in _read(file) if row.gpu == gpu and not row.reason]
    kept = [row for row in rows if row.mode == "closed-loop" and row.engine != "trtllm"]
    return summaries(kept)


def _by_engine(judged: list[Judged]) -> list[ErrorSummary]:
    return summaries(judged, lambda row: ("", row.engine, "all", "all", ""))


def _beside(judged: list[Judged]) -> str:
    """AIConfigurator's errors and ours on the rows that it predicted."""
    groups: dict[tuple[str, str, str], list[Judged]] = {}
    for row in judged:
        groups.setdefault((row.engine, row.gpu, row.model), []).append(row)
        if row.engine != "trtllm":
            kind = _KIND_NAMES[model_kind(model(row.model))]
            groups.setdefault(("vLLM and SGLang", "all", kind), []).append(row)
    lines = []
    for group, rows in sorted(groups.items()):
        for metric in CLOSED:
            comparison = beside(rows, metric)
            if comparison is not None:
                theirs = f"{comparison.theirs:.1%} / {comparison.theirs_p90:.1%}"
                ours = f"{comparison.ours:.1%} / {comparison.ours_p90:.1%}"
                lines.append((*group, metric, str(comparison.n), theirs, ours))
    return table(("engine", "GPU", "model", "metric", "n", "AIConfigurator", "slo-bench"), lines)


def _coverage() -> str:
    """Share of measurements in bands that were made without them, their model or their GPU."""
    all_residuals = residuals()
    rows = []
    metrics = ("ttft_mean", "tpot_mean", "e2e_mean", "throughput")
    for kind, step_time, metric in product(KINDS, STEP_TIMES, metrics):
        there = all_residuals.having("step_time", step_time) & all_residuals.having("kind", kind)
        n = int(np.isfinite(all_residuals.logs[there, METRICS.index(metric)]).sum())
        if n:
            shares = [
                coverage(all_residuals, step_time, metric, left_out, kind)
                for left_out in ("id", "model", "gpu")
            ]
            rows.append((kind, step_time, metric, str(n), *(f"{share:.0%}" for share in shares)))
    return table(("models", "step times", "metric", "n", "row", "model", "GPU"), rows)


def main(file: Path, left_out: Sequence[Path]) -> None:
    """Replace the page's tables."""
    judged = _read(file)
    skipped = Counter((row.set, row.reason) for row in judged if row.reason)
    judged = [row for row in judged if not row.reason]
    measurements = {m.key: m for m in read_folder(SHIPPED) if isinstance(m, Measurement)}
    seen_groups = {
        (row.engine, row.gpu, row.model)
        for row in judged
        if row.key in measurements and seen(measurements[row.key])
    }
    everything = summaries(judged)
    closed = [row for row in everything if row.mode == "closed-loop"]
    opened = [row for row in everything if row.mode == "open-loop"]
    regime = [
        (row.engine, row.gpu, row.model, row.mode, row.metric, str(row.n), _errors(row))
        for row in regimes(judged)
        if row.metric in (*CLOSED, "e2e_p50")
    ]
    closed_rows = [row for row in judged if row.mode == "closed-loop" and row.engine != "trtllm"]
    dense = [row for row in closed_rows if model(row.model).is_plain]
    experts = [row for row in closed_rows if not model(row.model).is_plain]
    whole = summaries(dense, lambda row: ("", "vLLM and SGLang", "all", "all", ""))
    with_tables = summaries(
        [row for row in experts if has_tables(row.gpu)],
        lambda row: ("", "vLLM and SGLang", "those with tables", "all", ""),
    )
    parts = {
        "whole": _wide(whole, CLOSED, {("vLLM and SGLang", "all", "all")}),
        "closed": _wide([row for row in closed if model(row.model).is_plain], CLOSED, seen_groups),
        "experts": _wide(
            with_tables + _by_engine(experts) + summaries(experts),
            CLOSED,
            seen_groups
            | {(engine, "all", "all") for engine in ("vllm", "sglang")}
            | {("vLLM and SGLang", "those with tables", "all")},
        ),
        "left_out": _wide(_left_out(left_out), CLOSED, seen_groups),
        "open": _wide(opened, OPEN, set()),
        "regimes": table(
            ("engine", "GPU", "models", "load, regime", "metric", "n", "median / p90 (bias)"),
            regime,
        ),
        "skipped": "\n".join(
            f"- {n:,} rows: {reason}" for (_, reason), n in sorted(skipped.items())
        )
        or "All measurements were predicted.",
        "beside": _beside(judged),
        "coverage": _coverage(),
    }
    for name, part in parts.items():
        replace_part(name, part)


def replace_part(name: str, part: str) -> None:
    """Replace what the page has between the marks of `name`."""
    mark, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, separator, after = PAGE.read_text(encoding="utf-8").partition(mark)
    if not separator:
        raise SystemExit(f"{PAGE} has no mark {name}")
    text = f"{before}{mark}\n{part}\n\n{end}{after.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
