import math

import pytest

from slo_bench.harness.results.stationarity import BATCHES
from slo_bench.tuner.capacity.level_samples import LevelSample
from slo_bench.tuner.capacity.search_options import Budget, SearchOptions
from slo_bench.tuner.capacity.traces import find_trace_capacity


class Falling:
    """Attainment falls in a line from 1 at rate 0 to 0 at `zero_rps`."""

    def __init__(self, zero_rps):
        self.zero_rps = zero_rps
        self.rates = []

    def run(self, rate_rps, seed, requests):
        self.rates.append(rate_rps)
        met = math.floor(max(0.0, 1 - rate_rps / self.zero_rps) * 1000)
        return LevelSample(
            rate_rps=rate_rps,
            seed=seed,
            requests=requests,
            batch_met=(met,) * BATCHES,
            batch_requests=(1000,) * BATCHES,
            backlog=(0,) * (BATCHES + 1),
        )


def search(runner, start_rps=1.0, **options):
    options = SearchOptions(**options)
    return find_trace_capacity(runner, start_rps=start_rps, options=options, requests=500)


def test_trace_capacity_interval_is_between_passing_and_failing_rates():
    runner = Falling(100.0)
    outcome = search(runner)
    for capacity, truth_rps in zip(outcome.capacities, (10.0, 1.0), strict=True):
        assert capacity.precise
        assert capacity.low_rps <= truth_rps * 1.01
        assert capacity.high_rps >= truth_rps
        assert capacity.capacity_rps == pytest.approx(truth_rps, rel=0.04)
    assert len(set(runner.rates)) == len(runner.rates)
    assert outcome.requests_spent == 500 * len(runner.rates)


def test_trace_search_keeps_its_budget():
    outcome = search(Falling(100.0), targets=(0.9,), budget=Budget(requests=1800))
    assert outcome.requests_spent == 1500
    assert "300 of 1,800 are left" in outcome.stopped
    assert outcome.capacities[0].limited_by == "max_requests"


def test_trace_that_never_fails_has_no_capacity():
    outcome = search(Falling(math.inf), targets=(0.9,), high_rps=50.0)
    assert outcome.capacities[0].capacity_rps is None
    assert outcome.capacities[0].low_rps == 50.0
    assert "do not bracket 0.9" in outcome.stopped
