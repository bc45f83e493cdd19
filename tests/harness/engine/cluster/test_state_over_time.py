"""Rows of single instances over time, acts of mechanisms, and the time between instances."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from slo_bench.harness.core.counters import TimedCounters
from slo_bench.harness.engine.cluster.recorder import acts_of
from slo_bench.harness.engine.loop.measures import Measures
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.distserve import DistServe
from slo_bench.harness.policies.shared.disaggregated import NETWORK_LATENCY_S
from slo_bench.harness.policies.systems import System
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-13b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model


def served(workload: Workload, **parameters: float):
    system = System("distserve", Vllm(), cluster=DistServe(1, 1, **parameters))
    return simulate(workload, system, PLACEMENT, STEP_TIME, instances=2)


def several(n: int = 60) -> Workload:
    rng = np.random.default_rng(3)
    return Workload(
        arrival_s=np.cumsum(rng.exponential(0.2, n)),
        prompt_tokens=rng.integers(20, 900, n),
        output_tokens=rng.integers(2, 120, n),
    )


def test_transfer_time_is_bytes_over_bandwidth():
    workload = Workload(
        arrival_s=np.zeros(1), prompt_tokens=np.array([1000]), output_tokens=np.array([5])
    )
    records = served(workload, network_gb_per_s=2.0).records
    kv_bytes = 1000 * PLACEMENT.kv_bytes_per_token
    assert records.transfer_s[0] == pytest.approx(kv_bytes / 2e9 + NETWORK_LATENCY_S, rel=1e-6)
    assert records.first_token_s[0] + records.transfer_s[0] < records.finish_s[0]


def test_requests_of_a_plain_system_have_no_transfer_time():
    result = simulate(several(), System("vllm", Vllm()), PLACEMENT, STEP_TIME, instances=2)
    assert not result.records.transfer_s.any()


def test_timeline_rows_add_up_to_the_totals():
    workload = several()
    result = served(workload)
    by: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in result.timeline.timeseries:
        by[row.metric, row.entity].append((row.time_s, row.value))

    def area(metric: str, entity: str) -> float:
        time_s, value = np.array(by[metric, entity]).T
        assert (np.diff(time_s) > 0).all()
        return float((value[:-1] * np.diff(time_s)).sum())

    each_s = STEP_TIME.step_s(0, 0, ((0, 2048),)) / 2048
    prompts = workload.prompt_tokens.sum() * each_s
    answers = (workload.output_tokens - 1).sum() * each_s
    assert area("compute", "prefill 0") == pytest.approx(prompts, rel=0.05)
    assert area("compute", "decode 1") == pytest.approx(answers, rel=0.05)
    assert area("acts", "handovers") == pytest.approx(result.counts["handovers"], rel=1e-3)
    assert max(value for _, value in by["kv_cache_usage", "decode 1"]) <= 1.0
    assert {entity for metric, entity in by if metric == "waiting"} == {"prefill 0", "decode 1"}


def test_cluster_actions_are_recorded_with_their_reason():
    clock = iter([0.5, 1.5, 9.5])
    counters = TimedCounters({"evictions": "…"}, lambda: next(clock))
    counters.add("evictions", why="idle")
    counters.add("evictions", why="idle")
    counters.add("evictions", why="pages are short")
    rows = list(acts_of([counters], 9.6))
    rate = 10.0  # one act in a span of 0.1 s
    assert [(r.entity, r.time_s, r.value) for r in rows if r.value] == [
        ("evictions: idle", pytest.approx(0.5), rate),
        ("evictions: idle", pytest.approx(1.5), rate),
        ("evictions: pages are short", pytest.approx(9.5), rate),
    ]
    assert counters == {"evictions": 3}


def closed(n: int) -> Workload:
    return Workload(
        arrival_s=np.zeros(n),
        prompt_tokens=np.full(n, 100),
        output_tokens=np.full(n, 300),
        concurrency=4,
    )


def test_samples_of_a_closed_loop_are_as_many_however_long_it_takes():
    for requests in (200, 800):
        result = simulate(closed(requests), System("vllm", Vllm()), PLACEMENT, STEP_TIME)
        times_s, makespan_s = result.timeline.time_s, result.totals.makespan_s
        assert 140 < len(times_s) < 310
        assert np.diff(times_s).max() < makespan_s / 100
        assert times_s[-1] == pytest.approx(makespan_s)


def test_spells_without_requests_stay_when_samples_get_further_apart():
    measures = Measures(sample_s=1.0, most_samples=6)
    for time_s in range(5):
        measures.sample((float(time_s), 0, 2, 9), time_s)
    measures.idle(4.5, 9.5)
    measures.sample((9.5, 0, 1, 5), 5)
    assert [sample[0] for sample in measures.samples] == [0.0, 2.0, 4.0, 4.5, 9.5]
    assert measures.worked == [(0.0, 0), (2.0, 2), (4.0, 4), (9.5, 5)]
    assert (measures.sample_s, measures.next_sample_s) == (2.0, 11.5)


def test_each_of_many_instances_is_sampled_less_often():
    workload = Workload(
        arrival_s=np.linspace(0.0, 40.0, 256),
        prompt_tokens=np.full(256, 100),
        output_tokens=np.full(256, 400),
    )
    samples_by_instances = {}
    for instances in (4, 64):
        system = System("vllm", Vllm())
        result = simulate(workload, system, PLACEMENT, STEP_TIME, instances=instances)
        samples_by_instances[instances] = len(result.timeline.time_s)
    assert samples_by_instances[64] < 8 * samples_by_instances[4]
