"""The real vLLM scheduler, run by our policies without a model, does what the simulator does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.examples import ALL
from slo_bench.harness.core.device import StageDevice
from slo_bench.harness.core.kv.kv_cache_manager import KVCacheManager
from slo_bench.harness.core.policy import Policy
from slo_bench.harness.core.predictions import ModelledPredictions
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.core.wire import DROPPED, OFFLOADED, to_wire
from slo_bench.harness.engine.loop.measures import Measures
from slo_bench.harness.engine.simulator.simulated import SimulatedInstance
from slo_bench.harness.policies.adaptivellm import AdaptiveLlm
from slo_bench.harness.policies.ascendra.high_priority import AscendraHp
from slo_bench.harness.policies.ascendra.low_priority import AscendraLp
from slo_bench.harness.policies.collocation.collocation_policy import Collocation
from slo_bench.harness.policies.edf import EarliestDeadlineFirst
from slo_bench.harness.policies.edf_drop import EdfDrop
from slo_bench.harness.policies.fastserve import FastServe
from slo_bench.harness.policies.prism.prism_local import PrismLocal
from slo_bench.harness.policies.sarathi import Sarathi
from slo_bench.harness.policies.systems import system
from slo_bench.harness.policies.uellm.slo_odbs_continuous import SloOdbsContinuous
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.harness.policies.vllm_swap import VllmSwap
from slo_bench.harness.policies.vllm_v0 import VllmV0
from slo_bench.harness.servers.launch.server_process import plugin_folder
from slo_bench.harness.servers.plugin.contract import IdleView, PolicySpec
from slo_bench.workloads.request import Request, Slo

pytestmark = pytest.mark.backends

WORKER = Path(__file__).with_name("contract_worker.py")
BLOCK_SIZE = 16
TICKS_PER_S = 8192  # a power of two: moments on the grid are exact
ARRIVALS_PER_S = 128
WORKLOADS = 20 if ALL else 4  # of each setting
SwapAlways = type(system(str(Path(__file__).parents[1] / "launch" / "swap_always.py")).policy)


@dataclass(frozen=True)
class Costs:
    """The same for decode steps of any size; so much more a token prefilled, and a block moved."""

    step_ticks: int = 64
    token_ticks: int = 0
    block_ticks: int = 0

    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        prefilled = sum(tokens for _, tokens in chunks)
        return (self.step_ticks + self.token_ticks * prefilled) / TICKS_PER_S

    def span_s(self, decode_seqs, decode_kv_tokens, steps):
        return steps * self.step_ticks / TICKS_PER_S

    def steps_within(self, decode_seqs, decode_kv_tokens, duration_s):
        return max(0, -int(-duration_s * TICKS_PER_S // self.step_ticks))


# Of a request of up to 128 tokens a swap, out and in, is the cheaper way; of a longer one the
# recomputation: 64 + tokens against 2 · 12 ticks for each block of 16.
WEIGHED = Costs(step_ticks=64, token_ticks=1, block_ticks=12)
FAST_LINK = Costs(step_ticks=64, token_ticks=1, block_ticks=4)


class Watched(SimulatedInstance):
    """Remembers who was preempted, how, and with how many tokens in KV."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.preempted: list[list] = []

    def _preempt(self) -> None:
        before = {r: (self.view.kv_tokens(r), r.swaps) for r in (*self.decoding, *self.prefilling)}
        super()._preempt()
        for r in set(before) - {*self.decoding, *self.prefilling}:
            tokens, swaps = before[r]
            how = "swap" if r.swaps > swaps else "recompute"
            self.preempted.append([r.id, how, tokens])


