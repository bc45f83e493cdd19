"""How many requests the cluster simulation serves in a CPU second, with eight instances.

Run `python tools/benchmarks/bench_cluster.py`. Each line is one simulation in this process:
Mistral-7B on eight A100-80G, ShareGPT lengths, Poisson arrivals; the time is that of `simulate`
alone, without drawing the workload or writing records.
"""

from __future__ import annotations

import argparse
import time

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.harness.policies.systems import SYSTEMS, System
from slo_bench.workloads.slo import parse_slo
from slo_bench.workloads.source import load_source

INSTANCES = 8


def cases() -> dict[str, tuple[System, str | None]]:
    """Systems with their routers."""
    ascendra = SYSTEMS["ascendra"]
    return {
        "vllm, round-robin": (SYSTEMS["vllm"], "round-robin"),
        "vllm, least-loaded": (SYSTEMS["vllm"], "least-loaded"),
        "vllm-v0, least-loaded": (SYSTEMS["vllm-v0"], "least-loaded"),
        "ascendra 3L1H": (ascendra.with_parameters(n_lp=3), None),
        "ascendra 3L1H, given": (
            ascendra.with_parameters(n_lp=3, performance_model="given"),
            None,
        ),
        "llumnix": (SYSTEMS["llumnix"], None),
        **{
            f"{name} 4P4D": (
                SYSTEMS[name].with_parameters(prefill_instances=4, decode_instances=4),
                None,
            )
            for name in ("distserve", "splitwise", "mooncake", "memserve", "banaserve")
        },
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--rates", default="20,28", help="req/s over all instances")
    parser.add_argument("--only", default="", help="part of a case's name")
    options = parser.parse_args()
    place = placed(PlacementSpec(model="mistral-7b", gpu="a100-80g", tp=1))
    source = load_source("sharegpt")
    print(
        f"{'system':24} {'req/s':>6} {'requests':>9} {'CPU s':>7} {'per CPU s':>10} {'in SLO':>7}"
    )
    for rate in map(float, options.rates.split(",")):
        workload = source.make(
            rate_rps=rate, requests=options.requests, seed=1, slo=parse_slo("ttft=1,tpot=0.15")
        )
        for name, (system, router) in cases().items():
            if options.only not in name:
                continue
            begin_s = time.process_time()
            result = simulate(
                workload,
                system,
                place.placement,
                place.step_time.model,
                instances=INSTANCES,
                router=router,
                overlong_requests="reject",
            )
            cpu_s = time.process_time() - begin_s
            in_time = (result.records.ttft_s <= 1.0).mean()
            print(
                f"{name:24} {rate:6g} {options.requests:9,} {cpu_s:7.2f} "
                f"{options.requests / cpu_s:10,.0f} {in_time:7.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
