"""A run in the terms of MLPerf Inference: `mlperf_log_summary.txt` for each cell.

The layout is that of LoadGen's summary (mlcommons/inference, loadgen/results.cc) for the scenario
Server of language models. It is no submission: LoadGen has sent nothing, and early stopping, the
least duration and the least number of queries of its rules are not judged. `VALID` says that the
99th percentiles of TTFT and TPOT are within the SLO's bounds, which is what MLPerf asks.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...harness.core.records.request_records import time_per_output_token_s
from ...harness.results.read_run import detail_file, read_table
from ...harness.results.run_columns import REQUEST_COLUMNS
from ...workloads.errors import SloBenchError
from .cells_export import ExportedCell, ExportedRun, exported_run

Floats = NDArray[np.float64]

FILE = "mlperf_log_summary.txt"
_PERCENTILES = (50, 90, 95, 97, 99, 99.9)
_RULE = "=" * 48
_NS = 1e9


def export(folder: Path, destination: str | None) -> str:
    """Write CELL/mlperf_log_summary.txt in the folder `destination`, by default mlperf in the run
    folder.
    """
    run = exported_run(folder)
    if not run.results.keeps_requests:
        raise SloBenchError(f"{folder} has no records of requests; run with --records csv")
    out = Path(destination) if destination is not None else folder / "mlperf"
    for cell in run.cells:
        file = out / cell.name / FILE
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(summary(run, cell), "utf-8")
        except OSError as error:
            raise SloBenchError(f"{file} cannot be written: {error.strerror}") from None
    return f"{len(run.cells)} cells as {FILE} in {out}"


def summary(run: ExportedRun, cell: ExportedCell) -> str:
    """LoadGen's summary of one cell."""
    path = detail_file(run.results.path / "requests", cell.name)
    rows = read_table(path, REQUEST_COLUMNS, ("untimed_tokens",), words=("outcome",))
    arrival_s, first_s, finish_s, tokens = (
        rows[name].to_numpy(dtype=np.float64)
        for name in ("arrival_s", "first_token_s", "finish_s", "output_tokens")
    )
    done = np.isfinite(finish_s)
    if not done.any():
        raise SloBenchError(f"no request of {cell.name} finished")
    untimed_tokens = rows["untimed_tokens"].to_numpy() if "untimed_tokens" in rows else 1
    tpot_s = time_per_output_token_s(first_s, finish_s, tokens, untimed_tokens)
    # A request that did not finish has no latency; no percentile may be better for it.
    e2e, ttft, tpot = (
        np.where(done, latency_s, np.inf)
        for latency_s in (finish_s - arrival_s, first_s - arrival_s, tpot_s)
    )
    tpot = tpot[~np.isnan(tpot)]  # one token has none
    last_s = float(finish_s[done].max() - arrival_s.min())
    bounds = [
        float(np.nanmin(rows[f"{latency}_slo_s"].to_numpy(np.float64)))
        for latency in ("ttft", "tpot")
    ]
    kept = all(
        _quantile(latency_s, 99) <= b for latency_s, b in zip((ttft, tpot), bounds, strict=True)
    )
    window_s = float(arrival_s.max() - arrival_s.min())
    scheduled = (len(rows) - 1) / window_s if window_s else math.nan
    parts = [
        *_heading("MLPerf Results Summary"),
        f"SUT name : slo-bench {cell.parameters['system']} ({cell.parameters['backend']})",
        "Scenario : Server",
        "Mode     : PerformanceOnly",
        f"Completed samples per second    : {done.sum() / last_s:.2f}",
        f"Completed tokens per second: {tokens[done].sum() / last_s:.2f}",
        f"Result is : {'VALID' if kept else 'INVALID'}",
        f"  Performance constraints satisfied : {'Yes' if kept else 'NO'}",
        "",
        *_heading("Additional Stats"),
        f"Scheduled samples per second : {scheduled:.2f}",
        *_stats(e2e, "latency", "latency"),
        "",
        f"Completed tokens per second                 : {tokens[done].sum() / last_s:.2f}",
        *_stats(ttft, "First Token latency", "first token latency"),
        "",
        *_stats(tpot, "Time per Output Token", "time to output token"),
        "",
        *_heading("Test Parameters Used"),
        "samples_per_query : 1",
        f"target_qps : {cell.parameters.get('rate_rps', scheduled):g}",
        *(
            f"{name}_latency (ns): {round(bound * _NS)}"
            for name, bound in zip(("ttft", "tpot"), bounds, strict=True)
            if math.isfinite(bound)
        ),
    ]
    return "\n".join(parts) + "\n"


def _heading(text: str) -> list[str]:
    return [_RULE, text, _RULE]


def _stats(values_s: Floats, name: str, percentile: str) -> list[str]:
    figures = (("Min", values_s.min()), ("Max", values_s.max()), ("Mean", values_s.mean()))
    lines = [f"{label} {name} (ns)".ljust(44) + f": {_ns(value)}" for label, value in figures]
    return lines + [
        f"{percent:.2f} percentile {percentile} (ns)   : {_ns(_quantile(values_s, percent))}"
        for percent in _PERCENTILES
    ]


def _quantile(values_s: Floats, percent: float) -> float:
    """LoadGen's: the value at the place n × percent of the sorted ones."""
    ordered = np.sort(values_s)
    return float(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))])


def _ns(seconds: float) -> str:
    return str(round(seconds * _NS)) if math.isfinite(seconds) else "inf"
