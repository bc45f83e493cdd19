"""A real vLLM behind a capture: answers pass unchanged, and a replay has their lengths and hits."""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
import urllib.request

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.load_generator.http.prompts import FREQUENT_WORDS
from slo_bench.harness.servers.gateway.capture import capturing
from slo_bench.harness.servers.gateway.captured_prompts import PromptBlocks
from slo_bench.harness.servers.gateway.captured_rows import CaptureFile

pytestmark = pytest.mark.backends
BLOCK = 32
CHAT = "/v1/chat/completions"


def words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choice(FREQUENT_WORDS) for _ in range(n))


def post(url: str, path: str, body: object) -> bytes:
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as answer:
        return answer.read()


def without_names(answer: bytes) -> bytes:
    return re.sub(rb'"created":\d+|(chatcmpl|cmpl)-[0-9a-f-]+', b"", answer)


def counts(url: str) -> tuple[float, float]:
    """Prompt tokens that the prefix cache was asked for, and those that it had."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    queries, hits = (
        re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
        for name in ("queries", "hits")
    )
    return sum(map(float, queries)), sum(map(float, hits))


def talk(url: str, rng: random.Random) -> None:
    system, document = words(rng, 100), words(rng, 250)
    for _ in range(3):
        messages = [{"role": "system", "content": system}]
        for _ in range(3):
            messages.append({"role": "user", "content": words(rng, rng.randint(15, 60))})
            body = {"messages": messages, "max_tokens": 20, "ignore_eos": True, "stream": True}
            answer = post(url, CHAT, {"model": "tiny", "temperature": 0, **body}).decode()
            events = [json.loads(e[6:]) for e in answer.split("\n\n") if e[6:7] == "{"]
            parts = (event["choices"][0]["delta"].get("content") or "" for event in events)
            messages.append({"role": "assistant", "content": "".join(parts)})
        prompt = f"{document} {words(rng, 30)}"
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 9, "ignore_eos": True}
        post(url, "/v1/completions", body)


@pytest.mark.weekly
def test_captured_session_replays_with_its_lengths_and_hit_rate(
    installed, tiny_model, started_serve, tmp_path
):
    installed("vllm")
    model = tiny_model("vllm")
    path, straight_path = tmp_path / "capture.jsonl", tmp_path / "straight.jsonl"
    memory = ["--block-size", str(BLOCK), "--num-gpu-blocks", "500"]
    with started_serve("vllm", "--model", model, "--served-name", "tiny", *memory) as server:
        file = CaptureFile(straight_path, PromptBlocks(16, b"s" * 16, numbered=True), share=True)
        with capturing(Endpoint.parse(server.url), file) as url:
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
            for path_of_api, body in (
                (CHAT, {**chat, "stream": True}),
                (CHAT, chat),
                (
                    "/v1/completions",
                    {"model": "tiny", "prompt": "a b", "stream": True, "logprobs": 1},
                ),
            ):
                greedy = {**body, "temperature": 0, "max_tokens": 5}
                answers = [without_names(post(to, path_of_api, greedy)) for to in (server.url, url)]
                assert answers[0] == answers[1], path_of_api
        file.close()
        before = counts(server.url)
        file = CaptureFile(path, PromptBlocks(16, b"s" * 16, numbered=False), share=False)
        with capturing(Endpoint.parse(server.url), file) as url:
            talk(url, random.Random(0))
        file.close()
        between = counts(server.url)
        runs = {
            "server": ["--base-url", server.url, "--tokenizer", str(model)],
            "simulated": ["--system", "vllm", "--model", str(model)],
        }
        runs["simulated"] += ["--set", f"block_size={BLOCK}", "--set", "num_gpu_blocks=500"]
        for name, options in runs.items():
            run = ["run", "--workload", str(path), "--replay-speed", "1", "--seeds", "1"]
            run += ["--no-report", "--records", "csv", "--out", str(tmp_path / name), *options]
            done = CliRunner().invoke(app, run)
            assert done.exit_code == 0, done.output
        after = counts(server.url)
    captured = [json.loads(line) for line in path.read_text().splitlines()]
    hit_rates = {"captured": (between[1] - before[1]) / (between[0] - before[0])}
    hit_rates["server"] = (after[1] - between[1]) / (after[0] - between[0])
    lengths = sorted((row["prompt_tokens"], row["output_tokens"]) for row in captured)
    for name in runs:
        [records] = (tmp_path / name / "requests").glob("*.csv.gz")
        with gzip.open(records, "rt") as lines:
            rows = list(csv.DictReader(lines))
        assert (
            sorted((int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows)
            == lengths
        ), name
        if name == "simulated":
            cached = sum(int(row["cached_tokens"]) for row in rows)
            hit_rates[name] = cached / sum(prompt for prompt, _ in lengths)
    assert hit_rates["captured"] > 0.5
    for name, rate in hit_rates.items():
        assert rate == pytest.approx(hit_rates["captured"], abs=0.04), name