@dataclass(frozen=True)
class Case:
    policy: Policy
    num_gpu_blocks: int
    num_cpu_blocks: int
    requests: tuple[Request, ...]
    costs: Costs = Costs()

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "arrival_ticks": round(r.arrival_s * TICKS_PER_S),
                "prompt_tokens": r.prompt_tokens,
                "output_tokens": r.output_tokens,
                "wire": to_wire(r),
            }
            for r in self.requests
        ]
        spec = PolicySpec.of("under test", self.policy)
        return {
            "policy": dataclasses.asdict(spec),
            "num_gpu_blocks": self.num_gpu_blocks,
            "num_cpu_blocks": self.num_cpu_blocks,
            "requests": rows,
            "costs": dataclasses.asdict(self.costs),
            "chunked": self.policy.limits(IdleView(self.policy)).chunked,
        }

    def simulated(self) -> Watched:
        instance = Watched(
            self.policy,
            KVCacheManager(self.num_gpu_blocks, BLOCK_SIZE, self.num_cpu_blocks),
            ModelledPredictions(self.costs, self.costs.block_ticks / TICKS_PER_S),
            self.costs,
            (StageDevice("one"),),
            Measures(),
        )
        for r in self.requests:
            state = RequestState(
                r.id, r.arrival_s, r.prompt_tokens, r.output_tokens, r.max_output_tokens, r.slo
            )
            state.priority = r.priority
            instance.inbox.append(state)
        instance.run(float("inf"), stop_on_release=False)
        return instance


@dataclass(frozen=True)
class Setting:
    """A policy, with host memory for swapping and what steps and swaps cost."""

    policy: Policy
    num_cpu_blocks: int = 0
    costs: Costs = Costs()


SETTINGS = {
    "vllm": Setting(Vllm()),
    "edf": Setting(EarliestDeadlineFirst()),
    "swap, host memory full": Setting(SwapAlways(), 12),
    "swap": Setting(SwapAlways(), 1000),
    "edf-drop": Setting(EdfDrop(caution=0.0)),
    "vllm-v0": Setting(VllmV0()),
    "vllm-swap": Setting(VllmSwap(host_full="recompute"), 12, WEIGHED),
    "adaptivellm": Setting(AdaptiveLlm(), 1000, WEIGHED),
    "adaptivellm, host memory full": Setting(AdaptiveLlm(), 12, WEIGHED),
    "adaptivellm, groups by mean": Setting(AdaptiveLlm(groups="mean-priority"), 1000, WEIGHED),
    "adaptivellm, unfair": Setting(AdaptiveLlm(fair=False), 1000, WEIGHED),
    "adaptivellm, in chunks": Setting(AdaptiveLlm(chunk_tokens=512), 20, FAST_LINK),
    "adaptivellm, in chunks, host memory full": Setting(
        AdaptiveLlm(chunk_tokens=512, fair=False), 12, FAST_LINK
    ),
    "adaptivellm, in chunks, groups by mean": Setting(
        AdaptiveLlm(chunk_tokens=512, groups="mean-priority"), 40, FAST_LINK
    ),
    "sarathi": Setting(Sarathi(), 0, WEIGHED),
    "prism": Setting(PrismLocal(), 0, WEIGHED),
    "prism, victims by slack": Setting(PrismLocal(victim="slack"), 0, WEIGHED),
    "ascendra": Setting(AscendraLp(), 0, WEIGHED),
    "ascendra, shortest first": Setting(AscendraLp(value="sjf", misfit="stop"), 0, WEIGHED),
    "ascendra, short steps": Setting(AscendraLp(step_budget_s=0.02), 0, WEIGHED),
    "ascendra, short steps, shortest first": Setting(
        AscendraLp(step_budget_s=0.02, value="sjf", misfit="stop"), 0, WEIGHED
    ),
    "ascendra, offloading": Setting(AscendraLp(worst_batch_tokens=64), 0, WEIGHED),
    "ascendra, high priority": Setting(AscendraHp(spare=0.0, watermark=0.0), 0, WEIGHED),
    "ascendra, high priority, no larger batches": Setting(AscendraHp(elastic=False), 0, WEIGHED),
    "slo-odbs": Setting(SloOdbsContinuous(threshold=1000.0), 0, WEIGHED),
    "fastserve": Setting(FastServe(), 1000, WEIGHED),
    # Half of the requests have high priority, which must reach the policy.
    "collocation": Setting(
        Collocation(counts="current", safety_ratio=0.0, kv_scale=0.1), 0, WEIGHED
    ),
    "odbs": Setting(SloOdbsContinuous(slo_weight=0.0, sort_by="weighted", threshold=300.0)),
}


