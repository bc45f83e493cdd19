"""A key that vLLM's queue keeps must not read the clock; vLLM's classes are stand-ins."""

from __future__ import annotations

import enum
import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from slo_bench.harness.servers.plugin.contract import POLICY_VARIABLE, PolicySpec
from slo_bench.policy import Policy
from slo_bench.workloads.errors import SloBenchError

PLUGIN = "slo_bench.harness.servers.vllm.plugin"


@dataclass(frozen=True)
class Waited(Policy):
    """The longest wait first: a key that moves with time."""

    def queue_key(self, r, view):
        return r.arrival_s - view.now_s


@dataclass(frozen=True)
class WaitedCached(Waited):
    queue_order = "prefix-cache"


@dataclass(frozen=True)
class WaitedDynamic(Waited):
    queue_order = "dynamic"


class Scheduler:
    """The parts of vLLM's scheduler that the plugin reads before the first step."""

    def __init__(self):
        self.max_num_scheduled_tokens, self.max_num_running_reqs = 2048, 256
        self.running, self.requests = [], {}
        self.block_size, self.connector = 16, None
        self.cache_config = SimpleNamespace(num_gpu_blocks=101, enable_prefix_caching=False)
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_seqs=256, max_num_batched_tokens=2048, async_scheduling=False
            ),
            cache_config=self.cache_config,
            model_config=SimpleNamespace(max_model_len=4096, enforce_eager=True),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.add_request(request)


def module(name, **content):
    fake = ModuleType(name)
    vars(fake).update(content)
    return fake


@pytest.fixture
def scheduler_of(monkeypatch):
    """Makes the plugin's scheduler with a policy of this file inside."""
    core = "vllm.v1.core.sched"
    policies = enum.Enum("SchedulingPolicy", "PRIORITY FCFS")
    queue = module(f"{core}.request_queue", RequestQueue=object, SchedulingPolicy=policies)
    output = SimpleNamespace
    stubs = [
        *(module(name) for name in ("vllm", "vllm.v1", "vllm.v1.core", core)),
        *(queue, module(f"{core}.scheduler", Scheduler=Scheduler)),
        module("vllm.v1.engine", EngineCoreOutput=output, EngineCoreOutputs=output),
        module("vllm.v1.request", Request=object, RequestStatus=enum.Enum("Status", "WAITING")),
    ]
    for stub in stubs:
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    for name in ("queue", "scheduler"):
        monkeypatch.delitem(sys.modules, f"{PLUGIN}.{name}", raising=False)
    kind = importlib.import_module(f"{PLUGIN}.scheduler").PolicyScheduler

    def made(policy):
        spec = PolicySpec.of(policy.__name__, policy())
        monkeypatch.setenv(POLICY_VARIABLE, spec.to_json())
        return kind()

    yield made
    for name in ("queue", "scheduler"):  # they hold the stand-ins
        sys.modules.pop(f"{PLUGIN}.{name}", None)


def request(number):
    return SimpleNamespace(
        request_id=f"r{number}",
        arrival_time=1000.0 + number,
        max_tokens=10,
        num_prompt_tokens=20,
        sampling_params=SimpleNamespace(extra_args=None),
        pooling_params=None,
    )


@pytest.mark.parametrize("policy", [Waited, WaitedCached])
def test_vllm_static_key_that_reads_the_clock_is_an_error(scheduler_of, policy):
    scheduler = scheduler_of(policy)
    with pytest.raises(SloBenchError, match=f"queue_key of {policy.__name__} reads view.now_s"):
        scheduler.add_request(request(0))


def test_vllm_dynamic_key_reads_the_time_of_the_step(scheduler_of):
    scheduler = scheduler_of(WaitedDynamic)
    for number in (1, 0):
        scheduler.add_request(request(number))
    assert [entry[2] for entry in scheduler.waiting.waiting] == ["r0", "r1"]
