"""A language model's server and an embedding server behind one address."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from slo_bench.harness.core.collocated_policy import Collocated  # noqa: E402
from slo_bench.harness.core.wire import REJECTED, VLLM_FIELD  # noqa: E402
from slo_bench.harness.engine.torch.encoder import Encoder  # noqa: E402
from slo_bench.harness.load_generator.http.endpoint import Endpoint  # noqa: E402
from slo_bench.harness.policies.collocation.collocation_baselines import StaticSplit  # noqa: E402
from slo_bench.harness.servers.gateway import GatewayPlan, serving_apart  # noqa: E402
from slo_bench.harness.servers.mock import MockConfig  # noqa: E402
from slo_bench.harness.servers.mock import serving as mock  # noqa: E402
from slo_bench.harness.servers.torch.embedding_server import (  # noqa: E402
    EmbeddingServer,
    embedding_server,
)
from slo_bench.workloads.errors import SloBenchError  # noqa: E402

from ..plugin.test_embedding_scheduler import scheduler_of  # noqa: E402

pytestmark = pytest.mark.torch

PATIENCE_S = 60


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    sizes = {"vocab_size": 90, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=64)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def embedder(encoder: Path) -> Iterator[EmbeddingServer]:
    with embedding_server(str(encoder), "cpu", ()) as server:
        yield server


@pytest.fixture
def gateway(embedder: EmbeddingServer) -> Iterator[Callable[[Collocated | None], tuple[str, Any]]]:
    """The address of a gateway, and the scheduler of a policy."""
    with contextlib.ExitStack() as stack:

        def up(policy: Collocated | None) -> tuple[str, Any]:
            llm = stack.enter_context(mock(MockConfig(ttft_s=0.002, itl_s=0.001))).url
            scheduler = None
            if policy is not None:
                scheduler = scheduler_of(policy, embedder.beside)
                scheduler.listen()
            plan = GatewayPlan(
                (Endpoint.parse(llm),),
                embedder=Endpoint.parse(embedder.url),
                scheduler_socket=embedder.beside.socket if scheduler else None,
            )
            return stack.enter_context(serving_apart(plan)), scheduler

        yield up


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    parts = urlsplit(url)
    wire = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    try:
        wire.request("POST", path, json.dumps(body))
        answer = wire.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        wire.close()


def embed(url: str, texts: Any, **fields: Any) -> tuple[int, Any]:
    body = {"model": "the language model's", "input": texts, **fields}
    return ask(url, "/v1/embeddings", body)


def vectors(answer: Any) -> list[list[float]]:
    return [entry["embedding"] for entry in answer["data"]]


@pytest.mark.parametrize("policy", [Collocated(), None])
def test_collocated_gateway_generates_and_embeds(gateway, encoder, policy):
    url, scheduler = gateway(policy)
    texts = [[5, 6, 7], [8, 9], [10]]
    status, answer = embed(url, texts, priority=1, **{VLLM_FIELD: {"e2e_slo_s": 3.0}})
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == 6
    expected = Encoder(encoder).embed(texts)
    assert torch.allclose(torch.tensor(vectors(answer)), expected, atol=1e-5)
    status, answer = ask(url, "/v1/completions", {"prompt": "a b", "max_tokens": 3})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    if scheduler is not None:
        assert scheduler.host.passes["embed_pass_texts"] == 3
        assert scheduler.host.taken_blocks == 0


def test_waiting_embeddings_are_computed_in_one_pass(gateway, encoder):
    url, scheduler = gateway(Collocated())
    scheduler.host.used = 100  # generation holds all memory
    with ThreadPoolExecutor(4) as pool:
        inputs = [[[5, n], [6, 7, n]] for n in range(4)]
        answers = pool.map(lambda texts: embed(url, texts), inputs)
        while len(scheduler.waiting(math.inf)) < 4:
            pass
        scheduler.host.used = 0
        for texts, (status, answer) in zip(inputs, answers, strict=True):
            assert status == 200
            expected = Encoder(encoder).embed(texts)
            assert torch.allclose(torch.tensor(vectors(answer)), expected, atol=1e-5)
    assert scheduler.host.passes["embed_passes"] == 1
    assert scheduler.host.passes["embed_pass_texts"] == 8


def test_embedding_error_fails_its_request_only(gateway):
    url, scheduler = gateway(Collocated())
    scheduler.host.used = 100
    with ThreadPoolExecutor(2) as pool:
        bad, good = (pool.submit(embed, url, texts) for texts in ([[5, 90]], [[5, 6]]))
        while len(scheduler.waiting(math.inf)) < 2:
            pass
        scheduler.host.used = 0
        assert good.result()[0] == 200
        status, answer = bad.result()
    assert status == 400
    assert "ids of tokens below 90" in answer["error"]["message"]


def test_rejected_embedding_is_answered(gateway):
    url, _ = gateway(StaticSplit(llm_share=0.99))
    status, answer = embed(url, [[5] * 64] * 64)
    assert status == 503
    assert REJECTED in answer["error"]["message"]


def test_embedding_without_a_scheduler_fails(embedder):
    with mock(MockConfig()) as llm:
        plan = GatewayPlan(
            (Endpoint.parse(llm.url),),
            embedder=Endpoint.parse(embedder.url),
            scheduler_socket="/nowhere",
        )
        with serving_apart(plan) as url:
            status, answer = embed(url, [[5]])
    assert status == 503
    assert "scheduler does not answer" in answer["error"]["message"]


def test_embedding_server_refuses_a_model_that_is_no_encoder(tmp_path):
    with (
        pytest.raises(SloBenchError, match="the folder of an encoder"),
        embedding_server("bge-m3", "cpu", ()),
    ):
        pass
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with (
        pytest.raises(SloBenchError, match="did not start"),
        embedding_server(str(tmp_path), "cpu", ()),
    ):
        pass
