"""What `slo-bench explain` says of a request."""

import json

import pandas as pd
import pytest
from rich.console import Console

from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.validation.trace import replay
from slo_bench.reports.pages.explain import (
    chosen_request,
    differs_from_record,
    explain,
    explanation_json,
    explanation_text,
)
from slo_bench.workloads.errors import SloBenchError

CELL = "vllm_rate-6_seed-0"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    Experiment(systems=["vllm"], rates=[6], seeds=1, requests=(80,), records="csv").run(
        folder, jobs=1
    )
    return folder


@pytest.fixture(scope="module")
def cell(run):
    return replay(run, CELL)


def test_json_adds_up(cell):
    plain = json.loads(json.dumps(explanation_json(explain(cell, 7)), allow_nan=False))
    assert sum(plain["breakdown_s"].values()) == pytest.approx(plain["e2e_s"], rel=1e-12)
    assert plain["phases"][0]["begin_s"] == plain["arrival_s"]
    assert plain["request"] == 7
    assert plain["cell"] == CELL


def test_the_slowest(cell):
    slowest = chosen_request(cell, "slowest")
    assert cell.result.records.e2e_s[slowest] == cell.result.records.e2e_s.max()
    assert chosen_request(cell, "12") == 12


@pytest.mark.parametrize("text", ["80", "-1", "first", "1.5"])
def test_no_such_request(cell, text):
    with pytest.raises(SloBenchError, match="from 0 to 79"):
        chosen_request(cell, text)


def test_text_names_the_parts(cell, tmp_path):
    with (tmp_path / "out.txt").open("w") as file:
        console = Console(width=100, record=True, file=file)
        console.print(explanation_text(explain(cell, chosen_request(cell, "slowest"))))
    text = console.export_text()
    for word in ("prefill", "decode", "Time by part", "Phases in order", "TTFT"):
        assert word in text


def test_who_was_refused_has_no_time(tmp_path):
    Experiment(
        systems=["vllm"],
        rates=[6],
        seeds=1,
        requests=(40,),
        prompt_tokens="uniform(100, 300000)",
        output_tokens="fixed(20)",
        overlong_requests="reject",
    ).run(tmp_path / "run", jobs=1)
    cell = replay(tmp_path / "run", CELL)
    refused = int((cell.result.records.outcome == 2).argmax())
    with pytest.raises(SloBenchError, match="rejected, not served"):
        explain(cell, refused)


def test_another_outcome_than_on_disk_is_said(run, cell):
    assert differs_from_record(run, cell) is None
    path = run / "requests" / f"{CELL}.csv.gz"
    kept = path.read_bytes()
    frame = pd.read_csv(path)
    frame["finish_s"] += 0.01
    frame.to_csv(path, index=False)
    assert "differently" in differs_from_record(run, cell)
    path.write_bytes(kept)


def test_who_went_from_one_instance_to_another_is_not_explained(tmp_path):
    folder = tmp_path / "run"
    Experiment(systems=["distserve"], rates=[2], seeds=1, requests=(20,), records="csv").run(
        folder, jobs=1
    )
    moved = replay(folder, "distserve_rate-2_seed-0")
    with pytest.raises(SloBenchError, match=r"from one instance to another \(0, 1\)"):
        explain(moved, 3)