def drawn(seed: int, setting: Setting) -> Case:
    """A random workload on few KV blocks."""
    draw = np.random.default_rng(seed)
    seqs = int(draw.choice([4, 16, 64]))
    tokens = int(draw.choice([64, 128, 512, 2048]))
    rate = (1, 8, 40, 200)[seed % 4]  # requests per second
    moments = np.cumsum(draw.exponential(1 / rate, 60))
    urgent = np.random.default_rng([1, seed]).integers(0, 2, 60)
    requests = tuple(
        Request(
            row,
            round(float(moment) * ARRIVALS_PER_S) / ARRIVALS_PER_S,
            int(draw.integers(1, 300)),
            output := int(draw.integers(1, 150)),
            output,
            Slo(ttft_s=float(draw.uniform(0.05, 2.0))),
            priority=int(urgent[row]),
        )
        for row, moment in enumerate(moments)
    )
    names = ("chunk_tokens", "max_num_batched_tokens", "token_budget")
    budget = next(name for name in names if getattr(setting.policy, name, 0))
    policy = setting.policy.with_parameters(**{budget: tokens, "max_num_seqs": seqs})
    num_gpu_blocks = int(draw.choice([40, 80, 160]))
    return Case(policy, num_gpu_blocks, setting.num_cpu_blocks, requests, setting.costs)


@pytest.fixture(scope="module")
def cases() -> dict[str, list[Case]]:
    return {
        name: [drawn(100 * row + seed, setting) for seed in range(WORKLOADS)]
        for row, (name, setting) in enumerate(SETTINGS.items())
    }


@pytest.fixture(scope="module")
def answer(cases, vllm_python, tiny_model, tmp_path_factory) -> dict[str, Any]:
    plugin = plugin_folder(tmp_path_factory.mktemp("home"))
    path = os.pathsep.join(filter(None, (str(plugin), vllm_python.folder)))
    done = subprocess.run(
        [vllm_python.python, WORKER, tiny_model("vllm")],
        input=json.dumps([case.to_json() for of_one in cases.values() for case in of_one]),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["version"].partition("+")[0] == vllm_python.version
    results = iter(report["results"])
    report["results"] = {name: [next(results) for _ in of_one] for name, of_one in cases.items()}
    return report


def test_vllm_hooks_have_known_signatures(answer):
    assert answer["moved"] == []
    assert answer["hooks"] > 20


@pytest.mark.parametrize("name", SETTINGS)
def test_vllm_finish_times_and_victims_equal_the_simulators(name, cases, answer):
    ways: Counter[str] = Counter()
    for seed, (case, real) in enumerate(zip(cases[name], answer["results"][name], strict=True)):
        simulated = case.simulated()
        finish = {str(r.id): round(r.finish_s * TICKS_PER_S) for r in simulated.finished}
        where = f"workload {seed}, {case.policy}"
        assert real["preempted"] == simulated.preempted, where
        assert real["finish_ticks"] == finish, where
        assert set(real["away"]) == {str(x.request.id) for x in simulated.outbox}, where
        assert real["swaps"] == [sum(h == "swap" for _, h, _ in simulated.preempted)] * 2, where
        ways.update(how for _, how, _ in simulated.preempted)
        if not case.policy.limits(IdleView(case.policy)).mixed_batches:
            assert real["mixed_steps"] == 0, where
    assert ways.total() > 2 * WORKLOADS  # else the comparison shows nothing
    if SETTINGS[name].num_cpu_blocks:
        assert ways["swap"] > WORKLOADS
    if isinstance(SETTINGS[name].policy, AdaptiveLlm):
        assert ways["recompute"] > WORKLOADS


def test_vllm_dropped_requests_have_their_reason(answer):
    reasons = [why for real in answer["results"]["edf-drop"] for why in real["away"].values()]
    assert len(reasons) > 2 * WORKLOADS
    assert set(reasons) == {DROPPED}


def test_vllm_offloaded_requests_have_their_reason(answer):
    offloading = answer["results"]["ascendra, offloading"]
    reasons = [why for real in offloading for why in real["away"].values()]
    assert len(reasons) > 2 * WORKLOADS
    assert set(reasons) == {OFFLOADED}
