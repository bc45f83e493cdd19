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
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from slo_bench.harness.validation.accuracy.aiconfigurator import beside
from slo_bench.harness.validation.accuracy.measurement import Measurement
from slo_bench.harness.validation.accuracy.prediction_errors import ErrorSummary, Judged, summaries
from slo_bench.harness.validation.accuracy.readers import read_folder
from slo_bench.harness.validation.accuracy.reliability import (
    EDGES,
    ladders,
    reliability,
    told_plans,
)
from slo_bench.harness.validation.accuracy.shipped import SHIPPED, seen
from slo_bench.predictors.bands import (
    DENSE,
    EXPERTS,
    KINDS,
    LEAST_ROWS,
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
    head, *lines = [f"| {' | '.join(line)} |" for line in (heads, *rows)]
    return "\n".join([head, f"|{'---|' * len(heads)}", *lines])


def _errors(row: ErrorSummary) -> str:
    sizes = row.median_error, row.mean_error, row.p90_error
    return " / ".join(f"{size:.1%}" for size in sizes) + f" ({row.bias:+.1%})"


def _errors_table(groups: Mapping[str, Sequence[Judged]], metrics: Sequence[str]) -> str:
    """Errors of groups of measurements; `n` is that of each metric, where they differ."""
    rows = []
    for name, judged in groups.items():
        by_metric = {row.metric: row for row in summaries(judged, lambda row: ("",) * 5)}
        counts = dict.fromkeys(f"{by_metric[m].n:,}" for m in metrics if m in by_metric)
        errors = [_errors(by_metric[m]) if m in by_metric else "–" for m in metrics]
        rows.append((name, " / ".join(counts), *errors))
    return table(("measurements", "n", *metrics), rows)


def _read(file: Path) -> list[Judged]:
    return [Judged(**json.loads(line)) for line in file.read_text().splitlines()]


def _left_out(files: Sequence[Path]) -> list[Judged]:
    """Rows of each GPU whose tables were not used."""
    rows = []
    for file in files:
        gpu = file.stem.removeprefix("without-")
        rows += [row for row in _read(file) if row.gpu == gpu and not row.reason]
    return rows


def _is_dense(row: Judged) -> bool:
    return model_kind(model(row.model)) == DENSE


def _headline(
    judged: Sequence[Judged], left_out: Sequence[Judged], seen_groups: set[tuple[str, str, str]]
) -> str:
    """Closed loops by engine, kind of model and origin of the step times."""
    closed = [row for row in judged if row.mode == "closed-loop"]
    trtllm = [row for row in closed if row.engine == "trtllm"]
    closed = [row for row in closed if row.engine != "trtllm"]
    tables = [row for row in closed if has_tables(row.gpu)]
    experts = [row for row in tables if not _is_dense(row)]
    scaled = [
        row
        for row in left_out
        if row.mode == "closed-loop" and row.engine != "trtllm" and has_tables(row.gpu)
    ]
    unseen = [row for row in tables if (row.engine, row.gpu, row.model) not in seen_groups]
    return _errors_table(
        {
            "dense": [row for row in tables if _is_dense(row)],
            "mixtures of experts": experts,
            "groups that no constant has seen": unseen,
            "B300, which has no tables": [row for row in closed if not has_tables(row.gpu)],
            "dense, tables of its GPU left out": [row for row in scaled if _is_dense(row)],
            "mixtures of experts, likewise": [row for row in scaled if not _is_dense(row)],
            "TensorRT-LLM, dense": [row for row in trtllm if _is_dense(row)],
            "TensorRT-LLM, mixtures of experts": [row for row in trtllm if not _is_dense(row)],
        },
        CLOSED,
    )


def _worst(judged: Sequence[Judged]) -> str:
    """Regimes of vLLM and SGLang with at least five measurements whose median error is above one
    half.
    """
    return table(
        ("closed loops", "n", "median / mean / p90 (bias)"),
        [
            (
                f"{row.metric}, {row.engine}, {row.gpu}, {row.model}, "
                f"{row.mode.removeprefix('closed-loop, ')}",
                str(row.n),
                _errors(row),
            )
            for row in regimes([row for row in judged if row.engine != "trtllm"])
            if row.metric in CLOSED and row.median_error > 0.5 and row.n >= 5
        ],
    )


def _beside(judged: Sequence[Judged]) -> str:
    """AIConfigurator's errors and ours on the rows that it predicted: by kind of model, and of
    groups of at least five rows in which it is nearer.
    """
    groups: dict[str, list[Judged]] = {}
    for row in judged:
        groups.setdefault(f"{row.engine}, {row.gpu}, {row.model}", []).append(row)
        if row.engine != "trtllm":
            groups.setdefault(_KIND_NAMES[model_kind(model(row.model))], []).append(row)
    lines = []
    for name, rows in sorted(groups.items()):
        for metric in CLOSED:
            comparison = beside(rows, metric)
            if comparison is None:
                continue
            nearer = comparison.theirs < comparison.ours and comparison.n >= 5
            if nearer or name in _KIND_NAMES.values():
                theirs = f"{comparison.theirs:.1%} / {comparison.theirs_p90:.1%}"
                ours = f"{comparison.ours:.1%} / {comparison.ours_p90:.1%}"
                lines.append((name, metric, str(comparison.n), theirs, ours))
    return table(("measurements", "metric", "n", "AIConfigurator", "slo-bench"), lines)


def _coverage() -> str:
    """Share of measurements in bands that were made without them, their model or their GPU; of few,
    how many.
    """
    all_residuals = residuals()
    rows = []
    for kind, step_time in product(KINDS, STEP_TIMES):
        there = all_residuals.having("step_time", step_time) & all_residuals.having("kind", kind)
        if not there.any():
            continue
        line = [f"{kind}, {step_time}"]
        for metric in CLOSED:
            shares = [
                coverage(all_residuals, step_time, metric, left_out, kind)
                for left_out in ("id", "model", "gpu")
            ]
            count = np.isfinite(all_residuals.logs[there, METRICS.index(metric)]).sum()
            few = f"{shares[0] * count:.0f} of {count}"
            is_few = count < LEAST_ROWS
            line.append(few if is_few else ", ".join(f"{share:.0%}" for share in shares))
        rows.append(line)
    return table(("models, step times", *CLOSED), rows)


def _reliability() -> str:
    """How many plans held by what they were told, with their model, then their GPU, left out."""
    all_residuals = residuals()
    measurements = [m for m in read_folder(SHIPPED) if isinstance(m, Measurement)]
    rows = []
    for kind, step_time in product(KINDS, STEP_TIMES):
        measured = {
            name: steps
            for name, steps in ladders(measurements, all_residuals, step_time).items()
            if steps[0].setting.kind == kind
        }
        tables = [
            reliability(told_plans(measured, all_residuals, left_out))
            for left_out in ("model", "gpu")
        ]
        if any(n for _, _, n, _, _ in tables[0]):
            rows.append([f"{kind}, {step_time}", *map(_held, *tables)])
    heads = [f"told {low:.0%} to {high:.0%}" for low, high in pairwise(EDGES)]
    return table(("models, step times", *heads), rows)


def _held(*buckets: tuple[float, float, int, int, float]) -> str:
    shares = [f"{held:.0%} of {n:,}" if n else "–" for _, _, n, _, held in buckets]
    return ", ".join(shares)


def main(file: Path, left_out: Sequence[Path]) -> None:
    """Replace the page's tables."""
    judged = _read(file)
    judged = [row for row in judged if not row.reason]
    measurements = {m.key: m for m in read_folder(SHIPPED) if isinstance(m, Measurement)}
    seen_groups = {
        (row.engine, row.gpu, row.model)
        for row in judged
        if row.key in measurements and seen(measurements[row.key])
    }
    open_loops: dict[str, list[Judged]] = {}
    for row in judged:
        if row.mode == "open-loop":
            open_loops.setdefault(f"{row.engine}, {row.gpu}, {row.model}", []).append(row)
    parts = {
        "headline": _headline(judged, _left_out(left_out), seen_groups),
        "open": _errors_table(open_loops, OPEN),
        "worst": _worst(judged),
        "beside": _beside(judged),
        "coverage": _coverage(),
        "reliability": _reliability(),
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
