"""Several models on several GPUs: the simulator's policies say where they wake up and who waits."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from slo_bench.harness.core.kv.pages import PAGE_BYTES
from slo_bench.harness.core.multi_model_policy import Gpus, MultiModelCluster, ServedModel
from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.policies.prism import prism_controller
from slo_bench.harness.policies.prism.kv_pressure import best_gpus
from slo_bench.harness.policies.prism.prism_controller import PrismGlobal
from slo_bench.harness.policies.static_partition import StaticPartition
from slo_bench.harness.servers.gateway import mechanism_counts, serving
from slo_bench.harness.servers.gateway.served_gpus import MeasuredPrefill, PlainMemory
from slo_bench.harness.servers.gateway.served_models import SharedPlan
from slo_bench.harness.servers.mock import Mock, MockConfig
from slo_bench.harness.servers.mock import serving as mock
from slo_bench.workloads.errors import SloBenchError

from .test_gateway_models import LONG, PATIENCE_S, QUICK, answered, asking, count, eventually

__all__ = ["asking"]  # a fixture

ONE_EACH, TWO_EACH = 150, 250  # pages of a GPU; a model's weights have 100
TOKENS_A_PAGE = 1024
RARE = PrismGlobal(control_every_s=600.0)


class Stage:
    """Starts and stops mocks on GPUs; `waits`: acts that wait until they are let go."""

    def __init__(self, **configs: MockConfig) -> None:
        self.configs = configs
        self.told: list[str] = []
        self.kv_tokens: dict[str, int | None] = {}
        self.up: dict[str, Mock] = {}
        self.fails: set[str] = set()
        self.waits: dict[str, threading.Event] = {}
        self._stacks: dict[tuple[str, Gpus], contextlib.ExitStack] = {}

    def _act(self, act: str) -> None:
        self.told.append(act)
        if act in self.waits:
            assert self.waits[act].wait(PATIENCE_S)
        if act in self.fails:
            raise SloBenchError("out of memory")

    def activate(self, model: str, gpus: Gpus, kv_tokens: int | None) -> Endpoint:
        self._act(f"+{model}{gpus[0]}")
        assert not any(gpus == theirs for name, theirs in self._stacks if name == model)
        stack = self._stacks[model, gpus] = contextlib.ExitStack()
        self.kv_tokens[model] = kv_tokens
        self.up[model] = stack.enter_context(mock(self.configs.get(model, QUICK)))
        return Endpoint.parse(self.up[model].url)

    def evict(self, model: str, gpus: Gpus) -> None:
        self._act(f"-{model}{gpus[0]}")
        self._stacks.pop((model, gpus)).close()

    @property
    def standing(self) -> list[str]:
        return [name for name, _ in self._stacks]

    def close(self) -> None:
        for wait in self.waits.values():
            wait.set()
        for stack in self._stacks.values():
            stack.close()


def model_of(index: int, name: str, rate_rps: float) -> ServedModel:
    memory = PlainMemory(
        weight_bytes_per_gpu=100 * PAGE_BYTES,
        kv_bytes_per_token=PAGE_BYTES // TOKENS_A_PAGE,
        block_size=16,
        block_bytes_per_gpu=PAGE_BYTES // TOKENS_A_PAGE * 16,
    )
    return ServedModel(index, name, memory, MeasuredPrefill(1e-4), rate_rps, 10.0, 10.0, 1.0)


@pytest.fixture
def gateway() -> Iterator[Callable[..., str]]:
    """The address of a gateway before models, by name with their rates, on two GPUs."""
    with contextlib.ExitStack() as stack:

        def up(
            stage: Stage,
            rates: Mapping[str, float],
            policy: PrismGlobal | StaticPartition = RARE,
            pages: int = ONE_EACH,
            **more: bool,
        ) -> str:
            stack.callback(stage.close)
            models = [model_of(k, name, rate) for k, (name, rate) in enumerate(rates.items())]
            return stack.enter_context(serving(SharedPlan(models, stage, policy, pages, 2, **more)))

        yield up


EVEN = dict.fromkeys("abc", 1.0)


def busy(
    asking: Callable[..., http.client.HTTPConnection], url: str, name: str
) -> http.client.HTTPConnection:
    """A request that is being answered and does not end."""
    wire = asking(url, name, max_tokens=2000)
    assert wire.getresponse().read1().startswith(b"data: ")
    return wire


SLOW = MockConfig(ttft_s=0.002, itl_s=0.05)


@pytest.mark.parametrize(("rates", "gpu"), [((10.0, 0.1), 1), ((0.1, 10.0), 0)])
def test_model_wakes_up_where_algorithm_1_of_the_simulator_says(
    gateway, asking, monkeypatch, rates, gpu
):
    chosen: list[Gpus] = []

    def recorded(*args, **kwargs):
        chosen.append(best_gpus(*args, **kwargs))
        return chosen[-1]

    monkeypatch.setattr(prism_controller, "best_gpus", recorded)
    stage = Stage(a=SLOW, b=SLOW)
    url = gateway(stage, dict(zip("abc", (*rates, 1.0), strict=True)), pages=TWO_EACH)
    for name in "ab":
        busy(asking, url, name)
    assert answered(asking(url, "c")) == 200
    assert stage.told == ["+a0", "+b1", f"+c{gpu}"]
    assert chosen == [(0,), (1,), (gpu,)]
    assert mechanism_counts(url) == {"activations": 3, "evictions": 0, "moves": 0}


def test_idle_model_is_evicted_and_busy_one_is_not(gateway, asking):
    stage = Stage(a=SLOW)
    url = gateway(stage, EVEN)
    busy(asking, url, "a")
    assert answered(asking(url, "b")) == 200
    assert answered(asking(url, "c")) == 200
    assert stage.told == ["+a0", "+b1", "-b1", "+c1"]
    assert [count(url, "evictions_total", name) for name in "abc"] == [0, 1, 0]


def test_failed_wake_up_is_refused_and_leaves_the_gpu_free(gateway, asking):
    stage = Stage()
    stage.fails = {"+c0"}
    url = gateway(stage, EVEN)
    for _ in range(2):
        assert answered(asking(url, "c")) == 503
    assert answered(asking(url, "a")) == 200
    stage.fails.clear()
    assert answered(asking(url, "b")) == 200
    assert answered(asking(url, "c")) == 200
    assert stage.told[:3] == ["+c0", "+c0", "+a0"]
    assert count(url, "activations_total", "c") == 1


def test_requests_for_a_sleeping_model_wake_it_once(gateway, asking):
    stage = Stage()
    stage.waits["+a0"] = threading.Event()
    url = gateway(stage, EVEN)
    waiting = [asking(url, "a") for _ in range(5)]
    eventually(lambda: count(url, "queued", "a") == 5)
    stage.waits["+a0"].set()
    assert [answered(wire) for wire in waiting] == [200] * 5
    assert stage.told == ["+a0"]


def test_model_never_stands_on_two_gpus_and_all_requests_are_answered(gateway, asking):
    stage = Stage()
    url = gateway(stage, EVEN, PrismGlobal(control_every_s=0.1, drains=True))
    names = random.Random(1).choices("abc", k=60)
    with ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(lambda name: answered(asking(url, name)), names))
    assert statuses == [200] * 60
    standing: set[str] = set()
    for act in stage.told:
        assert (act[1] in standing) == (act[0] == "-")
        standing ^= {act[1]}
    assert sorted(standing) == sorted(stage.standing)


@dataclasses.dataclass(frozen=True)
class Moving(PrismGlobal):
    """Moves `a` to the other GPU at the first review."""

    def control_step(self, cluster: MultiModelCluster) -> None:
        serves = cluster.serving[0]
        if serves is not None and serves.gpus == (0,) and not cluster.moves(0):
            cluster.activate(cluster.models[0], (1,))


def test_moved_model_serves_old_requests_where_they_began(gateway, asking):
    stage = Stage(a=SLOW)
    url = gateway(stage, EVEN, Moving(control_every_s=0.1))
    old = busy(asking, url, "a")
    first = stage.up["a"]
    eventually(lambda: stage.up["a"] is not first)
    eventually(lambda: answered(asking(url, "a")) == 200 and len(stage.up["a"].truths()) > 0)
    assert stage.told == ["+a0", "+a1"]
    old.close()
    eventually(lambda: stage.told == ["+a0", "+a1", "-a0"])


def test_request_that_is_late_anyway_waits_behind_those_in_time(gateway, asking):
    stage = Stage(a=MockConfig(ttft_s=LONG))
    url = gateway(stage, EVEN, PrismGlobal(control_every_s=600.0, max_num_seqs=1))
    full = asking(url, "a")
    eventually(lambda: count(url, "in_flight", "a") == 1)
    for number, (prompt, ttft_s) in enumerate([("a b c", 1e-6), ("a b c d", 1000.0)], 1):
        asking(url, "a", prompt=prompt, vllm_xargs={"ttft_slo_s": ttft_s})
        eventually(lambda number=number: count(url, "queued", "a") == number)
    full.close()
    eventually(lambda: len(stage.up["a"].truths()) == 2)
    assert [truth.prompt_tokens for truth in stage.up["a"].truths()] == [2, 4]


def test_request_waits_while_pages_are_short(gateway, asking):
    stage = Stage(a=SLOW)
    url = gateway(stage, EVEN)
    # The first takes all 50 pages that the weights leave.
    full = asking(url, "a", max_tokens=50 * TOKENS_A_PAGE)
    assert full.getresponse().read1().startswith(b"data: ")
    waits = asking(url, "a")
    eventually(lambda: count(url, "queued", "a") == 1)
    full.close()
    assert answered(waits) == 200


def test_request_during_the_eviction_of_its_model_is_answered(gateway, asking):
    stage = Stage(a=SLOW)
    stage.waits["-b1"] = threading.Event()
    url = gateway(stage, EVEN, PrismGlobal(control_every_s=0.1))
    busy(asking, url, "a")
    assert answered(asking(url, "b")) == 200
    comes = asking(url, "c")
    eventually(lambda: "-b1" in stage.told)
    again = asking(url, "b")
    eventually(lambda: count(url, "queued", "b") == 1)
    stage.waits["-b1"].set()
    assert answered(comes) == 200
    assert answered(again) == 200
    assert stage.told == ["+a0", "+b1", "-b1", "+c1", "-c1", "+b1"]


def test_model_whose_client_left_while_it_came_up_serves_the_next(gateway, asking):
    stage = Stage()
    stage.waits["+a0"] = threading.Event()
    url = gateway(stage, EVEN)
    leaves = asking(url, "a")
    eventually(lambda: count(url, "queued", "a") == 1)
    leaves.close()
    eventually(lambda: count(url, "queued", "a") == 0)
    stage.waits["+a0"].set()
    assert answered(asking(url, "a")) == 200
    assert stage.told == ["+a0"]


def test_static_partition_starts_models_with_its_parts_and_rejects_the_one_without_room(
    gateway, asking
):
    stage = Stage()
    stage.waits["+a0"] = threading.Event()
    url = gateway(stage, {"a": 3.0, "b": 2.0, "c": 1.0}, StaticPartition(), begins=True)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S)
    stage.waits["+a0"].set()
    assert [answered(asking(url, name)) for name in "ab"] == [200, 200]
    with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S) as answer:
        assert answer.status == 200
    refused = asking(url, "c").getresponse()
    assert refused.status == 503
    assert "slo_bench: rejected" in json.loads(refused.read())["error"]["message"]
    assert sorted(stage.told) == ["+a0", "+b1"]
    assert stage.kv_tokens == {"a": 50 * TOKENS_A_PAGE, "b": 50 * TOKENS_A_PAGE}


def test_health_names_a_model_that_does_not_come_up_at_the_start(gateway):
    stage = Stage()
    stage.fails = {"+a0"}
    url = gateway(stage, {"a": 3.0}, StaticPartition(), begins=True)

    def fails() -> bool:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S)
        except urllib.error.HTTPError as error:
            return error.code == 500 and "a: out of memory" in error.read().decode()
        return False

    eventually(fails)
