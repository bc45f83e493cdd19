"""FastServe: queues by service, and short requests that preempt long ones."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.fastserve import FastServe
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.workload import Workload

WHERE = Placement(
    model("llama-2-7b"), gpu("a100-80g"), fixed_num_gpu_blocks=100, fixed_num_cpu_blocks=200
)
STEP_TIME = step_time(WHERE).model


def served(name: str, *rows: tuple[float, int, int], **parameters: float):
    arrival_s, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    workload = Workload(arrival_s.astype(float), prompt, output)
    return simulate(workload, SYSTEMS[name].with_parameters(**parameters), WHERE, STEP_TIME)


class Unit:
    """A view in which a prompt token takes a tenth of a decode step."""

    def __init__(self) -> None:
        self.predict, self.policy_state = self, FastServe().new_state()
        self.emitted = 0

    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        return 1.0 if decode_seqs else 0.1 * sum(tokens for _, tokens in chunks)

    def emitted_tokens(self, r):
        return self.emitted


class Asked:
    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens


@pytest.mark.parametrize(
    ("prompt", "emitted", "level"),
    [(10, 0, 0), (160, 0, 0), (161, 0, 1), (320, 0, 1), (640, 0, 2), (10, 15, 0), (10, 16, 1),
     (10, 31, 1), (10, 32, 2), (160, 16, 1)],
)  # fmt: skip
def test_skip_join_puts_requests_into_queues_by_prefill_time(prompt, emitted, level):
    view = Unit()
    view.emitted = emitted
    assert FastServe(quantum_steps=16).level(Asked(prompt), view) == level


LONG, SHORT = (0.0, 650, 130), (0.5, 300, 4)  # 49 blocks of 100 each at the end, and 19


def test_short_request_swaps_out_a_long_one_without_losing_tokens():
    records = served("fastserve", LONG, LONG, SHORT, promote_s=1000).records
    waits = served("vllm-v0", LONG, LONG, SHORT).records
    assert sorted(records.preemptions_swap.tolist()) == [0, 0, 1]
    assert records.preemptions_swap[2] == 0
    assert records.finish_s[2] < records.finish_s[:2].min()
    assert waits.finish_s[2] > waits.finish_s[:2].max()
    assert records.output_tokens.tolist() == [130, 130, 4]


def test_promoted_request_is_preempted_no_more():
    records = served("fastserve", LONG, LONG, SHORT, promote_s=0.01).records
    assert not records.preemptions_swap.any()
    assert records.finish_s[2] > records.finish_s[:2].max()


def test_preemptions_for_shorter_requests_are_counted():
    rows = [LONG, LONG, *((0.5 + 0.02 * k, 300, 4) for k in range(6))]
    result = served("fastserve", *rows, promote_s=1000)
    assert 1 <= result.counts["preemptions_for_shorter"] <= 6
    assert result.records.preemptions_swap[:2].sum() >= 1
