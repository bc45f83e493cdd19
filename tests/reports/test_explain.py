"""What `slo-bench explain` says of a request."""

import json
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.experiments.experiment import Experiment, RunResult
from slo_bench.harness.experiments.explain.trace import replay
from slo_bench.reports.pages.explain_page import (
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


def test_explanation_json_adds_up(cell):
    plain = json.loads(json.dumps(explanation_json(explain(cell, 7)), allow_nan=False))
    assert sum(plain["breakdown_s"].values()) == pytest.approx(plain["e2e_s"], rel=1e-12)
    assert plain["phases"][0]["begin_s"] == plain["arrival_s"]
    assert plain["request"] == 7
    assert plain["cell"] == CELL


def test_chosen_request_finds_the_slowest(cell):
    slowest = chosen_request(cell, "slowest")
    assert cell.result.records.e2e_s[slowest] == cell.result.records.e2e_s.max()
    assert chosen_request(cell, "12") == 12


@pytest.mark.parametrize("text", ["80", "-1", "first", "1.5"])
def test_chosen_request_refuses_unknown_requests(cell, text):
    with pytest.raises(SloBenchError, match="from 0 to 79"):
        chosen_request(cell, text)


def test_explanation_text_names_the_parts(cell, tmp_path):
    with (tmp_path / "out.txt").open("w") as file:
        console = Console(width=100, record=True, file=file)
        console.print(explanation_text(explain(cell, chosen_request(cell, "slowest"))))
    text = console.export_text()
    for word in ("prefill", "decode", "Time by part", "Phases in order", "TTFT"):
        assert word in text


def test_explanation_of_a_rejected_request_has_no_time(tmp_path):
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


def test_explanation_that_differs_from_the_record_is_named(run, cell):
    assert differs_from_record(run, cell) is None
    path = run / "requests" / f"{CELL}.csv.gz"
    kept = path.read_bytes()
    frame = pd.read_csv(path)
    frame["finish_s"] += 0.01
    frame.to_csv(path, index=False)
    assert "differently" in differs_from_record(run, cell)
    path.write_bytes(kept)


ONE_MODEL = {"workload": "azure-conv", "slo": "ttft=1,tpot=0.15"}
SEVERAL = {
    "workload": "azure-conv",
    "models": "fleet(llama-3.1-8b*2, qwen2.5-7b*2)",
    "gpu": "h100-80g",
    "overlong_requests": "reject",
}
COLLOCATED = {"workload": "collocated(1:1)", "slo": "ttft=1", "num_gpu_blocks": 1500}
MOVING = {
    "distserve": (ONE_MODEL | {"instances": 2}, 10.0, {"prefill", "KV to another instance"}),
    "splitwise": (ONE_MODEL | {"instances": 2}, 10.0, {"prefill", "KV to another instance"}),
    "mooncake": (ONE_MODEL | {"instances": 2}, 10.0, {"prefill", "KV to another instance"}),
    "banaserve": (ONE_MODEL | {"instances": 2}, 10.0, {"prefill", "KV to another instance"}),
    "ascendra": (ONE_MODEL | {"instances": 3}, 36.0, {"queue", "decode"}),
    "llumnix": (ONE_MODEL | {"instances": 2, "num_gpu_blocks": 1500}, 14.0, {"queue", "decode"}),
    "prism": (SEVERAL | {"gpus": 1}, 4.0, {"held before instances", "others on the GPU"}),
    "muxserve": (SEVERAL | {"gpus": 2}, 8.0, {"others on the GPU"}),
    "qlm": (SEVERAL | {"gpus": 1}, 4.0, {"held before instances", "model loading"}),
    "collocation": (COLLOCATED | {"embedder": "bge-m3"}, 10.0, {"embedding pass", "pipeline"}),
    "merged-batches": (COLLOCATED | {"embedder": "llama-3.1-8b"}, 10.0, {"prefill"}),
}
MORE_THAN_ONE_PLACE = {
    "distserve": "decode 1",
    "ascendra": "hp 2",
    "llumnix": "instance 1",
    "prism": "queue before the engines",
}


@pytest.mark.parametrize("system", MOVING)
def test_explanation_stages_add_up_for_every_system(tmp_path, system):
    settings, rate, expected = MOVING[system]
    Experiment(systems=[system], rates=[rate], seeds=1, requests=(200,), **settings).run(
        tmp_path / "run", jobs=1
    )
    cell = replay(tmp_path / "run", f"{system}_rate-{rate:g}_seed-0")
    assert differs_from_record(tmp_path / "run", cell) is None
    records, parts, places = cell.result.records, set(), set()
    for request in np.flatnonzero(records.outcome == Outcome.FINISHED).tolist():
        explained = explain(cell, request)
        assert explained.stages[0].begin_s == records.arrival_s[request]
        assert explained.stages[-1].end_s == records.finish_s[request]
        for earlier, later in pairwise(explained.phases):
            assert earlier.end_s == later.begin_s
        assert sum(s.duration_s for s in explained.stages) == pytest.approx(explained.e2e_s)
        assert sum(explained.parts_s.values()) == pytest.approx(explained.e2e_s)
        parts |= {part.value for part in explained.parts_s}
        places |= {stage.place for stage in explained.stages}
    assert expected <= parts
    assert system not in MORE_THAN_ONE_PLACE or MORE_THAN_ONE_PLACE[system] in places
    json.dumps(explanation_json(explained), allow_nan=False)
    assert list(cell.events())


def test_explanation_shows_actions_on_a_request(tmp_path):
    Experiment(
        systems=["ascendra"], rates=[36], seeds=1, requests=(200,), **MOVING["ascendra"][0]
    ).run(tmp_path / "run", jobs=1)
    cell = replay(tmp_path / "run", "ascendra_rate-36_seed-0")
    [row] = RunResult(tmp_path / "run").rows()
    offloaded = [
        r for r, acts in cell.trace.acts.items() if "offloads" in {a.mechanism for a in acts}
    ]
    assert len(offloaded) == row["count_offloads"] > 0
    explained = explain(cell, next(r for r in offloaded if records_finished(cell, r)))
    assert explained.counts["offloads"] == row["count_offloads"]
    [act] = [act for act in explained.acts if act.mechanism == "offloads"]
    [left] = [s for s in explained.stages if s.why == "offloaded before its prefill began"]
    assert act.time_s == pytest.approx(left.begin_s)


def records_finished(cell, request):
    return cell.result.records.outcome[request] == Outcome.FINISHED
