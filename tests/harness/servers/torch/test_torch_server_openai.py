"""The torch engine's server, asked by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")

from slo_bench.harness.servers.launch.random_model import make_model  # noqa: E402
from slo_bench.harness.servers.torch.torch_server import serving_model  # noqa: E402

pytestmark = pytest.mark.torch

MESSAGES: list[Any] = [{"role": "user", "content": "write one more word"}]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path_factory.mktemp("embedder")
    sizes = {"vocab_size": 90, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, num_attention_heads=2)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, embedder: Path) -> Iterator[Any]:
    folder = make_model(tmp_path_factory.mktemp("models") / "tiny")
    with serving_model("vllm", {}, str(folder), num_gpu_blocks=200, embedder=str(embedder)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_openai_client_lists_models(client: Any, embedder: Path) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", embedder.name]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_openai_client_chats_with_logprobs(client: Any) -> None:
    request = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 6, "seed": 1}
    whole = client.chat.completions.create(**request, n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage.completion_tokens == 12
    for choice in whole.choices:
        content = choice.logprobs.content
        assert len(content) == 6
        assert "".join(entry.token for entry in content) == choice.message.content
        assert all(len(entry.top_logprobs) == 2 for entry in content)
        assert all(entry.logprob <= 0 for entry in content)


def test_openai_client_streams_with_usage(client: Any) -> None:
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**request)
    options = {"include_usage": True}
    parts = list(client.chat.completions.create(**request, stream=True, stream_options=options))
    text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].usage == whole.usage
    assert all(part.usage is None for part in parts[:-1])
    assert parts[-2].choices[0].finish_reason == "length"


def test_openai_client_completes_several_prompts(client: Any) -> None:
    request = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 3, "temperature": 0}
    whole = client.completions.create(**request, n=2, echo=True)
    assert [choice.text[0] for choice in whole.choices] == ["a", "a", "b", "b"]
    whole = client.completions.create(**request, logprobs=2)
    assert len(whole.choices[1].logprobs.top_logprobs) == 3


def test_openai_client_embeds(client: Any, embedder: Path) -> None:
    request = {"model": embedder.name, "input": [[5, 6, 7], [8, 9]]}
    encoded = client.embeddings.create(**request)  # base64, by default
    plain = client.embeddings.create(**request, encoding_format="float")
    for from_base64, plain_entry in zip(encoded.data, plain.data, strict=True):
        assert from_base64.embedding == pytest.approx(plain_entry.embedding, abs=1e-6)


def test_openai_client_gets_errors_of_its_classes(client: Any) -> None:
    request = {"model": "tiny", "messages": MESSAGES}
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'"):
        client.chat.completions.create(**{**request, "model": "gpt-4"})
    function = {"type": "function", "function": {"name": "look", "parameters": {}}}
    schema = {"name": "answer", "schema": {"type": "object"}}
    for name, value in (
        ("tools", [function]),
        ("response_format", {"type": "json_schema", "json_schema": schema}),
        ("logit_bias", {"5": 1}),
        ("reasoning_effort", "low"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**request, **{name: value})
        assert refused.value.param == name
        assert name in str(refused.value)
