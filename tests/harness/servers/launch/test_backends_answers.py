"""What real servers' answers count: tokens of every API, streamed and hidden reasoning, choices."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.load_generator.http import Api, Endpoint, HttpOptions
from slo_bench.harness.load_generator.routed_load import measure
from slo_bench.harness.servers.launch.random_model import make_model, model_fields
from slo_bench.harness.servers.launch.serve_settings import Serve
from slo_bench.workloads.workload import Workload

pytestmark = pytest.mark.backends

END_OF_THOUGHT = 2047
TOKENS = 24
TEMPLATE = (
    "{% for m in messages %}{% for k in range(5) %}{{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# The model ends its thoughts after about ten tokens.
THINKS = {"temperature": 1, "logit_bias": {str(END_OF_THOUGHT): 5.3}}


def thinking_model(folder):
    """A tiny model whose last two tokens are those around thoughts, and whose chat template says
    every message five times.
    """
    make_model(folder, {**model_fields(), "max_position_embeddings": 4096})
    path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    removed = {word for word, number in vocabulary.items() if number >= END_OF_THOUGHT - 1}
    merges = tokenizer["model"]["merges"]
    joined = ["".join(m) if isinstance(m, list) else m.replace(" ", "") for m in merges]
    kept = [merge for merge, word in zip(merges, joined, strict=True) if word not in removed]
    tokenizer["model"]["merges"] = kept
    for word in removed:
        del vocabulary[word]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for number, word in ((END_OF_THOUGHT - 1, "<think>"), (END_OF_THOUGHT, "</think>")):
        tokenizer["added_tokens"].append({"id": number, "content": word, **flags})
    path.write_text(json.dumps(tokenizer))
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def thinker(installed, tmp_path_factory):
    """vLLM with a reasoning parser, which sends four tokens an event."""
    installed("vllm")
    folder = tmp_path_factory.mktemp("thinker")
    serve = Serve(
        backend="vllm",
        model=str(thinking_model(folder / "model")),
        system=None,
        served_name="tiny",
        max_model_tokens=4096,
        block_size=32,
        server_args=("--dtype=float32", "--reasoning-parser=deepseek_r1", "--stream-interval=4"),
    )
    with contextlib.ExitStack() as stack:
        [server] = serve.start(stack, folder / "server.log")
        yield server


def answers(server, n=3, **options):
    workload = Workload(np.arange(n) * 0.05, np.full(n, 30), np.full(n, TOKENS))
    lenient = {"send_delay_limit_s": 600.0, "rate_limit_share": 1.0, "processes": 1}
    http_options = HttpOptions(model="tiny", **lenient, token_ids=(10, 2000), **options)
    return measure(workload, [Endpoint.parse(server.url)], http_options)


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT, Api.RESPONSES, Api.MESSAGES])
def test_answers_of_each_api_have_the_tokens_of_their_usage(thinker, api):
    columns = answers(thinker, api=api, body=THINKS if api is Api.CHAT else {}).columns
    assert (columns.outcome == Outcome.FINISHED).all()
    assert (columns.completion_tokens == columns.output_tokens).all()
    assert (columns.output_tokens == TOKENS).all()
    # Four tokens an event or more: a server that lags sends several as one, or at one moment.
    assert ((columns.chunks > 0) & (columns.chunks < TOKENS / 2)).all()
    assert not (columns.unsure | columns.refuted).any()
    prompts = columns.prompt_tokens
    assert (prompts == 30).all() if api is Api.COMPLETIONS else (prompts > 100).all()


def test_reasoning_that_the_request_hides_leaves_no_time_per_token(thinker):
    hidden = {**THINKS, "include_reasoning": False}
    columns = answers(thinker, n=6, api=Api.CHAT, body=hidden).columns
    # Where the thoughts did not end, nothing was shown.
    assert set(columns.outcome) <= {Outcome.FINISHED, Outcome.FAILED}
    shown = (columns.outcome == Outcome.FINISHED) & (columns.chunks > 1)
    assert (columns.unsure[shown] == 1).all()
    assert (columns.untimed_tokens[shown] == columns.output_tokens[shown]).all()


def test_two_choices_have_the_tokens_of_both(thinker):
    columns = answers(thinker, body={"n": 2, "temperature": 1}).columns
    assert (columns.output_tokens == 2 * TOKENS).all()
    assert not columns.surplus.any()


def test_level_of_a_server_that_is_killed_ends_and_names_what_was_served(thinker):
    guard = thinker._process.pid
    [leader] = map(int, Path(f"/proc/{guard}/task/{guard}/children").read_text().split())

    def kill(progress, _clock_s):
        if progress.ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)  # with the processes that it started

    n = 600
    workload = Workload(np.arange(n) * 0.2, np.full(n, 30), np.full(n, TOKENS))
    options = HttpOptions(model="tiny", send_delay_limit_s=600.0, token_ids=(10, 2000))
    measurement = measure(workload, [Endpoint.parse(thinker.url)], options, progress=kill)
    assert "no server could be reached" in measurement.invalid_because
    assert (measurement.columns.outcome == Outcome.CANCELLED).sum() > n / 2
