"""`slo-bench serve` with several real vLLM servers behind one address: whole ones, and a split."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import re
import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.servers.launch.serve_settings import Serve

pytestmark = pytest.mark.backends

PATIENCE_S = 300
READY_S = 900  # machines that run tests are busy
BLOCK_SIZE = 32
EXACT = ("--dtype=float32",)  # vLLM's own choice, bfloat16, has ties between tokens


def ask(url: str, prompt: list[int], tokens: int) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)["choices"][0]["token_ids"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read().decode()}") from error


def samples(url: str, name: str) -> dict[str, float]:
    """Labels to values of a metric."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    matches = re.findall(rf"^{re.escape(name)}(\{{.*\}}) (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in matches}


def prompt(row: int, tokens: int) -> list[int]:
    draw = random.Random(row)
    return [draw.randint(10, 2000) for _ in range(tokens)]


@pytest.fixture
def serve(started_serve, installed, tiny_model):
    """`slo-bench serve SYSTEM …` of the tiny model."""
    installed("vllm")

    def up(system: str, *more: str):
        words = [system, "--backend", "vllm", "--model", tiny_model("vllm")]
        return started_serve(*words, "--served-name", "tiny", "--block-size", BLOCK_SIZE, *more)

    return up


@pytest.mark.weekly
def test_vllm_bench_drives_two_instances_as_one(serve, installed, tiny_model, tmp_path):
    n, tokens = 24, 8
    with serve("vllm", "--instances", "2", "--server-arg=--max-model-len=512") as up:
        if len(os.sched_getaffinity(0)) > 1:
            assert "cores, clients have the rest" in up.stderr_file.read_text()
        result = tmp_path / "bench.json"
        program = installed("vllm").programs / "vllm"
        words = [program, "bench", "serve", "--backend", "openai", "--base-url", up.url]
        words += ["--model", "tiny", "--tokenizer", tiny_model("vllm"), "--dataset-name", "random"]
        words += ["--random-input-len", "40", "--random-output-len", str(tokens), "--ignore-eos"]
        words += ["--num-prompts", str(n), "--request-rate", "20", "--disable-tqdm"]
        words += ["--save-result", "--result-dir", tmp_path, "--result-filename", result.name]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(result.read_text())
        assert report["completed"] == n
        assert report["total_output_tokens"] == n * tokens
        # It asks once by itself before it begins.
        answers = samples(up.url, "slo_bench_gateway_answers_total")
        assert sum(answers.values()) >= n
        assert len(answers) == len(up.urls) == 2
        for url in up.urls:
            [generated] = samples(url, "vllm:generation_tokens_total").values()
            assert generated >= n // 2 * tokens  # in turn
        assert not any(samples(up.url, "slo_bench_gateway_losses_total").values())


LENGTHS = (5, 32, 33, 34, 64, 65, 97, 300)
SINGLE = [(prompt(length, length), 24) for length in LENGTHS]
CROWD = [(prompt(row % 8, 100), 100) for row in range(12)]  # some prompts come twice


@pytest.fixture(scope="module")
def expected(installed, tiny_model, tmp_path_factory):
    """What one server as it is answers, each request alone."""
    installed("vllm")
    whole = Serve(
        "vllm",
        str(tiny_model("vllm")),
        None,
        served_name="tiny",
        block_size=BLOCK_SIZE,
        startup_timeout_s=READY_S,
        server_args=EXACT,
    )
    with contextlib.ExitStack() as stack:
        [server] = whole.start(stack, tmp_path_factory.mktemp("whole") / "whole.log")
        return [ask(server.url, *request) for request in [*SINGLE, *CROWD]]


# NIXL's progress threads poll: two such servers starve each other on two cores, where a transfer
# may take a minute.
@pytest.mark.parametrize("transfer", ["files", pytest.param("nixl", marks=pytest.mark.weekly)])
def test_split_servers_answer_as_one_and_decode_transferred_kv(
    serve, installed, expected, tmp_path, transfer
):
    if transfer == "nixl":
        installed("vllm", "nixl")
    scarce = ["--num-gpu-blocks", "20", "--server-arg=--no-enable-prefix-caching"]
    scarce += [f"--server-arg={word}" for word in EXACT]
    with serve("distserve", "--kv-transfer", transfer, *scarce) as up:
        prefill, decode = up.urls
        lost = []

        def answer(request: tuple[list[int], int]) -> list[int]:
            """A transfer that fails is answered with an error, never with other tokens."""
            while True:
                try:
                    return ask(up.url, *request)
                except AssertionError as error:
                    lost.append(str(error))
                    if transfer != "nixl" or len(lost) > 3 or not lost[-1].startswith("500"):
                        raise

        answers = [answer(request) for request in SINGLE]
        with ThreadPoolExecutor(len(CROWD)) as pool:
            answers += pool.map(answer, CROWD)
        assert answers == expected
        [stored] = samples(prefill, "vllm:generation_tokens_total").values()
        meetings = 1 if transfer == "nixl" else 0
        assert 0 <= stored - meetings - len(expected) <= len(lost)  # a token each
        by_source = samples(decode, "vllm:prompt_tokens_by_source_total")
        [loaded] = [tokens for labels, tokens in by_source.items() if "external_kv" in labels]
        lengths = (*LENGTHS, *(len(prompt_ids) for prompt_ids, _ in CROWD))
        whole_blocks = sum((n - 1) // BLOCK_SIZE * BLOCK_SIZE for n in lengths)
        assert loaded >= whole_blocks
        assert transfer == "nixl" or loaded == whole_blocks  # files hold whole blocks
        # The crowd does not fit: who was preempted was computed again, here, and nobody was lost.
        assert sum(samples(decode, "vllm:num_preemptions_total").values()) > 0
        kept = list((tmp_path / "tmp").glob("slo-bench-kv-*/*"))
        assert len(kept) < 8  # what was loaded does not stay


@pytest.mark.weekly
def test_run_measures_split_servers(installed, tiny_model, tmp_path):
    installed("vllm")
    trace = tmp_path / "trace.csv"
    rows = [f"{k * 0.05},{40 + k},{20 + k}" for k in range(12)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    words = ["run", "--backend", "vllm", "--model", str(tiny_model("vllm")), "--replay-speed", "1"]
    words += ["--system", "distserve", "--workload", str(trace), "--seeds", "1"]
    words += ["--slo", "e2e=1000", "--server-arg=--max-model-len=512", "--records", "csv"]
    words += ["--sweep", "block_size=32", "--sweep", "distserve.decode_instances=2"]
    words += ["--out", str(tmp_path / "out"), "--no-report"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    with (tmp_path / "out" / "cells.csv").open() as file:
        [cell] = csv.DictReader(file)
    assert cell["system"] == "distserve"
    assert cell["gpus"] == "3"
    assert float(cell["attainment"]) == 1.0
    answered = sum(20 + k for k in range(12))
    assert int(cell["server_output_tokens"]) == 12 + answered  # and one for each prefill
    assert int(cell["truncated_outputs"]) == 0
    servers = tmp_path / "out" / "servers"
    names = [f"distserve-{part}.log" for part in ("prefill-1", "decode-1", "decode-2")]
    assert all((servers / name).is_file() for name in names)
    for name in names[1:]:
        assert "Inject KV cache" in (servers / name).read_text()
