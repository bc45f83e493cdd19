"""What Ascendra's mechanisms do (docs/papers.md), beyond what its suites show.

Run `python tests/benchmarks/ascendra_mechanisms.py`. Mistral-7B, ShareGPT, 2L1H on A100-80G, TTFT
1 s and TPOT 0.15 s unless said otherwise; seeds 0 to 2. All figures are simulated.
"""

from __future__ import annotations

from statistics import mean

from slo_bench.harness.core.records import Result
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.execution.lookup import placed
from slo_bench.harness.experiments.execution.specs import PlacementSpec
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.harness.results.metrics import judge
from slo_bench.workloads.slo import parse_slo
from slo_bench.workloads.source import load_source

SEEDS = (0, 1, 2)


def runs(
    rate_rps: float,
    slo: str = "ttft=1,tpot=0.15",
    model: str = "mistral-7b",
    host_s: float | None = None,
    **parameters: object,
) -> list[tuple[float, Result]]:
    """Share within SLO and result, for each seed."""
    place = placed(PlacementSpec(model=model, gpu="a100-80g", tp=1, host_s=host_s))
    system = SYSTEMS["ascendra"].with_parameters(**parameters)
    source = load_source("sharegpt")
    found = []
    for seed in SEEDS:
        workload = source.make(rate_rps=rate_rps, requests=2000, seed=seed, slo=parse_slo(slo))
        result = simulate(
            workload,
            system,
            place.placement,
            place.step_time.model,
            instances=3,
            overlong_requests="reject",
        )
        found.append((float(judge(workload, result.records).met.mean()), result))
    return found


def attainment(rate_rps: float, **settings: object) -> str:
    """Mean share within SLO, %."""
    return f"{100 * mean(met for met, _ in runs(rate_rps, **settings)):.1f}"


def hp_share(result: Result) -> tuple[float, float]:
    """Share of the makespan that the HP instance computes, and of requests that it serves."""
    hp = next(k for k, i in enumerate(result.instances) if i.role == "hp")
    records = result.records
    return (
        result.instances[hp].busy_s / result.totals.makespan_s,
        float((records.instance == hp).mean()),
    )


def main() -> None:
    """Print what each mechanism changes."""
    print("tickets: HP busy, % (HP's share of requests, %)")
    for rate in (2.0, 4.0, 6.0, 9.0):
        for tickets in (True, False):
            shares = [hp_share(result) for _, result in runs(rate, tickets=tickets)]
            busy, served = (100 * mean(column) for column in zip(*shares, strict=True))
            print(f"  {rate:4g} req/s, tickets {tickets}: {busy:.1f} ({served:.1f})")
    print("order, % within SLO")
    for slo in ("ttft=1,tpot=0.15", "ttft=uniform(0.5,8),tpot=0.15"):
        for value in ("edf", "fcfs", "sjf", "ljf"):
            cells = [attainment(rate, slo=slo, value=value) for rate in (11.0, 12.0, 13.0, 14.0)]
            print(f"  {slo}: {value:5} at 11, 12, 13, 14 req/s: {' '.join(cells)}")
    print("HP batch, % within SLO at 10, 12, 14 req/s")
    for batch in (16, 32, 64, 128):
        cells = [attainment(rate, elastic=False, hp_batch=batch) for rate in (10.0, 12.0, 14.0)]
        print(f"  fixed {batch}: {' '.join(cells)}")
    print(f"  elastic: {' '.join(attainment(rate) for rate in (10.0, 12.0, 14.0))}")
    print("performance model: % within SLO, mean error of each instance's, %")
    for name in ("refitted", "given"):
        found = runs(13.0, performance_model=name)
        errors = [[100 * i.prediction_error for i in result.instances] for _, result in found]
        shown = " ".join(f"{mean(column):.1f}" for column in zip(*errors, strict=True))
        print(f"  {name}: {100 * mean(met for met, _ in found):.1f}, {shown}")
    print("threshold of offload, % within SLO at 12, 14 req/s")
    for threshold in (0.25, 0.5, 1.0, 2.0, 4.0):
        cells = [attainment(rate, threshold=threshold) for rate in (12.0, 14.0)]
        print(f"  {threshold:g}: {' '.join(cells)}")
    print("host time of a step (sensitivity), % within SLO at 11, 13 req/s")
    for host_s in (0.0, 0.001, 0.003):
        cells = [attainment(rate, host_s=host_s) for rate in (11.0, 13.0)]
        print(f"  {host_s * 1000:g} ms: {' '.join(cells)}")


if __name__ == "__main__":
    main()
