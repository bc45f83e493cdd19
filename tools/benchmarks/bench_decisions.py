"""What deciding costs an iteration: every system at 256 running and 256 waiting requests.

Run `python tools/benchmarks/bench_decisions.py [SYSTEMS] [REQUESTS]`. A closed loop keeps 512
requests there, batches hold 256 at most, and KV memory is short enough that some are preempted.
Nothing is leapt over: every iteration is decided by itself, with the loop that the simulator and a
server's plugin share (static policies are asked when a batch has ended). The CPU time of a whole
run is divided by its iterations, so that arrivals, records and the step-time model are in it: an
upper bound of what deciding costs. The AdaptiveLLM paper says about 0.2 ms a step (§4.6), measured
with decisions on and actions off: `adaptivellm-compares` decides as `adaptivellm` does, both
algorithms, and does what `adaptivellm-off` does, vLLM's order and recomputation. Their difference
is the cost of comparing.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

import numpy as np

from slo_bench.harness.core.decisions import Line, NextQueue, PreemptionMode
from slo_bench.harness.core.policy import Key, StaticPolicy
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.core.view import View
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.adaptivellm import AdaptiveLlm
from slo_bench.harness.policies.systems import SYSTEMS, System
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import StepTime, step_time
from slo_bench.workloads.workload import Workload

RUNNING, WAITING = 256, 256


@dataclass(frozen=True)
class Compares(AdaptiveLlm):
    """AdaptiveLLM's decisions without its actions: those of `OFF`."""

    def queue_key_line(self, r: RequestState, view: View) -> Line:
        super().queue_key_line(r, view)
        return OFF.queue_key_line(r, view)

    def victim_key(self, r: RequestState, view: View) -> Key:
        super().victim_key(r, view)
        return OFF.victim_key(r, view)

    def preemption_mode(self, r: RequestState, view: View) -> PreemptionMode:
        super().preemption_mode(r, view)
        return OFF.preemption_mode(r, view)

    def next_queue(self, view: View) -> NextQueue:
        super().next_queue(view)
        return OFF.next_queue(view)


OFF = AdaptiveLlm(fair=False, adaptive=False)
OF_4_6 = {"adaptivellm-off": OFF, "adaptivellm-compares": Compares(groups="mean-priority")}
BATCH_PARAMETERS = ("max_num_seqs", "max_batch", "max_running_requests", "max_batch_size")
PLACEMENT = Placement(
    model("llama-3-8b"),
    gpu("a100-80g"),
    fixed_num_gpu_blocks=RUNNING * 18,  # prompts of 200 tokens, answers of 128
    fixed_num_cpu_blocks=1024,
)


@dataclass(frozen=True)
class NoLeaps:
    """A step-time model that lets the simulator take one step at a time."""

    model: StepTime

    def step_s(self, decode_seqs, decode_kv_tokens, chunks):
        return self.model.step_s(decode_seqs, decode_kv_tokens, chunks)

    def span_s(self, decode_seqs, decode_kv_tokens, steps):
        return float("inf")

    def steps_within(self, decode_seqs, decode_kv_tokens, duration_s):
        return 0


def workload(requests: int) -> Workload:
    """A closed loop of 512."""
    rng = np.random.default_rng(0)
    output = rng.integers(16, 241, requests)
    return Workload(
        np.zeros(requests),
        rng.integers(100, 301, requests),
        output,
        max_output_tokens=np.full(requests, 256),
        ttft_slo_s=rng.uniform(2, 20, requests),
        e2e_slo_s=rng.uniform(20, 60, requests),
        concurrency=RUNNING + WAITING,
    )


def large_batches(system: System) -> System:
    """The system with batches of 256."""
    return system.with_parameters(
        **{k: RUNNING for k in system.parameters() if k in BATCH_PARAMETERS}
    )


def main(names: str = "", requests: str = "4000") -> None:
    load = workload(int(requests))
    steps = step_time(PLACEMENT).model
    systems = {name: system for name, system in SYSTEMS.items() if system.cluster is None}
    systems |= {name: replace(SYSTEMS["adaptivellm"], policy=p) for name, p in OF_4_6.items()}
    chosen = names.split(",") if names else list(systems)
    print(f"{'system':22} {'iterations':>10} {'preempted':>9} {'dropped':>8} {'ms each':>8}")
    for name in chosen:
        forms_batches = isinstance(systems[name].policy, StaticPolicy)  # one decision for many
        clock = steps if forms_batches else NoLeaps(steps)
        began_s = time.process_time()
        result = simulate(load, large_batches(systems[name]), PLACEMENT, clock)
        cpu_s = time.process_time() - began_s
        records = result.records
        preempted = int((records.preemptions_swap + records.preemptions_recompute).sum())
        dropped = int(np.isnan(records.finish_s).sum())
        each_ms = 1e3 * cpu_s / result.totals.steps
        print(
            f"{name:22} {result.totals.steps:10,} {preempted:9,} {dropped:8,} {each_ms:8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
