import dataclasses

import numpy as np
import pytest

from reference.mdc_queue import MdcQueue
from slo_bench.harness.results.stationarity import (
    BATCHES,
    batches_of,
    design_effect,
    drifts,
    grows,
    starves,
    stationary,
)
from slo_bench.tuner.capacity.level_samples import check_refused, wilson_interval
from slo_bench.workloads.errors import SloBenchError


def sample(arrival_s, end_s, met=None, **options):
    arrival_s = np.asarray(arrival_s, dtype=float)
    met = np.ones(len(arrival_s), dtype=bool) if met is None else np.asarray(met)
    end_s = np.asarray(end_s, dtype=float)
    return batches_of(arrival_s=arrival_s, end_s=end_s, met=met, **options)


def test_sample_leaves_start_and_end_out():
    met = np.zeros(1000, dtype=bool)
    met[100:970] = True
    run_sample = sample(np.arange(1000), np.arange(1000) + 0.5, met)
    assert (run_sample.counted, run_sample.attainment) == (870, 1.0)
    assert len(run_sample.batch_met) == BATCHES


def test_sample_of_a_whole_trace_counts_from_its_warmup():
    met = np.arange(1000) % 2 == 0
    run_sample = sample(np.arange(1000), np.arange(1000) + 0.5, met, whole=True, warmup_s=200.0)
    assert (run_sample.counted, run_sample.met) == (800, 400)


def test_sample_does_not_depend_on_the_order_of_requests():
    rng = np.random.default_rng(0)
    arrival_s = np.sort(rng.uniform(0, 100, 500))
    met = rng.random(500) < 0.7
    order = rng.permutation(500)
    assert sample(arrival_s, arrival_s + 1, met) == sample(
        arrival_s[order], arrival_s[order] + 1, met[order]
    )


def test_sample_backlog_is_what_exceeds_the_first_stays():
    # Everybody stays for ten arrivals, but from the middle on for thirty.
    arrival_s = np.arange(1000)
    assert set(sample(arrival_s, arrival_s + 9.5).backlog) == {0}
    run_sample = sample(arrival_s, arrival_s + np.where(arrival_s < 500, 9.5, 29.5))
    assert run_sample.backlog[0] == 0
    assert run_sample.backlog[-1] == 20


def test_backlog_of_a_filling_system_does_not_grow():
    """Requests stay for a sixth of a run that begins empty, and nobody waits for anybody."""
    rng = np.random.default_rng(5)
    growth = []
    for _ in range(50):
        runs = []
        for _ in range(3):
            arrival_s = np.cumsum(rng.exponential(1 / 8, 500))
            runs.append(sample(arrival_s, arrival_s + rng.exponential(10.0, 500)))
        growth.append(grows(runs))
    assert sum(growth) <= 1


def test_backlog_growth_is_found_where_stays_grow_too():
    """A batch that grows with the backlog: stays grow with it, and look as if the system filled."""
    rng = np.random.default_rng(5)
    arrival_s = np.cumsum(rng.exponential(1 / 5, 500))
    end_s = arrival_s + 60.0
    queued_s = np.maximum(0, arrival_s - 30) * 0.4
    without = sample(arrival_s, end_s)
    assert not grows([without])
    assert grows([sample(arrival_s, end_s, first_token_s=arrival_s + queued_s)])
    dropped = sample(arrival_s, arrival_s, first_token_s=np.full(500, np.nan))
    assert set(dropped.waiting) == {0}  # a request that left does not wait


def test_backlog_growth_below_a_hundredth_of_arrivals_is_none():
    arrival_s = np.arange(20_000.0)
    for left, expected in ((0.005, False), (0.02, True)):  # share of requests that never end
        never = (np.random.default_rng(3).random(20_000) < left) & (arrival_s > 5000)
        assert grows([sample(arrival_s, np.where(never, np.nan, arrival_s + 5))]) is expected


def test_run_that_never_serves_some_requests_is_not_stationary():
    """Two in a hundred are never served: as for the others, it looks as if they stay long."""
    arrival_s = np.arange(1000.0)
    end_s = arrival_s + 1
    end_s[::50] = np.nan
    run_sample = sample(arrival_s, end_s, horizon_s=100.0)
    assert run_sample.starved == 4
    assert stationary(run_sample) is False
    assert not grows([run_sample])  # they may be served later: it bounds no capacity
    assert not starves(sample(arrival_s, end_s))  # without a bound they may stay
    assert not starves(sample(arrival_s, end_s, horizon_s=300.0))  # too short a run to tell
    assert not starves(sample(arrival_s, end_s, first_token_s=arrival_s, horizon_s=100.0))


