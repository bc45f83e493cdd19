"""Autoscaling: how many instances are wanted, when they serve, and what is paid for them."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench import Experiment
from slo_bench.harness.engine.cluster.paid_time import PaidTime
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.autoscaled import Autoscaled, HotPrefixes
from slo_bench.harness.policies.systems import System
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-3.1-8b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model


def burst(n: int, every_s: float, more: tuple[float, ...] = ()) -> Workload:
    arrival_s = np.array([*(k * every_s for k in range(n)), *more])
    return Workload(
        arrival_s=arrival_s,
        prompt_tokens=np.full(len(arrival_s), 200),
        output_tokens=np.full(len(arrival_s), 400),
    )


def served(workload: Workload, policy: Autoscaled, instances: int = 3):
    system = System("autoscaled", Vllm(), cluster=policy)
    return simulate(workload, system, PLACEMENT, STEP_TIME, instances=instances)


@pytest.mark.parametrize(
    ("requests", "on", "desired"),
    [
        (100, 1, 4),
        (32, 1, 1),
        (35, 1, 1),
        (36, 1, 2),
        (10, 4, 1),
        (0, 2, 0),
        (64, 2, 2),
        (65, 3, 3),
    ],
)
def test_wanted_instances_follow_the_rule_of_kubernetes(requests, on, desired):
    """ceil(on · requests per instance / 32); 35 is within a tenth of 32, 65 of 96 is not."""
    assert Autoscaled(target_requests=32).wanted(requests, on) == desired


def test_started_instances_serve_after_their_start_and_are_paid_from_the_decision():
    policy = Autoscaled(
        target_requests=10, startup_s=20.0, control_every_s=5.0, stabilization_s=10.0
    )
    result = served(burst(100, 0.2, more=(120.0, 130.0)), policy)
    records = result.records
    assert result.counts == {"starts": 2, "stops": 2}
    # 25 requests have come at 5 s, none has ended: three instances are wanted.
    assert records.instance[records.arrival_s < 25.0].max() == 0
    assert set(records.instance[(records.arrival_s >= 25.0) & (records.arrival_s < 100)]) <= {
        0,
        1,
        2,
    }
    assert (records.instance[-2:] == 0).all()
    makespan_s = result.totals.makespan_s
    spare = [records.finish_s[records.instance == k].max(initial=0.0) for k in (1, 2)]
    paid_s = result.totals.gpu_paid_s - makespan_s  # of the two that were started at 5 s
    assert 2 * 20.0 <= paid_s <= 2 * (120.0 - 5.0)
    assert paid_s >= sum(max(0.0, end_s - 5.0) for end_s in spare)


def controlled(policy: Autoscaled, cluster: Mock, requests: list[int], now_s: float) -> list[str]:
    cluster.now_s = now_s
    cluster.up = [i for i in cluster.instances if i.up]
    for instance, n in zip(cluster.instances, requests, strict=True):
        instance.n_requests = n
    return [
        f"{'stop' if action.startup_s is None else 'start'} {action.instance.index}"
        for action in policy.control_step(cluster)
    ]


def test_instance_that_starts_or_serves_again_counts_once():
    policy = Autoscaled(
        target_requests=10, startup_s=30.0, control_every_s=15.0, stabilization_s=0.0
    )
    cluster = Mock(state=policy.new_state())
    cluster.instances = [Mock(index=k, up=k == 0) for k in range(4)]
    cluster.role = lambda _: [i for i in cluster.instances[1:] if i.up]
    assert controlled(policy, cluster, [20, 0, 0, 0], 0.0) == ["start 1"]
    # It serves from 30 s on; the control of that moment may come first.
    assert controlled(policy, cluster, [20, 0, 0, 0], 30.0) == []
    cluster.instances[1].up = True
    assert controlled(policy, cluster, [7, 1, 0, 0], 45.0) == ["stop 1"]
    cluster.instances[1].up = False  # and still serves a request
    assert controlled(policy, cluster, [19, 1, 0, 0], 60.0) == ["start 1"]
    cluster.instances[1].up = True
    # Two are on, not three: 40 requests want four, of which two are new.
    assert controlled(policy, cluster, [20, 20, 0, 0], 75.0) == ["start 2", "start 3"]
    cluster.instances[2].up = cluster.instances[3].up = True
    stopped = controlled(policy, cluster, [10, 10, 0, 0], 110.0)
    assert stopped == ["stop 3", "stop 2"]
    cluster.instances[2].up = cluster.instances[3].up = False
    # A stopped instance is off, however late it would have started.
    assert controlled(policy, cluster, [15, 14, 0, 0], 104.0) == ["start 2"]


def test_instances_without_spares_cost_as_a_fixed_number():
    load = burst(60, 0.3)
    result = served(load, Autoscaled(min_instances=2), instances=2)
    assert np.isnan(result.totals.gpu_paid_s)  # nothing can start or stop
    spare = served(load, Autoscaled(min_instances=1, target_requests=8192.0), instances=2)
    assert spare.totals.gpu_paid_s == pytest.approx(spare.totals.makespan_s)
    assert set(spare.records.instance) == {0}


def test_paid_time_counts_from_decision_to_end_of_service():
    """Two GPUs of the base; two that start at 100, stop at 140 and serve until 160."""

    base, spare = Mock(spare=False), Mock(spare=True)
    base.placement.gpus = spare.placement.gpus = 2
    paid = PaidTime([base, spare])
    assert paid.total_gpu_s(50.0) == 100.0
    paid.starts(spare, 100.0)
    paid.stops(spare, 120.0)
    paid.goes_on(spare)  # it still served
    paid.stops(spare, 140.0)
    spare.engine.now_s = 160.0
    assert paid.total_gpu_s(200.0) == 2 * 200 + 2 * 60
    paid.starts(spare, 180.0)
    assert paid.total_gpu_s(200.0) == 2 * 200 + 2 * 60 + 2 * 20


def test_cost_columns_follow_the_paid_time(tmp_path):
    run = Experiment(
        systems=["autoscaled"],
        rates=[4.0],
        duration_s=120,
        seeds=1,
        instances=3,
        parameters={"autoscaled": {"startup_s": 10.0, "target_requests": 8.0}},
    ).run(tmp_path / "run")
    (row,) = run.rows()
    assert row["gpu_paid_s"] < 3 * row["makespan_s"]
    each_usd = gpu("a100-80g").price_per_hour_usd
    expected = each_usd * row["gpu_paid_s"] / row["makespan_s"]
    assert row["cost_usd_per_hour"] == pytest.approx(expected, rel=0.01)  # from the first arrival
    assert row["gpu_utilisation"] <= 1.0


def test_fewer_instances_than_min_instances_are_refused():
    with pytest.raises(SloBenchError, match="min_instances = 4"):
        served(burst(2, 1.0), Autoscaled(min_instances=4))


def swings(prefix_tokens: int = 4096) -> Workload:
    """Two bursts, each of which starts a second instance that is off in between."""
    arrival_s = np.array([start_s + k * 0.1 for start_s in (0.0, 200.0) for k in range(300)])
    n = len(arrival_s)
    shared = prefix_tokens // 16
    blocks = [(*range(shared), *range(shared + 100 * k, shared + 100 * k + 6)) for k in range(n)]
    return Workload(
        arrival_s=arrival_s,
        prompt_tokens=np.full(n, prefix_tokens + 100),
        output_tokens=np.full(n, 100),
        prefix_blocks=blocks,
    )


def warmed(**parameters) -> Autoscaled:
    return Autoscaled(
        target_requests=10,
        startup_s=5.0,
        control_every_s=5.0,
        stabilization_s=10.0,
        **parameters,
    )


def served_with_prefixes(policy: Autoscaled):
    system = System("autoscaled", Vllm(), prefix_cache=True, cluster=policy)
    return simulate(swings(), system, PLACEMENT, STEP_TIME, instances=2)


def test_each_start_begins_with_an_empty_prefix_cache():
    """The first request at an instance that started finds nothing, also when it was on before."""
    records = served_with_prefixes(warmed()).records
    on_spare = records.instance == 1
    for start_s in (0.0, 200.0):
        burst_here = on_spare & (records.arrival_s >= start_s) & (records.arrival_s < start_s + 100)
        assert records.cached_tokens[burst_here][0] == 0
        assert records.cached_tokens[burst_here].max() == 4096


def test_prewarmed_instance_serves_later_by_the_load_and_finds_the_shared_prefix():
    """4,096 tokens of 128 KiB over 0.1 GB/s take 5.4 s."""
    result = served_with_prefixes(warmed(prewarm_gib=1.0, store_gb_per_s=0.1))
    records = result.records
    on_spare = records.instance == 1
    assert result.counts["warmed_units"] == 2 * 256
    assert (records.cached_tokens[on_spare] == 4096).all()
    cold = served_with_prefixes(warmed()).records
    first_s = [each.arrival_s[each.instance == 1][0] for each in (cold, records)]
    assert first_s[1] - first_s[0] == pytest.approx(4096 * 128 * 1024 / 0.1e9, abs=0.11)


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=60),
    units=st.integers(0, 20),
)
def test_hottest_units_are_whole_prefixes_of_several_prompts(prompts, units):
    """A hash names its tokens and all before them: here the path in a tree."""
    hot = HotPrefixes()
    paths = [[hash(tuple(p[: n + 1])) for n in range(len(p))] for p in prompts]
    for path in paths:
        hot.observe(path)
    hottest = hot.hottest(units)
    uses = {h: sum(h in path for path in paths) for h in hottest}
    assert len(hottest) <= units
    assert all(n > 1 for n in uses.values())
    assert list(uses.values()) == sorted(uses.values(), reverse=True)
    for path in paths:
        places = [hottest.index(h) if h in uses else units for h in path]
        assert places == sorted(places)
