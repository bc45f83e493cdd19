"""Sites over a WAN: where requests come from, where they go, and what the way costs."""

from __future__ import annotations

from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest

from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.multi_site import MultiSite
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

PLACEMENT = Placement(model("llama-3.1-8b"), gpu("a100-80g"))
STEP_TIME = step_time(PLACEMENT).model


def load(n: int, every_s: float) -> Workload:
    return Workload(
        arrival_s=np.arange(n) * every_s,
        prompt_tokens=np.full(n, 300),
        output_tokens=np.full(n, 50),
    )


def served(workload: Workload, instances: int = 2, **parameters):
    system = SYSTEMS["multi-site"].with_parameters(**parameters)
    return simulate(workload, system, PLACEMENT, STEP_TIME, instances=instances)


def origins(policy: MultiSite, at_s: float, n: int = 4000) -> list[float]:
    """Share of each site in the requests that arrive at `at_s`."""
    counts = Counter(policy.origin(Mock(id=k, arrival_s=at_s)) for k in range(n))
    return [counts[f"site-{k}"] / n for k in range(policy.sites)]


@pytest.mark.slow
def test_site_origins_follow_the_busiest_site_over_time():
    assert origins(MultiSite(imbalance=0.6), 1e4) == pytest.approx([0.8, 0.2], abs=0.01)
    turning = MultiSite(imbalance=0.6, period_s=100.0)
    assert origins(turning, 0.0) == pytest.approx([0.8, 0.2], abs=0.01)
    assert origins(turning, 25.0) == pytest.approx([0.5, 0.5], abs=0.01)
    assert origins(turning, 50.0) == pytest.approx([0.2, 0.8], abs=0.01)
    three = MultiSite(sites=3, imbalance=1.0)
    assert origins(three, 0.0) == pytest.approx([2 / 3, 1 / 6, 1 / 6], abs=0.01)


def test_crossing_request_pays_one_round_trip():
    """Requests far apart, so that no instance has two at once."""
    at_home = served(load(10, 30.0), imbalance=1.0, routing="home")
    assert at_home.counts["crossings"] == 0
    assert set(at_home.records.instance) == {0}
    # Fewest requests: the first instance, also for those of site 1.
    crossing = served(load(10, 30.0), imbalance=0.0, round_trip_s=0.3, routing="requests")
    assert set(crossing.records.instance) == {0}
    sites = [MultiSite(imbalance=0.0).origin(Mock(id=k, arrival_s=0.0)) for k in range(10)]
    slower_s = crossing.records.ttft_s - at_home.records.ttft_s
    assert slower_s == pytest.approx([0.0 if site == "site-0" else 0.3 for site in sites])
    assert crossing.counts["crossings"] == sites.count("site-1")


def test_router_crosses_only_for_a_gain_above_the_round_trip():
    burst = load(60, 0.01)
    parameters = {"imbalance": 1.0, "routing": "latency"}
    near = served(burst, round_trip_s=0.01, **parameters)
    far = served(burst, round_trip_s=0.7, **parameters)
    never = served(burst, round_trip_s=5.0, **parameters)
    assert near.counts["crossings"] > far.counts["crossings"] > never.counts["crossings"] == 0
    blind = served(burst, round_trip_s=5.0, imbalance=1.0, routing="step-times")
    assert blind.counts["crossings"] > 20
    assert np.mean(blind.records.ttft_s) > np.mean(never.records.ttft_s)


def test_travelling_requests_count_as_load_and_enter_in_order():
    result = served(load(40, 0.001), round_trip_s=1.0, imbalance=1.0, routing="step-times")
    of_site = np.bincount(result.records.instance, minlength=2)
    assert of_site.min() >= 15  # those on their way count
    assert (result.records.ttft_s[result.records.instance == 1] > 1.0).all()


def test_instances_are_divided_among_sites_or_refused():
    with pytest.raises(SloBenchError, match="at least one instance a site"):
        served(load(1, 1.0), instances=2, sites=3)
    roles = MultiSite(sites=3).layout(SYSTEMS["vllm"].policy, PLACEMENT, 5)
    assert [role.instances for role in roles] == [2, 2, 1]
