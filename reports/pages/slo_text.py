"""SLOs as a page names them: `TTFT ≤ 1 s, TPOT ≤ 150 ms`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from ...harness.results.read_run import RunResults
from ...workloads.parsing import parse_toml
from ...workloads.slo import FixedBound, parse_slo
from ..figures.details import SloRange
from ..figures.figure import seconds_text


def slo_text(bounds: Mapping[str, SloRange]) -> str:
    """`TTFT ≤ 1 s, TPOT ≤ 150 ms`, with a span where requests differ; empty without bounds."""

    def one(bound: SloRange) -> str:
        low, high = seconds_text(bound.low_s), seconds_text(bound.high_s)
        return low if low == high else f"{low} to {high} by request"

    return ", ".join(f"{name.upper()} ≤ {one(bound)}" for name, bound in bounds.items())


def slo_of_runs(runs: Sequence[RunResults]) -> str:
    """The SLOs that the experiments set, where no request's record says its own."""
    texts = []
    for run in runs:
        try:
            settings = parse_toml(run.experiment_toml)
        except tomllib.TOMLDecodeError:
            continue  # the report shows the file as it is
        slos, scale = settings.get("slo") or "", settings.get("slo_scale", 1.0)
        for slo in slos if isinstance(slos, list) else [slos]:
            texts.append(written_slo_text(slo, scale if isinstance(scale, int | float) else 1.0))
    return " or ".join(dict.fromkeys(texts)) or "unknown"


def written_slo_text(slo: str | Mapping[str, Any], slo_scale: float = 1.0) -> str:
    """`TTFT ≤ 1 s, TPOT ≤ 150 ms` of an SLO as it is set; as it is written where requests differ.

    Raises:
        SloBenchError: `slo` cannot be read.
    """
    spec = parse_slo(slo, slo_scale)
    if not spec.same_for_all:
        return f"{slo}" + f", × {slo_scale:g}" * (slo_scale != 1)
    ranges = {
        name: SloRange(bound.seconds * slo_scale, bound.seconds * slo_scale)
        for entry in spec.entries
        for name, bound in entry.bounds.items()
        if isinstance(bound, FixedBound)
    }
    return slo_text(ranges) or "that of each request in the workload"
