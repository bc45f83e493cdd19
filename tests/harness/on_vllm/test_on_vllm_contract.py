"""The real vLLM scheduler, run by our policies without a model, does what the simulator does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slo_bench.harness.backends.plugin_folder import plugin_folder
from slo_bench.harness.core.ledger import BlockLedger
from slo_bench.harness.core.policy import Policy
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.core.wire import DROPPED, to_wire
from slo_bench.harness.engines.device import Device
from slo_bench.harness.engines.measures import Measures
from slo_bench.harness.engines.plugged import PolicySpec
from slo_bench.harness.engines.predictions import ModelledPredictions
from slo_bench.harness.engines.simulated import SimulatedInstance
from slo_bench.harness.policies.edf import EarliestDeadlineFirst
from slo_bench.harness.policies.edf_drop import EdfDrop
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.harness.policies.vllm_v0 import VllmV0
from slo_bench.harness.systems import system
from slo_bench.workloads.request import Request, Slo

pytestmark = pytest.mark.backends

WORKER = Path(__file__).with_name("contract_worker.py")
BLOCK_TOKENS = 16
STEPS_PER_S = 128  # a power of two: moments on the grid are exact
WORKLOADS = 100
SwapAlways = type(system(str(Path(__file__).parents[2] / "backends" / "swap_always.py")).policy)


class ConstantStep:
    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        return 1 / STEPS_PER_S

    def span_s(self, decode_seqs, decode_kv_tokens, steps):
        return steps / STEPS_PER_S

    def steps_within(self, decode_seqs, decode_kv_tokens, duration_s):
        return max(0, -int(-duration_s * STEPS_PER_S // 1))


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
    kv_blocks: int
    host_blocks: int
    requests: tuple[Request, ...]

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "arrival_step": round(r.arrival_s * STEPS_PER_S),
                "prompt_tokens": r.prompt_tokens,
                "output_tokens": r.output_tokens,
                "wire": to_wire(r),
            }
            for r in self.requests
        ]
        spec = PolicySpec.of("under test", self.policy)
        return {
            "policy": dataclasses.asdict(spec),
            "kv_blocks": self.kv_blocks,
            "host_blocks": self.host_blocks,
            "requests": rows,
        }

    def simulated(self) -> Watched:
        step_time = ConstantStep()
        instance = Watched(
            self.policy,
            BlockLedger(self.kv_blocks, BLOCK_TOKENS, self.host_blocks),
            ModelledPredictions(step_time, 0.0),
            step_time,
            (Device("one"),),
            Measures(),
        )
        for r in self.requests:
            state = RequestState(
                r.id, r.arrival_s, r.prompt_tokens, r.output_tokens, r.max_output_tokens, r.slo
            )
            instance.inbox.append(state)
        instance.run(float("inf"), stop_on_release=False)
        return instance


def drawn(seed: int) -> Case:
    """A random workload on few KV blocks; the policies take turns."""
    draw = np.random.default_rng(seed)
    seqs = int(draw.choice([4, 16, 64]))
    tokens = int(draw.choice([64, 128, 512, 2048]))
    kind, host_blocks = [
        (Vllm, 0),
        (EarliestDeadlineFirst, 0),
        (SwapAlways, 12),
        (SwapAlways, 1000),
        (EdfDrop, 0),
    ][seed % 5]
    knobs = {"caution": 0.0} if kind is EdfDrop else {}
    rate = float(draw.choice([0.5, 2, 8, 40]))
    moments = np.cumsum(draw.exponential(1 / rate, 60))
    requests = tuple(
        Request(
            row,
            round(float(moment) * STEPS_PER_S) / STEPS_PER_S,
            int(draw.integers(1, 300)),
            output := int(draw.integers(1, 150)),
            output,
            Slo(ttft_s=float(draw.uniform(0.05, 2.0))),
        )
        for row, moment in enumerate(moments)
    )
    policy = kind(max_num_batched_tokens=tokens, max_num_seqs=seqs, **knobs)
    return Case(policy, int(draw.choice([40, 80, 160])), host_blocks, requests)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [drawn(seed) for seed in range(WORKLOADS)]


@pytest.fixture(scope="module")
def answer(cases, installed, tiny_model, tmp_path_factory) -> dict[str, Any]:
    unmixed = [dataclasses.replace(drawn(seed), policy=VllmV0()) for seed in range(0, 40, 5)]
    environ = {**os.environ, "PYTHONPATH": str(plugin_folder(tmp_path_factory.mktemp("home")))}
    done = subprocess.run(
        [installed("vllm").python, WORKER, tiny_model("vllm")],
        input=json.dumps([case.to_json() for case in (*cases, *unmixed)]),
        capture_output=True,
        text=True,
        env=environ,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["unmixed"] = found["results"][len(cases) :]
    del found["results"][len(cases) :]
    return found


def test_every_hook_is_as_we_know_it(answer):
    assert answer["moved"] == []
    assert answer["hooks"] > 20


def test_finish_steps_and_victims_equal_the_simulators(cases, answer):
    victims = swaps = 0
    for seed, (case, real) in enumerate(zip(cases, answer["results"], strict=True)):
        simulated = case.simulated()
        finish = {str(r.id): round(r.finish_s * STEPS_PER_S) for r in simulated.finished}
        where = f"workload {seed}, {case.policy}"
        assert real["preempted"] == simulated.preempted, where
        assert real["finish_step"] == finish, where
        assert set(real["away"]) == {str(x.request.id) for x in simulated.outbox}, where
        victims += len(simulated.preempted)
        swaps += sum(how == "swap" for _, how, _ in simulated.preempted)
        assert real["swaps"] == [sum(h == "swap" for _, h, _ in simulated.preempted)] * 2, where
    assert victims > 200  # else the comparison shows nothing
    assert swaps > 50


def test_policies_that_do_not_mix_have_no_mixed_step(answer):
    assert sum(real["mixed_steps"] for real in answer["results"]) > 100
    for real in answer["unmixed"]:
        assert real["mixed_steps"] == 0
        assert len(real["finish_step"]) == 60
    assert sum(len(real["preempted"]) for real in answer["unmixed"]) > 20


def test_dropped_requests_are_told_so(cases, answer):
    reasons = [why for real in answer["results"] for why in real["away"].values()]
    assert len(reasons) > 50
    assert set(reasons) == {DROPPED}
