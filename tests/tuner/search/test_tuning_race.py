import dataclasses
import math

import numpy as np
import pytest

from slo_bench.tuner.capacity.capacity_search import find_capacity
from slo_bench.tuner.capacity.level_samples import LevelSample
from slo_bench.tuner.capacity.search_options import Budget, SearchOptions
from slo_bench.tuner.search.evaluate_configuration import LADDER, PruningThreshold, pace_of, race

BATCHES = 20


class Formula:
    """Attainment falls on a logistic line over the log of the rate; draws are by seed."""

    def __init__(self, capacity_rps, slope=20.0, valid=True):
        self.capacity_rps = capacity_rps
        self.slope = slope
        self.valid = valid
        self.spent = 0

    def run(self, rate_rps, seed, requests):
        self.spent += requests
        away = math.log(9) - self.slope * math.log(rate_rps / self.capacity_rps)
        share = 1 / (1 + math.exp(-away))
        draws = np.random.default_rng(seed).random((BATCHES, requests // BATCHES))
        return LevelSample(
            rate_rps=rate_rps,
            seed=seed,
            requests=requests,
            batch_met=tuple((draws < share).sum(axis=1).tolist()),
            batch_requests=(requests // BATCHES,) * BATCHES,
            backlog=(1,) * (BATCHES + 1),
            invalid_because=None if self.valid else "the client was late",
        )


@pytest.fixture
def pace():
    runner = Formula(4.0)
    options = SearchOptions(targets=(0.9,), budget=Budget(200_000), requests=2000)
    search = find_capacity(runner, start_rps=2.0, options=options)
    measured_pace = pace_of(runner, search, trial=3, gpus=1, first_seed=77)
    assert measured_pace is not None
    assert measured_pace.rate_rps == pytest.approx(4.0, rel=0.05)
    return measured_pace


def test_race_drops_a_worse_configuration_after_the_shortest_run(pace):
    runner = Formula(3.0)
    outcome = race(runner, pace, first_seed=77)
    assert outcome.lost
    assert runner.spent == pace.requests[0] == pytest.approx(pace.requests[-1] * LADDER[0], abs=1)
    assert outcome.estimate_rps == pytest.approx(3.0, rel=0.15)


class Overloaded:
    """Serves at most `throughput_rps`; what is above that stays, and misses its SLO."""

    def __init__(self, throughput_rps):
        self.throughput_rps = throughput_rps

    def run(self, rate_rps, seed, requests):
        served_share = self.throughput_rps / rate_rps
        batch = requests // BATCHES
        noise = np.random.default_rng(seed).integers(-2, 3, BATCHES + 1)
        backlog = np.arange(BATCHES + 1) * batch * (1 - served_share) + noise
        return LevelSample(
            rate_rps=rate_rps,
            seed=seed,
            requests=requests,
            batch_met=(0,) * BATCHES,
            batch_requests=(batch,) * BATCHES,
            backlog=tuple(backlog.round().astype(int).tolist()),
        )


def test_race_estimates_a_loser_at_most_at_its_throughput(pace):
    steep = dataclasses.replace(pace, slope=500.0)  # its line alone would say 3.9 req/s
    outcome = race(Overloaded(2.0), steep, first_seed=77)
    assert outcome.lost
    assert outcome.estimate_rps == pytest.approx(2.0, rel=0.05)


def test_race_keeps_a_better_configuration(pace):
    outcome = race(Formula(4.4), pace, first_seed=77)
    assert not outcome.lost
    assert outcome.estimate_rps == pytest.approx(4.4, rel=0.1)


def test_race_drops_an_equal_configuration_early(pace):
    runner = Formula(4.0)
    outcome = race(runner, pace, first_seed=77)
    assert outcome.lost
    assert runner.spent == sum(pace.requests[:2])
    assert outcome.estimate_rps == pytest.approx(pace.rate_rps)


def test_race_of_invalid_runs_decides_nothing(pace):
    assert not race(Formula(1.0, valid=False), pace, first_seed=77).lost


def test_pruning_threshold_survives_storage(pace):
    assert PruningThreshold.of_plain(vars(pace)) == pace
