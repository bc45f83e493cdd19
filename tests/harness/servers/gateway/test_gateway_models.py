"""Several models behind one queue: order, coming and going, what is lost on the way."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from slo_bench.harness.core.multi_model_policy import Gpus
from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.policies.prism.prism_controller import PrismGlobal
from slo_bench.harness.policies.static_partition import StaticPartition
from slo_bench.harness.servers.gateway import serving
from slo_bench.harness.servers.gateway.served_models import plan_in_places
from slo_bench.harness.servers.mock import Mock, MockConfig
from slo_bench.harness.servers.mock import serving as mock
from slo_bench.workloads.errors import SloBenchError

PATIENCE_S = 30
QUICK = MockConfig(ttft_s=0.002, itl_s=0.001)
LONG = 10 * PATIENCE_S


class Stage:
    """Starts and stops mocks, and keeps what it was told."""

    def __init__(self, **configs: MockConfig) -> None:
        self.configs = configs
        self.told: list[str] = []
        self.up: dict[str, Mock] = {}
        self.fails: set[str] = set()
        self._stacks: dict[str, contextlib.ExitStack] = {}

    def activate(self, model: str, gpus: Gpus, kv_tokens: int | None) -> Endpoint:
        self.told.append(f"+{model}")
        if model in self.fails:
            raise SloBenchError("out of memory")
        self._stacks[model] = contextlib.ExitStack()
        config = self.configs.get(model, QUICK)
        self.up[model] = self._stacks[model].enter_context(mock(config))
        return Endpoint.parse(self.up[model].url)

    def evict(self, model: str, gpus: Gpus) -> None:
        self.told.append(f"-{model}")
        self._stacks.pop(model).close()

    def close(self) -> None:
        for stack in self._stacks.values():
            stack.close()


@pytest.fixture
def models() -> Iterator[Callable[..., str]]:
    """The address of a gateway before models `a` and `b`."""
    with contextlib.ExitStack() as stack:

        def up(stage: Stage, policy: PrismGlobal | None = None, **more: object) -> str:
            stack.callback(stage.close)
            policy = policy or PrismGlobal(control_every_s=0.1)
            plan = plan_in_places(("a", "b"), stage, policy, **more)
            return stack.enter_context(serving(plan))

        yield up


@pytest.fixture
def asking() -> Iterator[Callable[..., http.client.HTTPConnection]]:
    """Ask without waiting for the answer; closed at the end."""
    with contextlib.ExitStack() as stack:

        def ask(url: str, model: str, **fields: object) -> http.client.HTTPConnection:
            parts = urlsplit(url)
            wire = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
            stack.callback(wire.close)
            body = {"model": model, "prompt": "a b", "max_tokens": 2, "stream": True, **fields}
            wire.request("POST", "/v1/completions", json.dumps(body))
            return wire

        yield ask


def answered(wire: http.client.HTTPConnection) -> int:
    answer = wire.getresponse()
    answer.read()
    return answer.status


def count(url: str, name: str, model: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    [value] = re.findall(rf'^slo_bench_gateway_{name}{{model="{model}"}} (\d+)$', text, re.M)
    return int(value)


def eventually(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_model_is_activated_by_its_first_request(models, asking):
    stage = Stage()
    url = models(stage)
    with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S) as answer:
        assert [entry["id"] for entry in json.load(answer)["data"]] == ["a", "b"]
    assert stage.told == []
    assert [answered(asking(url, name)) for name in "aabba"] == [200] * 5
    assert stage.told == ["+a", "+b"]
    assert [len(stage.up[name].truths()) for name in "ab"] == [3, 2]
    assert [count(url, "activations_total", name) for name in "ab"] == [1, 1]
    assert answered(asking(url, "c")) == 404


def test_models_take_turns_in_one_place(models, asking):
    stage = Stage()
    url = models(stage, max_active_models=1)
    for name in "aabab":
        assert answered(asking(url, name)) == 200
    assert stage.told == ["+a", "-a", "+b", "-b", "+a", "-a", "+b"]
    assert count(url, "evictions_total", "a") == 2


def test_concurrent_requests_for_two_models_are_all_answered(models, asking):
    stage = Stage()
    url = models(stage, max_active_models=1)
    with ThreadPoolExecutor(20) as pool:
        statuses = list(pool.map(lambda k: answered(asking(url, "ab"[k % 2])), range(20)))
    assert statuses == [200] * 20
    assert sum(count(url, "answers_total", name) for name in "ab") == 20


def test_activation_serves_all_requests_waiting_for_the_model(models, asking):
    go_on = threading.Event()

    class Slow(Stage):
        def activate(self, model: str, gpus: Gpus, kv_tokens: int | None) -> Endpoint:
            assert go_on.wait(PATIENCE_S)
            return super().activate(model, gpus, kv_tokens)

    stage = Slow()
    url = models(stage, max_active_models=1)
    waiting = [asking(url, name) for name in "abababab"]
    eventually(lambda: sum(count(url, "queued", name) for name in "ab") == 8)
    go_on.set()
    assert [answered(wire) for wire in waiting] == [200] * 8
    first, *others = stage.told
    assert others in ([f"-{first[1]}", "+b"], [f"-{first[1]}", "+a"])


def test_model_with_requests_is_not_evicted_and_queue_order_holds(models, asking):
    stage = Stage(a=MockConfig(ttft_s=0.002, itl_s=0.05))
    url = models(stage, max_active_models=1)
    first = asking(url, "a", max_tokens=100_000)
    streamed = first.getresponse()
    assert streamed.read1().startswith(b"data: ")
    waits = asking(url, "b")
    eventually(lambda: count(url, "queued", "b") == 1)
    behind = asking(url, "a")
    eventually(lambda: count(url, "queued", "a") == 1)
    assert stage.told == ["+a"]
    streamed.close()
    first.close()
    assert answered(waits) == 200
    assert answered(behind) == 200
    assert stage.told == ["+a", "-a", "+b", "-b", "+a"]


def test_queue_of_all_models_goes_by_deadline(models, asking):
    stage = Stage(a=MockConfig(ttft_s=LONG), b=MockConfig(ttft_s=LONG))
    url = models(stage, PrismGlobal(max_num_seqs=1))
    full = {name: asking(url, name) for name in "ab"}  # an engine takes one at a time
    eventually(lambda: all(count(url, "in_flight", name) == 1 for name in "ab"))
    bounds = {"a b c": 3000.0, "a b c d": 1000.0, "a b c d e": 2000.0}
    for number, (prompt, ttft_s) in enumerate(bounds.items(), 1):
        for name in "ab":
            asking(url, name, prompt=prompt, vllm_xargs={"ttft_slo_s": ttft_s})
            eventually(lambda name=name, number=number: count(url, "queued", name) == number)
    full["a"].close()
    eventually(lambda: len(stage.up["a"].truths()) == 2)
    assert [truth.prompt_tokens for truth in stage.up["a"].truths()] == [2, 4]
    assert len(stage.up["b"].truths()) == 1
    full["b"].close()
    eventually(lambda: len(stage.up["b"].truths()) == 2)
    assert [truth.prompt_tokens for truth in stage.up["b"].truths()] == [2, 4]


def test_disconnected_client_leaves_the_queue(models, asking):
    stage = Stage(a=MockConfig(ttft_s=LONG))
    url = models(stage, PrismGlobal(max_num_seqs=1))
    asking(url, "a")
    eventually(lambda: count(url, "in_flight", "a") == 1)
    waits = asking(url, "a")
    eventually(lambda: count(url, "queued", "a") == 1)
    waits.close()
    eventually(lambda: count(url, "queued", "a") == 0)
    assert count(url, "in_flight", "a") == 1


def test_failed_activation_is_answered_503_and_tried_again(models, asking):
    stage = Stage()
    stage.fails = {"b"}
    url = models(stage)
    for _ in range(2):
        wire = asking(url, "b")
        answer = wire.getresponse()
        assert answer.status == 503
        assert "b does not come up" in json.loads(answer.read())["error"]["message"]
    stage.fails.clear()
    assert answered(asking(url, "b")) == 200
    assert stage.told == ["+b"] * 3


def test_lost_model_server_is_started_again(models, asking):
    stage = Stage()
    url = models(stage)
    assert answered(asking(url, "a")) == 200
    stage.up["a"].stop()
    assert answered(asking(url, "a")) == 502
    eventually(lambda: stage.told == ["+a", "-a"])
    assert answered(asking(url, "a")) == 200
    assert stage.told == ["+a", "-a", "+a"]
    assert count(url, "losses_total", "a") == 1


def test_activating_model_does_not_delay_others(models, asking):
    go_on = threading.Event()

    class Slow(Stage):
        def activate(self, model: str, gpus: Gpus, kv_tokens: int | None) -> Endpoint:
            if model == "b":
                assert go_on.wait(PATIENCE_S)
            return super().activate(model, gpus, kv_tokens)

    stage = Slow()
    url = models(stage)
    waits = asking(url, "b")
    eventually(lambda: count(url, "queued", "b") == 1)
    assert [answered(asking(url, "a")) for _ in range(3)] == [200] * 3
    go_on.set()
    assert answered(waits) == 200


@pytest.mark.parametrize(
    ("names", "policy", "places", "problem"),
    [
        ((), PrismGlobal(), None, "needs a model"),
        (("a", "a"), PrismGlobal(), None, "two models are named a"),
        (("a",), PrismGlobal(), 0, "at least 1"),
        (("a",), StaticPartition(), 1, "by their memory"),
    ],
)
def test_models_plan_refuses_impossible_settings(names, policy, places, problem):
    with pytest.raises(SloBenchError, match=problem):
        plan_in_places(names, Stage(), policy, places).check()


def test_trace_with_models_is_measured_over_the_gateway(models, tmp_path):
    from slo_bench.harness.experiments.experiment import Experiment

    stage = Stage()
    url = models(stage, max_active_models=1)
    trace = tmp_path / "trace.csv"
    rows = [f"{0.01 * k},20,3,{'ab'[k % 3 == 2]}" for k in range(9)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,model", *rows]) + "\n")
    run = Experiment(
        backend="openai",
        client={"base_urls": (url,), "send_delay_limit_s": 5.0},
        workload=str(trace),
        replay_speeds=1.0,
        slo="ttft=100",
    ).run(tmp_path / "run")
    [row] = run.rows()
    assert row["attainment"] == 1.0
    assert [count(url, "answers_total", name) for name in "ab"] == [7, 3]  # and a first request
