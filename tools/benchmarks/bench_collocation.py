"""What collocation's decisions cost with 256 requests running and 256 waiting.

    python tools/benchmarks/bench_collocation.py [REQUESTS]

Every hook of the policy is timed where the engine calls it; the sum over the iterations of the
language model is the amortised cost of an iteration. The paper asks for at most 0.2 ms.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.collocation.collocation_policy import Collocation
from slo_bench.harness.policies.systems import System
from slo_bench.predictors.embedder import embedder, own_weight_bytes
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.slo import parse_slo
from slo_bench.workloads.source import load_source

HOOKS = (
    "admit",
    "queue_key",
    "timeout",
    "limits",
    "headroom_blocks",
    "victim_key",
    "preemption_mode",
    "on_finished",
)
EMBED_HOOKS = ("embed_admit", "embed_batch")

MIX = (
    "mix(chat=synthetic(prompt=uniform(100,500),output=uniform(200,500),priority=1):0.45,"
    "batch=synthetic(prompt=uniform(100,500),output=uniform(200,500)):0.45,"
    "embed=embed(texts=uniform(16,128),tokens=256):0.1)"
)
SLO = "chat:ttft=30,tpot=0.15;batch:ttft=600,tpot=0.3;embed:e2e=5"

spent_s: Counter[str] = Counter()
calls: Counter[str] = Counter()
depth = 0
queue_states: list[tuple[int, int]] = []


def timed(name: str) -> Callable[..., Any]:
    """The hook of `Collocation`, its time added to `spent_s`; hooks within hooks count once."""
    hook = getattr(Collocation, name)

    def call(self: Collocation, *args: Any) -> Any:
        global depth
        depth += 1
        begin_s = time.thread_time()
        try:
            return hook(self, *args)
        finally:
            depth -= 1
            calls[name] += 1
            if not depth:
                spent_s[name] += time.thread_time() - begin_s
            if name == "limits":
                queue_states.append((args[0].n_running, args[0].n_waiting))

    return call


def main() -> None:
    """Run, and print a line for each hook and the sum."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    timed_hooks = {
        name: timed(name) for name in (*HOOKS, *EMBED_HOOKS) if name != "preemption_mode"
    }
    policy_type = dataclass(frozen=True)(type("Timed", (Collocation,), timed_hooks))
    language, embeds = model("llama-2-7b"), model("bge-m3")
    for label, parameters in (
        ("no memory pressure", {"safety_ratio": 0.0}),
        ("memory half as large", {"safety_ratio": 0.0}),
        ("the same, no admission control by reservations", {"counts": "current"}),
    ):
        spent_s.clear(), calls.clear(), queue_states.clear()
        blocks = None if label == "no memory pressure" else 5000
        where = Placement(
            language,
            gpu("h100-80g"),
            beside_bytes=own_weight_bytes(embeds, language),
            kv_dtype="fp8",
            fixed_num_gpu_blocks=blocks,
        )
        workload = load_source(MIX, arrivals="concurrency(600)").make(
            requests=requests, seed=0, slo=parse_slo(SLO)
        )
        begin_s = time.process_time()
        result = simulate(
            workload,
            System("timed", policy_type(**parameters)),
            where,
            step_time(where).model,
            embedder=embedder(embeds, where),
        )
        whole_s = time.process_time() - begin_s
        steps = result.totals.steps
        running = sum(n for n, _ in queue_states) / len(queue_states)
        waiting = sum(n for _, n in queue_states) / len(queue_states)
        print(
            f"{label}: {steps:,} iterations; when asked {running:.0f} run and {waiting:.0f} wait; "
            f"{int(result.records.preemptions_recompute.sum())} preemptions; {whole_s:.1f} s"
        )
        for name, seconds in spent_s.most_common():
            each_us = seconds / calls[name] * 1e6
            print(f"  {name:12} {calls[name]:8,} calls of {each_us:6.1f} µs")
        print(f"  {sum(spent_s.values()) / steps * 1e3:.3f} ms an iteration, amortised")


if __name__ == "__main__":
    main()
