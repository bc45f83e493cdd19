"""Runs of real servers that serve nothing, and the prompts that runs send."""

import csv
import json

import pytest

from slo_bench.harness.experiments.config.tables import ClientSchema
from slo_bench.harness.experiments.experiment import Experiment, salted
from slo_bench.harness.load_generator.http.wire_requests import BodyMaker
from slo_bench.harness.servers.mock import InjectedFault, MockConfig, serving
from slo_bench.tuner.capacity.capacity_options import CapacityOptions
from slo_bench.tuner.capacity.folder import search_capacity
from slo_bench.workloads.errors import SloBenchError

REFUSES = MockConfig(fault=InjectedFault.TOO_LONG)
BODY = (
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":1,'
    b'"prompt_tokens_details":{"cached_tokens":7}}}\n\ndata: [DONE]\n\n'
)
MODELS = b'{"data":[{"id":"m"}]}'


def answer(status, body):
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def run(slo_bench, url, *more, out="o"):
    return slo_bench(
        *("run", "--base-url", url, "--workload", "synthetic", "--prompt-tokens", "8"),
        *("--output-tokens", "1", "--requests", "4", "--seeds", "1", "--send-delay-limit", "60"),
        *("--out", out, *more),
    )


def rows_of(folder):
    return list(csv.DictReader((folder / "cells.csv").read_text().splitlines()))


@pytest.fixture
def flipping_server(scripted_server):
    """A server that answers completions with 500 until `serves` is set."""

    def says(peer):
        head = scripted_server.asked[-1]
        if b"/v1/models" in head:
            peer.sendall(answer(b"200 OK", MODELS))
        elif b"/v1/completions" in head and says.serves:
            peer.sendall(answer(b"200 OK", BODY))
        else:
            peer.sendall(answer(b"500 Broken", b"{}"))

    says.serves = False
    says.url = scripted_server(says)
    return says


def test_a_run_of_which_no_request_was_served_exits_with_2_and_its_reason(slo_bench, tmp_path):
    with serving(REFUSES) as server:
        code, out, err = run(slo_bench, server.url, "--rates", "100,200", "--json")
    assert code == 2
    reason = "not one of 4 requests was served (status: 400: the prompt is too long)"
    assert f"error: no result: {reason}; slo-bench run --resume" in err
    rows = json.loads(out)
    assert [(row["valid"], row["invalid_because"]) for row in rows] == [(False, reason)] * 2


@pytest.mark.slow
def test_resume_measures_cells_without_a_result_again(slo_bench, flipping_server, tmp_path):
    assert run(slo_bench, flipping_server.url, "--rates", "100")[0] == 2
    flipping_server.serves = True
    code, out, err = slo_bench("run", "--resume", "--out", "o")
    assert code == 0, err
    (row,) = rows_of(tmp_path / "o")
    assert (row["valid"], row["finished"]) == ("True", "4")
    assert row["warm_cache_share"] == "0.875"
    assert "Warm cache" in out
    environment = json.loads((tmp_path / "o" / "environment.json").read_text())
    assert len(environment["prompt_salt"]) == 16
    assert len(environment["resumed"]) == 1


@pytest.mark.slow
def test_some_cells_without_a_result_leave_the_exit_code_0(slo_bench, scripted_server, tmp_path):
    def says(peer):
        head = scripted_server.asked[-1]
        if b"/v1/models" in head:
            peer.sendall(answer(b"200 OK", MODELS))
            return
        sent = sum(b"/v1/completions" in request_head for request_head in scripted_server.asked)
        peer.sendall(answer(b"200 OK", BODY) if sent <= 4 else answer(b"500 Broken", b"{}"))

    url = scripted_server(says)
    code, out, err = run(slo_bench, url, "--rates", "100,200", "--processes", "1")
    assert code == 0, err
    assert [row["valid"] for row in rows_of(tmp_path / "o")] == ["True", "False"]
    assert "1 of 2 cells have no result, the first because not one of" in err
    assert "1 of 2 cells are invalid and left out" in out


def test_capacity_keeps_no_run_of_a_server_that_serves_nothing(tmp_path):
    with serving(REFUSES) as server:
        experiment = Experiment(
            backend="openai",
            client={"base_urls": [server.url], "send_delay_limit_s": 60.0},
            workload="synthetic",
            prompt_tokens="8",
            output_tokens="2",
            slo="ttft=1",
            rates=[100, 400],
            requests=100,
        )
        with pytest.raises(SloBenchError, match="no result at 200 req/s: not one of"):
            search_capacity(experiment, tmp_path / "run", options=CapacityOptions())
    assert not (tmp_path / "run").exists()


def prompts(workload, client, cell="c"):
    maker = BodyMaker(workload, client.options(model="", cell=cell))
    return [tuple(maker.body(request)["prompt"]) for request in workload]


@pytest.fixture
def workload():
    from slo_bench.workloads.source import load_source

    def make(**settings):
        return load_source("sharegpt", **settings).make(rate_rps=1.0, requests=6)

    return make


def starts(token_prompts):
    return {prompt[:4] for prompt in token_prompts}


def test_prompts_repeat_with_the_salt_alone(workload):
    load = workload(prompt_tokens="fixed(32)")
    same = [prompts(load, ClientSchema(prompt_salt="x")) for _ in range(2)]
    assert same[0] == same[1]
    for client, cell in (
        (ClientSchema(prompt_salt="y"), "c"),
        (ClientSchema(prompt_salt="x"), "d"),
    ):
        assert starts(same[0]).isdisjoint(starts(prompts(load, client, cell)))


@pytest.mark.parametrize("other", [{"prompt_tokens": "fixed(48)"}, {"output_tokens": "fixed(9)"}])
def test_prompts_of_one_salt_and_other_lengths_share_no_start(workload, other):
    lengths = {"prompt_tokens": "fixed(32)", "output_tokens": "fixed(8)"}
    client = ClientSchema(prompt_salt="x")
    first = prompts(workload(**lengths), client)
    assert starts(first).isdisjoint(starts(prompts(workload(**lengths | other), client)))


def test_sessions_of_one_cell_share_their_system_prompt_under_any_salt(workload):
    load = workload(sessions="sessions(turns=2, think_s=0, system_prompt_tokens=64, closed=false)")
    for salt in "xy":
        assert len({prompt[:64] for prompt in prompts(load, ClientSchema(prompt_salt=salt))}) == 1


def test_a_resumed_run_keeps_its_salt_and_sends_no_prompt_twice():
    experiment = Experiment(backend="openai", client={"base_urls": ["http://h"]})
    begun = salted(experiment, {"prompt_salt": "ab"}).client.prompt_salt
    resumed = salted(experiment, {"prompt_salt": "ab", "resumed": [{}]}).client.prompt_salt
    assert (begun, resumed) == ("ab", "ab 1")
    chosen = Experiment(backend="openai", client={"base_urls": ["http://h"], "prompt_salt": "x"})
    assert salted(chosen, {"prompt_salt": "x", "resumed": [{}]}).client.prompt_salt == "x"


def test_an_experiment_of_the_torch_engine_keeps_its_settings_without_a_salt():
    experiment = Experiment(backend="torch", model="tiny-llama", rates=[1])
    assert salted(experiment, {"prompt_salt": "x"}) is experiment
    experiment.check_effects()
    server = Experiment(backend="openai", client={"base_urls": ["http://127.0.0.1:1"]}, rates=[1])
    assert salted(server, {"prompt_salt": "x"}).client.prompt_salt == "x"
