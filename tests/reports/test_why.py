"""Why the best system won: the same requests with it and with the next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.figures.levels import combine
from slo_bench.reports.pages.run_page import write_report
from slo_bench.reports.pages.why import reason_json, reasons


@pytest.fixture
def split_run(make_run):
    """`orca` hands over and serves all 100 in time; `vllm` lets requests 40 to 89 wait for 2 s."""
    folder = make_run(systems=("orca", "vllm"), rates=(2.0,), seeds=1, requests=100)
    cells = pd.read_csv(folder / "cells.csv", dtype={"cell": str})
    for name, cell in zip(cells["system"], cells["cell"], strict=True):
        path = folder / f"requests/{cell}.csv.gz"
        table = pd.read_csv(path)
        late = (table["id"] >= 40) & (table["id"] < 90) & (name == "vllm")
        table["first_scheduled_s"] = table["arrival_s"] + np.where(late, 2.0, 0.1)
        table["first_token_s"] = table["first_scheduled_s"] + 0.25
        table["finish_s"] = table["first_token_s"] + 1.5
        table["output_tokens"] = 51
        table["outcome"], table["slo_met"] = "finished", (~late).astype(int)
        if name == "orca":
            table["transfer_s"] = 0.5
        table.to_csv(path, index=False)
        cells.loc[cells["cell"] == cell, "attainment"] = 1 - late.mean()
    cells.to_csv(folder / "cells.csv", index=False)
    (folder / "timeseries").mkdir()
    orca = cells.loc[cells["system"] == "orca", "cell"].iloc[0]
    rows = [
        (0.0, metric, entity, value)
        for entity, values in {"prefill 0": (0.8, 0.1, 3.0), "decode 1": (0.1, 0.6, 0.0)}.items()
        for metric, value in zip(("compute", "kv_cache_usage", "waiting"), values, strict=True)
    ]
    timeseries = pd.DataFrame(rows, columns=["time_s", "metric", "entity", "value"])
    timeseries.to_csv(folder / f"timeseries/{orca}.csv.gz", index=False)
    return folder


def test_reasons_compare_winner_and_runner_up_by_phase(split_run, tmp_path):
    runs = read_runs([split_run])
    (reason,) = reasons(runs, combine(runs))
    assert (reason.winner.name, reason.runner_up.name) == ("orca", "vllm")
    assert (reason.requests, reason.only_winner, reason.only_runner_up) == (100, 50, 0)
    assert {cause: n for cause, n in reason.causes.items() if n} == {"TTFT": 50}
    assert reason.winner.phase_s == pytest.approx(
        {"waiting": 0.1, "prefill": 0.25, "transfer": 0.5, "decode": 1.0}
    )
    assert reason.runner_up.phase_s == pytest.approx(
        {"waiting": 2.0, "prefill": 0.25, "transfer": 0.0, "decode": 1.5}
    )
    assert (reason.cause, reason.phase, reason.by_chance) == ("TTFT", "waiting", False)
    assert reason.sentences == (
        "At 2 req/s orca keeps 100.0 % in SLO, vllm 50.0 %. 50 of 100 requests are in time with "
        "orca alone, 0 with vllm alone. Of the 50, vllm missed: TTFT 50. Mean times of those with "
        "vllm (with orca): waiting 2 s (100 ms), prefill 250 ms (250 ms), transfer 0 ms (500 ms), "
        "decode 1.5 s (1 s); what makes the difference is waiting. Instances of orca use, on "
        "average: decode: 10.0 % of their arithmetic, 60.0 % of KV memory, 0 waiting; prefill: "
        "80.0 % of their arithmetic, 10.0 % of KV memory, 3 waiting."
    )
    plain = reason_json(reason)
    assert plain["winner"]["roles"]["prefill"]["compute"] == pytest.approx(0.8)
    assert plain["why"] == reason.sentences
    page = write_report([split_run], tmp_path / "out.html").read_text()
    assert "what makes the difference is waiting" in page


def test_reasons_ignore_runs_of_other_requests(split_run):
    path = split_run / "requests/000.csv.gz"
    table = pd.read_csv(path)
    table.assign(arrival_s=table["arrival_s"] + 0.01).to_csv(path, index=False)
    runs = read_runs([split_run])
    assert reasons(runs, combine(runs)) == []


def test_reasons_of_one_system_are_empty(make_run):
    runs = read_runs([make_run(systems=("vllm",))])
    assert reasons(runs, combine(runs)) == []


def test_reasons_of_few_pairs_are_marked_as_chance(split_run):
    path = split_run / "requests/001.csv.gz"
    table = pd.read_csv(path)
    table["slo_met"] = (table["id"] != 40).astype(int)
    table.to_csv(path, index=False)
    runs = read_runs([split_run])
    (reason,) = reasons(runs, combine(runs))
    assert (reason.only_winner, reason.by_chance) == (1, True)
    assert "The difference may be chance." in reason.sentences


@pytest.mark.parametrize(("won", "lost", "is_tie"), [(50, 0, False), (10, 8, True)])
def test_reason_of_a_difference_by_chance_is_a_tie(split_run, won, lost, is_tie):
    runs = read_runs([split_run])
    (reason,) = reasons(runs, combine(runs))
    assert replace(reason, only_winner=won, only_runner_up=lost).is_tie is is_tie
    assert replace(reason, as_high=True).is_tie


def test_page_does_not_explain_a_tie(make_run, tmp_path):
    folder = make_run(systems=("vllm", "sarathi"), rates=(1.0, 5.0))
    runs = read_runs([folder])
    assert [reason.as_high for reason in reasons(runs, combine(runs))] == [True]
    text = write_report([folder], tmp_path / "out.html").read_text()
    assert "Why the best system won" not in text
