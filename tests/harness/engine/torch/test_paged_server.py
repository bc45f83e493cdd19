"""The torch engine as a server on 127.0.0.1, asked by plain clients and our load generator."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

from slo_bench.harness.servers.torch.torch_server import serving_model  # noqa: E402

pytestmark = pytest.mark.torch


Greedy = Callable[[str, list[int], int], list[int]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLO_BENCH_HOME", str(home))
        with serving_model("vllm", {}, "tiny-llama", num_gpu_blocks=600) as base_url:
            yield base_url


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {name.removeprefix("slo_bench_torch_"): float(value) for name, value in pairs}


def events(text: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


ASK = {"prompt": "once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def test_torch_server_answers_health_models_and_metrics(url: str) -> None:
    assert httpx.get(f"{url}/health").status_code == 200
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert model["id"] == "tiny-llama"
    assert metrics(url)["num_gpu_blocks"] == 600


def test_torch_server_streams_the_text_of_the_whole_answer(url: str) -> None:
    whole = httpx.post(f"{url}/v1/completions", json=ASK, timeout=60).json()
    assert whole["usage"] == {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
    assert whole["choices"][0]["finish_reason"] == "length"
    body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    parts = events(httpx.post(f"{url}/v1/completions", json=body, timeout=60).text)
    assert parts[-1]["usage"] == whole["usage"]
    choices = [choice for part in parts for choice in part["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]


def test_torch_server_tokens_equal_generate(
    model_folder: Callable[[str], Path], generated: Greedy
) -> None:
    prompt_tokens = list(range(10, 40))
    with serving_model("sglang", {}, str(model_folder("llama")), num_gpu_blocks=40) as url:
        ask = {"prompt": prompt_tokens, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        for _ in range(2):  # the second time from the prefix cache
            answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=60).json()
            assert prompt_tokens + answer["choices"][0]["token_ids"] == generated(
                "llama", prompt_tokens, 9
            )
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        refused = httpx.post(f"{url}/v1/chat/completions", json=chat)
        assert refused.status_code == 400
        assert "no chat template" in refused.json()["error"]["message"]


def test_torch_server_policy_gets_the_lengths_that_a_client_predicts(
    model_folder: Callable[[str], Path],
) -> None:
    policy = Path(__file__).parents[2] / "servers" / "launch" / "long_answers_away.py"
    with serving_model(str(policy), {}, str(model_folder("llama")), num_gpu_blocks=40) as url:
        ask = {"prompt": [10, 11, 12], "max_tokens": 201, "ignore_eos": True}
        statuses = []
        for tokens in (201, 200):
            body = {**ask, "vllm_xargs": {"predicted_output_tokens": tokens}}
            statuses.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code)
        assert statuses == [503, 200]


def test_torch_servers_with_the_same_kv_store_share_prefixes(
    model_folder: Callable[[str], Path], generated: Greedy, tmp_path: Path
) -> None:
    prompt_tokens = list(range(10, 60))
    ask = {"prompt": prompt_tokens, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    tiers = [f"{tmp_path}/memory=0.001", f"{tmp_path}/disk=0.1"]
    counts = []
    for _ in range(2):
        model = str(model_folder("llama"))
        with serving_model("vllm", {}, model, num_gpu_blocks=40, kv_store=tiers) as url:
            answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=60).json()
            assert prompt_tokens + answer["choices"][0]["token_ids"] == generated(
                "llama", prompt_tokens, 9
            )
            counts.append(metrics(url))
    loaded = [int(server_metrics["kv_store_loaded_bytes_total"]) for server_metrics in counts]
    assert loaded[0] == 0
    assert loaded[1] == counts[0]["kv_store_stored_bytes_total"] > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["fifo", "--backend", "torch", "--kv-store", "kv=1"], "static batches"),
        (["orca", "--backend", "torch", "--kv-store", "kv=1"], "looks for no prefixes"),
        (["vllm", "--backend", "torch", "--kv-store", "kv"], "a folder and its size in GiB"),
        (["vllm", "--backend", "vllm", "--kv-store", "kv=1"], "--kv-store goes with"),
        (["vllm", "--backend", "vllm", "--dtype", "bfloat16"], "--dtype goes with"),
        (["vllm", "--backend", "vllm", "--device", "cpu"], "--device goes with"),
        (["vllm", "--backend", "torch", "--device", "cuda:99"], "there is no cuda:99"),
    ],
)
def test_serve_torch_refuses_impossible_settings(words: list[str], problem: str) -> None:
    refused = CliRunner().invoke(app, ["serve", *words])
    assert refused.exit_code == 1
    assert problem in str(refused.exception)


def test_torch_server_answers_chat_completions(url: str) -> None:
    ask = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 3}
    whole = httpx.post(f"{url}/v1/chat/completions", json=ask, timeout=60).json()
    assert whole["choices"][0]["message"]["role"] == "assistant"
    prompt = "user: hello\nassistant: "
    plain = {"prompt": prompt, "max_tokens": 1}
    same = httpx.post(f"{url}/v1/completions", json=plain, timeout=60).json()
    assert whole["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    body = {**ask, "stream": True}
    parts = events(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).text)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == whole["choices"][0]["message"]["content"]


def test_torch_server_stop_text_ends_the_answer(url: str) -> None:
    whole = httpx.post(f"{url}/v1/completions", json={**ASK, "max_tokens": 60}, timeout=60).json()
    text = whole["choices"][0]["text"]
    stop = text[10:12]
    ask = {**ASK, "max_tokens": 60, "stop": [stop]}
    cut = httpx.post(f"{url}/v1/completions", json=ask, timeout=60).json()["choices"][0]
    assert cut["text"] == text[: text.find(stop)]
    assert cut["finish_reason"] == "stop"


def test_torch_server_embeds_beside_generation(url: str, home: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 90, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, num_attention_heads=2)
    transformers.BertModel(config).save_pretrained(tmp_path)
    assert url  # which made it
    tiny = str(home / "models" / "random" / "tiny-llama")
    with serving_model("vllm", {}, tiny, num_gpu_blocks=60, embedder=str(tmp_path)) as url:
        pair = {"input": [[5, 6, 7], [8, 9]]}
        pair_answer = httpx.post(f"{url}/v1/embeddings", json=pair, timeout=60).json()
        assert pair_answer["usage"]["prompt_tokens"] == 5
        single_answer = httpx.post(
            f"{url}/v1/embeddings", json={"input": [8, 9]}, timeout=60
        ).json()
        second = pair_answer["data"][1]["embedding"]
        assert len(second) == 24
        assert single_answer["data"][0]["embedding"] == pytest.approx(second, abs=1e-5)
        assert httpx.post(f"{url}/v1/completions", json=ASK, timeout=60).status_code == 200
        for bad in (None, [], [900], "a text without a tokenizer"):
            refused = httpx.post(f"{url}/v1/embeddings", json={"input": bad}, timeout=60)
            assert refused.status_code == 400


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt": []}, "prompt must be"),
        ({"prompt": [99999]}, "prompt must be"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "more than the"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n must be"),
        ({"stop": 3}, "stop"),
    ],
)
def test_torch_server_refuses_bad_requests_with_400(
    url: str, change: dict[str, Any], word: str
) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={**ASK, **change}, timeout=60)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("completions", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("completions", {"suffix": "."}, "suffix"),
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"echo": True, "logprobs": 1}, "echo"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"presence_penalty": 0.5}, "presence_penalty"),
        ("completions", {"stream_options": {}}, "stream_options"),
        ("completions", {"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"prompt": "a"}, "prompt"),
        ("chat/completions", {"messages": ["hi"]}, "messages"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
        ),
    ],
)
def test_torch_server_names_unsupported_fields(
    url: str, path: str, change: dict[str, Any], param: str
) -> None:
    ask = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    answer = httpx.post(f"{url}/v1/{path}", json={**ask, **change}, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


def test_torch_server_accepts_neutral_values_of_unsupported_fields(url: str) -> None:
    nothing = {"presence_penalty": 0, "logit_bias": None, "best_of": 1, "user": "me", "echo": False}
    answer = httpx.post(f"{url}/v1/completions", json={**ASK, **nothing}, timeout=60)
    assert answer.status_code == 200, answer.text
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    nothing = {"tools": [], "response_format": {"type": "text"}, "logprobs": False}
    body = {**chat, **nothing, "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def test_torch_server_answers_404_for_another_model(url: str) -> None:
    for path, more in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": []})):
        answer = httpx.post(f"{url}/v1/{path}", json={"model": "gpt-4", **more}, timeout=60)
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"
        assert "tiny-llama" in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/models/tiny-llama").json()["id"] == "tiny-llama"
    assert httpx.get(f"{url}/v1/models/gpt-4").status_code == 404
    assert httpx.get(f"{url}/v1/nothing").status_code == 404


def test_torch_server_answers_several_prompts_with_several_choices(url: str) -> None:
    prompts = ["one", "one or two words", "one"]
    ask = {"max_tokens": 5, "seed": 3, "temperature": 1}
    body = {**ask, "prompt": prompts, "n": 2}
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    choices = whole["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    texts = [choice["text"] for choice in choices]
    assert texts[:2] == texts[4:]
    assert texts[0] != texts[1]
    alone = [
        httpx.post(f"{url}/v1/completions", json={**ask, "prompt": prompt}, timeout=60).json()
        for prompt in prompts
    ]
    assert [answer["choices"][0]["text"] for answer in alone] == texts[::2]
    prompt_tokens = sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert whole["usage"]["prompt_tokens"] == prompt_tokens
    assert whole["usage"]["completion_tokens"] == 30
    parts = events(
        httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60).text
    )
    streamed_texts = [""] * 6
    for part in parts:
        for choice in part["choices"]:
            streamed_texts[choice["index"]] += choice["text"]
    assert streamed_texts == texts
    ends = [choice["finish_reason"] for part in parts for choice in part["choices"]]
    assert ends.count("length") == 6


def test_torch_server_echo_precedes_the_answer(url: str) -> None:
    plain = httpx.post(f"{url}/v1/completions", json=ASK, timeout=60).json()["choices"][0]["text"]
    body = {**ASK, "echo": True}
    echoed = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert echoed["text"] == ASK["prompt"] + plain
    parts = events(
        httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60).text
    )
    assert "".join(choice["text"] for part in parts for choice in part["choices"]) == echoed["text"]


def test_torch_server_streams_continuous_usage(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**ASK, "stream": True, "stream_options": options}
    parts = events(httpx.post(f"{url}/v1/completions", json=body, timeout=60).text)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 12


def test_torch_server_logprobs_equal_those_of_the_model(
    model_folder: Callable[[str], Path], url: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder, prompt_tokens = model_folder("llama"), list(range(10, 40))
    ask = {"prompt": prompt_tokens, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    with serving_model("vllm", {}, str(folder), num_gpu_blocks=40) as bare:
        answer = httpx.post(f"{bare}/v1/completions", json={**ask, "logprobs": 3}, timeout=60)
        (choice,) = answer.json()["choices"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt_tokens + choice["token_ids"]])).logits[0]
    expected = torch.log_softmax(logits[len(prompt_tokens) - 1 : -1].float(), -1)
    for position, token in enumerate(choice["token_ids"]):
        logprob = choice["logprobs"]["token_logprobs"][position]
        assert logprob == pytest.approx(float(expected[position, token]), abs=1e-3)
    body = {**ASK, "logprobs": 3}
    choice = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    logprobs = choice["logprobs"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert max(top.values()) == top[token] == value  # a temperature of 0 takes the likeliest
        assert len(top) == 3
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    parts = events(
        httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60).text
    )
    streamed = [
        part_choice["logprobs"]
        for part in parts
        for part_choice in part["choices"]
        if part_choice["logprobs"]
    ]
    assert [entry["token_logprobs"][0] for entry in streamed] == logprobs["token_logprobs"]
    assert [entry["text_offset"][0] for entry in streamed] == logprobs["text_offset"]


def test_torch_server_frees_blocks_of_a_disconnected_client(url: str) -> None:
    ask = {**ASK, "max_tokens": 4000, "stream": True}
    before = metrics(url)["requests_cancelled_total"]
    with httpx.stream("POST", f"{url}/v1/completions", json=ask, timeout=60) as stream:
        next(stream.iter_lines())
    for _ in range(500):
        counters = metrics(url)
        if counters["requests_cancelled_total"] > before and not counters["num_requests_running"]:
            break
        time.sleep(0.02)
    assert counters["requests_cancelled_total"] == before + 1
    assert counters["num_requests_running"] == 0


def test_load_generator_measures_the_torch_server(url: str, home: Path, tmp_path: Path) -> None:
    before = metrics(url)
    words = ["run", "--base-url", url, "--rates", "20", "--requests", "15", "--seeds", "1"]
    words += ["--workload", "alpaca", "--tokenizer", str(home / "models" / "random" / "tiny-llama")]
    done = CliRunner().invoke(app, [*words, "--no-report", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    with (tmp_path / "run" / "cells.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["finished"] == "15"
    after = metrics(url)
    assert after["requests_total"] - before["requests_total"] >= 15
    assert after["generation_tokens_total"] > before["generation_tokens_total"]
