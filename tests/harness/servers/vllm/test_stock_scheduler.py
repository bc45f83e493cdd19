"""The `vllm` policy composes every batch as vLLM's stock schedulers do, step by step."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.plain import PlainInstance
from slo_bench.harness.core.device import StageDevice
from slo_bench.harness.core.kv.kv_cache_manager import KVCacheManager
from slo_bench.harness.core.predictions import ModelledPredictions
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.engine.loop.measures import Measures
from slo_bench.harness.engine.simulator.simulated import SimulatedInstance
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.workloads.request import Slo

pytestmark = pytest.mark.backends

WORKER = Path(__file__).with_name("stock_worker.py")
BLOCK_SIZE = 16
STEPS_PER_S = 128  # a power of two: moments on the grid are exact
WORKLOADS = 160
SHARED_WORKLOADS = 40


class ConstantStep:
    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        return 1 / STEPS_PER_S

    def span_s(self, decode_seqs, decode_kv_tokens, steps):
        return steps / STEPS_PER_S

    def steps_within(self, decode_seqs, decode_kv_tokens, duration_s):
        return max(0, -int(-duration_s * STEPS_PER_S // 1))


class Composed(PlainInstance):
    """Remembers every batch: request, tokens in KV, tokens to compute."""

    def __init__(self, *args: Any) -> None:
        self.steps: list[list[list[int]]] = []
        super().__init__(*args)

    def _chunks(self, limits):
        plan = super()._chunks(limits)
        batch = [[r.id, r.kv_tokens, 1] for r in self.decoding]
        batch += [[r.id, r.kv_tokens, tokens] for r, tokens in plan]
        if batch:
            self.steps.append(sorted(batch))
        return plan


@dataclass(frozen=True)
class Case:
    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool
    prefix_caching: bool
    num_gpu_blocks: int
    requests: tuple[dict[str, int], ...]

    def simulated(self, engine: type) -> Any:
        policy = Vllm(self.max_num_batched_tokens, self.max_num_seqs, self.async_scheduling)
        step_time = ConstantStep()
        caching = BLOCK_SIZE if self.prefix_caching else 0
        instance = engine(
            policy,
            KVCacheManager(self.num_gpu_blocks, BLOCK_SIZE, 0, caching),
            ModelledPredictions(step_time, 0.0),
            step_time,
            (StageDevice("one"),),
            Measures(),
        )
        for row, r in enumerate(self.requests):
            prompt, output = r["prompt_tokens"], r["output_tokens"]
            shared_blocks = r["shared_tokens"] // BLOCK_SIZE
            group, single = (1 << 60) + (r["group"] << 32), row << 32
            block_hashes = [
                (group if block < shared_blocks else single) + block
                for block in range((prompt + output) // BLOCK_SIZE)
            ]
            instance.inbox.append(
                RequestState(
                    row,
                    r["arrival_step"] / STEPS_PER_S,
                    prompt,
                    output,
                    output,
                    Slo(),
                    tuple(block_hashes) if caching else (),
                )
            )
        instance.run(float("inf"), stop_on_release=False)
        return instance


def drawn(seed: int, *, shared: bool = False) -> Case:
    """A random workload on few KV blocks, in turns with what may differ in vLLM's settings. With
    `shared`, the prompts of a group begin alike, and some are nothing else.
    """
    draw = np.random.default_rng(seed)
    rate = float(draw.choice([0.05, 0.5, 2, 8]))
    longest = int(draw.choice([60, 300]))
    moments = np.cumsum(draw.exponential(1 / rate, 60))
    requests = tuple(
        {
            "arrival_step": round(float(moment)),
            "prompt_tokens": int(draw.integers(1, longest)),
            "output_tokens": int(draw.integers(1, draw.choice([4, 150]))),
            "group": 0,
            "shared_tokens": 0,
        }
        for moment in moments
    )
    if shared:
        group_tokens = draw.choice([16, 40, 64, 96, 160], int(draw.integers(1, 8)))
        for r in requests:
            r["group"] = int(draw.integers(len(group_tokens)))
            r["shared_tokens"] = int(group_tokens[r["group"]])
            rest_tokens = int(draw.choice([0, r["prompt_tokens"]]))
            r["prompt_tokens"] = min(longest, r["shared_tokens"] + rest_tokens)
            r["shared_tokens"] = min(r["prompt_tokens"], r["shared_tokens"])
    return Case(
        max_num_seqs=int(draw.choice([4, 16, 64])),
        max_num_batched_tokens=int(draw.choice([64, 128, 512, 2048])),
        async_scheduling=bool(seed & 1),
        prefix_caching=shared or bool(seed & 2),
        num_gpu_blocks=int(draw.choice([30, 40, 80, 160])),
        requests=requests,
    )


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [drawn(seed) for seed in range(WORKLOADS)]


@pytest.fixture(scope="module")
def composed(installed, tiny_model) -> Callable[[list[Case]], list[dict[str, Any]]]:
    """The batches that vLLM's schedulers compose of cases."""

    def answers(cases: list[Case]) -> list[dict[str, Any]]:
        done = subprocess.run(
            [installed("vllm").python, WORKER, tiny_model("vllm")],
            input=json.dumps([vars(case) for case in cases]),
            capture_output=True,
            text=True,
            timeout=3000,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        worker_answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return worker_answers

    return answers


@pytest.fixture(scope="module")
def answers(cases, composed) -> list[dict[str, Any]]:
    worker_answers: list[dict[str, Any]] = composed(cases)
    return worker_answers


def recomputed(real: dict[str, Any]) -> dict[int, int]:
    """How often each request was preempted and came back for what it still had to do."""
    last = {i: step for step, batch in enumerate(real["steps"]) for i, _, _ in batch}
    return dict(Counter(i for step, i in real["preempted"] if step <= last[i]))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_simulated_batches_equal_those_of_vllms_scheduler(cases, answers, asynchronous, caching):
    compare = [
        (f"workload {seed}", case, real)
        for seed, (case, real) in enumerate(zip(cases, answers, strict=True))
        if (case.async_scheduling, case.prefix_caching) == (asynchronous, caching)
    ]
    assert equal_preemptions(compare) > 100  # else the comparison shows nothing


def test_batches_with_shared_prefixes_equal_those_of_vllms_scheduler(composed):
    cases = [drawn(seed, shared=True) for seed in range(SHARED_WORKLOADS)]
    names = [f"workload {seed} with shared prefixes" for seed in range(SHARED_WORKLOADS)]
    assert equal_preemptions(zip(names, cases, composed(cases), strict=True)) > 100


def equal_preemptions(compared: Iterable[tuple[str, Case, dict[str, Any]]]) -> int:
    """Check that both engines compose vLLM's batches; return the number of preemptions."""
    preemptions = 0
    for where, case, real in compared:
        plain, leaping = case.simulated(Composed), case.simulated(SimulatedInstance)
        for step, (ours, theirs) in enumerate(zip(plain.steps, real["steps"], strict=False)):
            assert ours == theirs, f"{where}, step {step}"
        assert len(plain.steps) == len(real["steps"]), where
        for instance in (plain, leaping):
            finish = {str(r.id): round(r.finish_s * STEPS_PER_S) for r in instance.finished}
            assert finish == real["finish_step"], where
            victims = {r.id: r.recomputes for r in instance.finished if r.recomputes}
            assert victims == recomputed(real), where
        preemptions += leaping.measures.preemptions
    return preemptions
