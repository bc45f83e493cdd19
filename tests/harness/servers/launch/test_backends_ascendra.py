"""Ascendra's controller before real LP and HP instances of vLLM: tickets, offload, the batches."""

from __future__ import annotations

import csv
import http.client
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.core.wire import OFFLOADED

pytestmark = pytest.mark.backends

PATIENCE_S = 300
EXACT = "--server-arg=--dtype=float32"  # vLLM's own choice, bfloat16, has ties between tokens
TIGHT = {"vllm_xargs": {"ttft_slo_s": 0.0}}


class Asked:
    """A request that is under way."""

    def __init__(self, url: str, prompt: list[int], tokens: int, **more: object) -> None:
        parts = urlsplit(url)
        self.wire = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, **more}
        headers = {"content-type": "application/json"}
        self.wire.request("POST", "/v1/completions", json.dumps(body), headers)

    def begun(self) -> None:
        """Returns when the first token is there."""
        assert self.wire.getresponse().read1().startswith(b"data: ")

    def tokens(self) -> list[int]:
        answer = self.wire.getresponse()
        body = json.load(answer)
        assert answer.status == 200, body
        self.leave()
        return body["choices"][0]["token_ids"]

    def leave(self) -> None:
        self.wire.close()


def prompt(row: int, tokens: int) -> list[int]:
    draw = random.Random(row)
    return [draw.randint(10, 2000) for _ in range(tokens)]


def eventually(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def events(path: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@pytest.mark.weekly
def test_ascendra_tickets_and_offload_before_real_servers(
    started_serve, installed, tiny_model, tmp_path
):
    installed("vllm")
    words = ["ascendra", "--backend", "vllm", "--model", tiny_model("vllm"), "--served-name"]
    words += ["tiny", "--set", "n_lp=1", "--set", "max_num_seqs=1", EXACT]
    words += ["--block-size", 32, "--num-gpu-blocks", 400, "--step-log", tmp_path / "steps.jsonl"]
    requests = [(prompt(row, 20 + 17 * row), 12) for row in range(4)]
    with started_serve(*words) as up:
        # The HP instance has no prompt to compute: it gets them all.
        expected = [Asked(up.url, *request).tokens() for request in requests]
        assert up.counts("dispatched_total") == [0, 4]

        # Of what is not streamed the gateway hears nothing until its end: no tickets meanwhile.
        holds_tickets = Asked(up.url, prompt(10, 50), 4000)
        eventually(lambda: up.counts("in_flight") == [0, 1])
        fills_lp = Asked(up.url, prompt(11, 50), 4000, stream=True)  # its batch holds one
        fills_lp.begun()
        holds = 1
        if up.counts("in_flight") == [1, 0]:  # the LP instance's first step took as long as that
            holds_tickets.tokens()
            holds_tickets = Asked(up.url, prompt(10, 50), 4000)
            eventually(lambda: up.counts("in_flight") == [1, 1])
            holds = 2
        with ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(lambda request: Asked(up.url, *request, **TIGHT).tokens(), requests)
            )
        assert answers == expected
        assert up.counts("dispatched_total") == [5, 4 + holds]
        assert up.counts("offloaded_total") == [4, 0]
        assert up.counts("taken_over_total") == [0, 4]

        # Without a bound nobody is offloaded: who waits is served when there is room.
        waits = Asked(up.url, *requests[0])
        eventually(lambda: up.counts("in_flight") == [2, 1])
        fills_lp.leave()
        assert waits.tokens() == expected[0]
        assert up.counts("offloaded_total") == [4, 0]
        assert up.counts("answers_total") == [1, 7 + holds]
        holds_tickets.leave()
    away = events(tmp_path / "steps-lp-1.jsonl", "away")
    assert [release["reason"] for release in away] == [OFFLOADED] * 4
    lp, hp = (events(tmp_path / f"steps-{name}-1.jsonl", "step") for name in ("lp", "hp"))
    entered = {request_id for step in lp for request_id in step["entered"]}
    assert len(entered) == 2
    assert not entered & {release["id"] for release in away}  # nobody is taken out of a batch
    assert sum(len(step["entered"]) for step in hp) == 4 + holds + 4
    assert any(step["decode_seqs"] > 1 for step in hp)
    assert not any(step["decode_seqs"] and step["chunks"] for step in hp)  # prompts alone


@pytest.mark.weekly
def test_run_measures_ascendra(installed, tiny_model, tmp_path):
    installed("vllm")
    trace = tmp_path / "trace.csv"
    rows = [f"{k * 0.05},{40 + k},{20 + k}" for k in range(12)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    words = ["run", "--backend", "vllm", "--model", str(tiny_model("vllm")), "--replay-speed", "1"]
    words += ["--system", "ascendra", "--sweep", "ascendra.n_lp=1", "--workload", str(trace)]
    words += ["--seeds", "1", "--slo", "e2e=1000", "--server-arg=--max-model-len=512"]
    words += ["--out", str(tmp_path / "out"), "--no-report", "--records", "csv"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    with (tmp_path / "out" / "cells.csv").open() as file:
        [cell] = csv.DictReader(file)
    assert (cell["system"], cell["gpus"]) == ("ascendra", "2")
    assert float(cell["attainment"]) == 1.0
    assert int(cell["server_output_tokens"]) == sum(20 + k for k in range(12))
    assert int(cell["truncated_outputs"]) == 0
    servers = tmp_path / "out" / "servers"
    assert {path.name for path in servers.glob("*.log")} == {
        "ascendra-lp-1.log",
        "ascendra-hp-1.log",
    }
