"""Runs beside LoadGen's summary (`mlperf_log_summary.txt`), figure by figure.

A summary has no single requests, so nothing can be drawn from it again and no difference has an
interval. Runs of ours are written in its terms first, so both sides have one definition: a request
that did not finish counts in every percentile (mlcommons/inference, loadgen/results.cc).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import finite
from ..exports.cells_export import exported_run
from ..exports.mlperf import summary
from ..figures.figure import rate_text, seconds_text
from ..pages.table import Table
from .external import HEAD_CHARACTERS, is_loadgen_summary

_LATENCIES = {
    "ttft": ("first token latency", "First Token latency"),
    "tpot": ("time to output token", "Time per Output Token"),
    "e2e": ("latency", "latency"),
}
_SHOWN = ("samples_per_s", "tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
_HEADS = ("samples/s", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99")


@dataclass(frozen=True)
class LoadGenSummary:
    """Figures of one summary: seconds, and samples and tokens per second."""

    name: str
    scenario: str
    valid: bool
    figures: dict[str, float]

    def plain(self) -> dict[str, Any]:
        """The summary as plain JSON values; null where a figure is infinite."""
        figures = {name: finite(value) for name, value in self.figures.items()}
        return {"name": self.name, "scenario": self.scenario, "valid": self.valid, **figures}


def is_summary(path: Path) -> bool:
    """Whether a file is LoadGen's summary."""
    try:
        with path.open(encoding="utf-8") as file:
            return is_loadgen_summary(file.read(HEAD_CHARACTERS))
    except (OSError, UnicodeError):
        return False


def summaries(path: Path, rates: Collection[float] | None = None) -> list[LoadGenSummary]:
    """The summary in a file, or one for each cell of a run folder, if asked those at some rates.

    Raises:
        SloBenchError: it is neither, the run kept no requests, or no cell has such a rate.
    """
    if is_summary(path):
        return [_parsed(path.name, path.read_text("utf-8", "replace"), path)]
    run = exported_run(path)
    if not run.results.keeps_requests:
        raise SloBenchError(f"{path} has no records of requests; run with --records csv")
    cells = [
        cell
        for cell in run.cells
        if rates is None or any(cell.parameters.get("rate_rps") == rate for rate in rates)
    ]
    if not cells:
        raise SloBenchError(f"{path} has no cell at these rates (--rates)")
    return [_parsed(cell.name, summary(run, cell), path) for cell in cells]


def beside_table(loadgen_summaries: Sequence[LoadGenSummary]) -> Table:
    """A row for each summary."""
    rows = [
        (
            loadgen_summary.name,
            *(_text(name, loadgen_summary.figures.get(name, math.nan)) for name in _SHOWN),
            "valid" if loadgen_summary.valid else "invalid",
        )
        for loadgen_summary in loadgen_summaries
    ]
    heads = ("summary", *_HEADS, "result")
    return Table("In LoadGen's terms", heads, [("", rows)], (0, len(heads) - 1))


def _text(name: str, value: float) -> str:
    if math.isnan(value):
        return "–"
    return seconds_text(value) if name.endswith("_s") and "per_s" not in name else rate_text(value)


def _parsed(name: str, text: str, path: Path) -> LoadGenSummary:
    values: dict[str, str] = {}
    for line in text.splitlines():
        label, colon, value = line.partition(":")
        if colon:
            values.setdefault(" ".join(label.split()), value.strip())
    figures: dict[str, float] = {}
    for key, labels in {
        "samples_per_s": ("Completed samples per second", "Samples per second"),
        "tokens_per_s": ("Completed tokens per second", "Tokens per second"),
    }.items():
        if present := [label for label in labels if label in values]:
            figures[key] = _number(values[present[0]], present[0], path)
    for key, (percentile, mean) in _LATENCIES.items():
        if (label := f"Mean {mean} (ns)") in values:
            figures[f"{key}_mean_s"] = _number(values[label], label, path) / 1e9
        for label, value in values.items():
            if match := re.fullmatch(rf"(\d+(?:\.\d+)?) percentile {percentile} \(ns\)", label):
                figures[f"{key}_p{float(match[1]):g}_s"] = _number(value, label, path) / 1e9
    if not figures:
        raise FileFormatError(path, None, "is a summary of LoadGen without a figure")
    valid = values.get("Result is") == "VALID"
    return LoadGenSummary(name, values.get("Scenario", ""), valid, figures)


def _number(text: str, label: str, path: Path) -> float:
    try:
        return float(text)
    except ValueError:
        raise FileFormatError(path, None, f"{label!r} is {text!r}, which is no number") from None
