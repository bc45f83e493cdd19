"""Instances that fail, from the setting to the row."""

import pandas as pd
import pytest

from slo_bench.harness.core.cluster_policy import INF, Failure
from slo_bench.harness.engine.cluster.failures import parse_failures
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.experiments.explain.trace import replay
from slo_bench.workloads.errors import SloBenchError


def ask(**settings):
    return Experiment(
        **{
            "systems": ("distserve",),
            "parameters": {"distserve": {"prefill_instances": (2,), "decode_instances": (2,)}},
            "model": "mistral-7b",
            "rates": (4.0,),
            "requests": (80,),
            "seeds": 1,
            "instances": (4,),
            **settings,
        }
    )


def test_parse_failures_reads_instances_and_times():
    assert parse_failures("2@30s..60s, 0@1.5,2@60..70s") == (
        Failure(2, 30.0, 60.0),
        Failure(0, 1.5, INF),
        Failure(2, 60.0, 70.0),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("2", "'2' is not like 2@30s..60s"),
        ("2@1.2.3", "is not like"),
        ("-1@4", "is not like"),
        ("1@5..5", "must be back after it has failed"),
        ("1@5..9,1@8", "instance 1 fails again before it is back"),
    ],
)
def test_parse_failures_refuses_unreadable_text(text, problem):
    with pytest.raises(SloBenchError, match=problem):
        parse_failures(text)


@pytest.mark.parametrize("name", ["distserve", "vllm"])
def test_requests_of_a_failed_instance_are_rerouted_or_reported(tmp_path, name):
    """DistServe prefills again; a plain router's requests have failed."""
    parameters = ask().parameters if name == "distserve" else {}
    failures = (("0@5s..9s,3@8s",), (None,))
    rows = []
    for run, failing in enumerate(failures):
        ask(systems=(name,), parameters=parameters, failures=failing).run(tmp_path / str(run))
        rows += pd.read_csv(tmp_path / str(run) / "cells.csv").to_dict("records")
    struck, whole = rows
    assert whole["unfinished"] == 0
    assert (struck["unfinished"] > 0) == (name == "vllm")
    assert struck["finished"] + struck["unfinished"] == 80
    assert struck["makespan_s"] != whole["makespan_s"]


def test_replayed_cell_repeats_its_failures(tmp_path):
    ask(failures=("3@8s..12s",)).run(tmp_path)
    (row,) = pd.read_csv(tmp_path / "cells.csv").to_dict("records")
    again = replay(tmp_path, row["cell"]).result
    assert again.records.preemptions_recompute.sum() > 0
    assert again.totals.steps == row["iterations"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"failures": ("4@1",)}, "there is no instance 4; 4 instances have the numbers 0 to 3"),
        ({"failures": ("x",)}, "is not like"),
        ({"systems": ("fifo",), "parameters": {}, "failures": ("0@1",)}, "static batches.*leave"),
    ],
)
def test_failures_are_refused_where_instances_cannot_fail(settings, problem):
    with pytest.raises(SloBenchError, match=problem):
        ask(**settings).plan()