def test_unfinished_requests_stay_and_missing_arrivals_are_misses():
    arrival_s = np.arange(1000.0)
    arrival_s[-10:] = np.nan
    end_s = arrival_s + 0.5
    end_s[500] = np.nan
    met = ~np.isnan(end_s)
    run_sample = sample(arrival_s, end_s, met, whole=True)
    assert run_sample.backlog[-1] == 1
    assert run_sample.met == 989


def test_sample_of_too_few_requests_is_refused():
    with pytest.raises(SloBenchError, match="at least 20 are needed"):
        sample(np.arange(15), np.arange(15))


def test_backlog_grows_above_the_service_limit_only():
    queue = MdcQueue(4, 1.0, 1000.0)  # so patient that all requests are met so far
    over = [queue.run(4.2, seed, 4000) for seed in range(5)]
    assert all(run.attainment == 1.0 for run in over)
    assert grows(over)
    below = [[queue.run(3.8, 10 * k + seed, 4000) for seed in range(3)] for k in range(50)]
    assert sum(map(grows, below)) <= 1


def test_design_effect_of_independent_and_of_correlated_requests():
    rng = np.random.default_rng(3)

    def run(stay):
        """Met or not in spells of so many requests."""
        met = np.repeat(rng.random(20_000 // stay) < 0.9, stay)
        return sample(np.arange(20_000), np.arange(20_000), met)

    assert design_effect([run(1) for _ in range(40)]) == pytest.approx(1, abs=0.3)
    assert design_effect([run(50) for _ in range(40)]) == pytest.approx(50, rel=0.3)


def test_drift_is_found_in_falling_attainment_and_not_in_noise():
    rng = np.random.default_rng(7)
    even = (
        sample(np.arange(4000.0), np.arange(4000) + 1.0, rng.random(4000) < 0.9) for _ in range(99)
    )
    assert sum(map(drifts, even)) <= 1
    falling = rng.random(4000) < np.linspace(0.98, 0.8, 4000)
    assert drifts(sample(np.arange(4000.0), np.arange(4000) + 1.0, falling))


def test_stationary_needs_a_run_long_against_slo_and_stays():
    queue = MdcQueue(4, 1.0, 1.0)
    assert stationary(queue.run(3.0, 0, 4000)) is True
    assert stationary(queue.run(4.4, 0, 4000)) is False  # the queue grows
    patient = MdcQueue(4, 1.0, 1000.0)
    assert stationary(patient.run(3.0, 0, 4000)) is None  # 1,333 s of arrivals, 1,001 s to miss
    assert stationary(patient.run(3.0, 0, 40_000)) is True


def test_sample_leaves_out_arrivals_within_the_slo_of_either_end():
    arrival_s = np.arange(1000.0)
    run_sample = sample(arrival_s, arrival_s + 1, horizon_s=200.0)
    assert (run_sample.counted, run_sample.window_s) == (599, 599.0)
    assert sample(arrival_s, arrival_s + 1, horizon_s=400.0).counted == 870  # too short for it


def test_horizons_are_not_left_out_where_too_few_requests_remain():
    arrival_s = np.arange(40) / 40
    run_sample = sample(arrival_s, arrival_s + 0.1, horizon_s=0.32)  # 15 requests within
    assert run_sample.counted == 35


def test_refused_requests_end_a_search_where_no_target_can_be_met():
    def runs(*refused):
        run = MdcQueue(4, 1.0, 1.0).run(1.0, 0, 200)
        return [
            dataclasses.replace(run, refused=count, refused_because="400: too long")
            for count in refused
        ]

    check_refused(runs(0, 0), [0.9])
    check_refused(runs(20), [0.9])  # exactly what the target leaves
    check_refused(runs(27), [0.9])  # more, but perhaps by chance
    check_refused(runs(0, 40, 0), [0.9])  # 6.7 % of all
    for refused in (runs(40), runs(27, 27, 27, 27)):
        with pytest.raises(SloBenchError, match=r"at any rate \(400: too long\): no rate meets"):
            check_refused(refused, [0.9, 0.99])


def test_wilson_interval_of_a_known_case():
    low, high = wilson_interval(0.1, 100)  # E. B. Wilson 1927; 10 of 100
    assert (low, high) == pytest.approx((0.0552, 0.1744), abs=1e-4)
