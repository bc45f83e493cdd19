"""Metrics of real servers, as they were read."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

from slo_bench.cli.commands import observe

RECORDED = Path(__file__).parents[1] / "harness" / "load_generator" / "recorded"


def recorded(name):
    """The readings of a server: time and text of each."""
    with gzip.open(RECORDED / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def in_turn(monkeypatch, rows):
    """Each reading is the next one, at the time at which it was recorded."""
    readings = iter(rows)
    monkeypatch.setattr(
        "slo_bench.harness.load_generator.metrics_source.MetricsSource.read",
        lambda source, time_s: read_of(next(readings)),
    )
    monkeypatch.setattr(observe, "monotonic", ticking_clock())


def read_of(row):
    """A reading."""
    from slo_bench.harness.load_generator.server_metrics import read_text
    from slo_bench.harness.servers.server_kinds import metrics_by_server

    return read_text(row[1], row[0], {}, metrics_by_server())


def ticking_clock():
    """A clock that goes on by a second with each look."""
    ticks = itertools.count()
    return lambda: float(next(ticks))
