import dataclasses
import math
from dataclasses import dataclass, field

import pytest

from reference.mdc_queue import MdcQueue
from slo_bench.tuner.capacity.capacity_checkpoint import RememberingRunner
from slo_bench.tuner.capacity.capacity_search import find_capacity
from slo_bench.tuner.capacity.curve import CapacityLevel
from slo_bench.tuner.capacity.level_samples import LevelSample
from slo_bench.tuner.capacity.search_options import Budget, SearchOptions, SearchOutcome
from slo_bench.workloads.errors import SloBenchError

QUEUE = MdcQueue(4, 1.0, 0.3)


@dataclass
class Watched:
    """A queue whose runs are written down; some may be invalid, or never miss."""

    queue: MdcQueue
    late_from_rps: float = math.inf
    runs: list = field(default_factory=list)

    def run(self, rate_rps, seed, requests):
        self.runs.append((rate_rps, seed, requests))
        sample = self.queue.run(rate_rps, seed, requests)
        late = "late" if rate_rps >= self.late_from_rps else None
        return dataclasses.replace(sample, wall_s=1.0, invalid_because=late)


@pytest.mark.slow
def test_find_capacity_covers_the_true_capacity_in_twenty_searches():
    covered = close = 0
    for queue in (QUEUE, MdcQueue(8, 1.0, 1.0)):
        truth_rps = queue.capacity_rps(0.9)
        for number in range(20):
            options = SearchOptions(targets=(0.9,), first_seed=1000 * number)
            start_rps = queue.limit_rps * (0.3, 0.9, 2.0)[number % 3]
            (capacity,) = find_capacity(queue, start_rps=start_rps, options=options).capacities
            assert capacity.precise
            covered += capacity.low_rps <= truth_rps <= capacity.high_rps
            close += abs(capacity.capacity_rps / truth_rps - 1) <= 0.05
    assert covered >= 35  # of 40: if 95 % are covered, fewer in less than one of two hundred
    assert close >= 39


@pytest.mark.slow
def test_find_capacity_of_two_targets():
    search = find_capacity(QUEUE, start_rps=2.0, options=SearchOptions(targets=(0.99, 0.9)))
    assert [capacity.target for capacity in search.capacities] == [0.9, 0.99]
    for capacity in search.capacities:
        assert capacity.capacity_rps == pytest.approx(QUEUE.capacity_rps(capacity.target), rel=0.05)
    assert search.stopped == "every interval is within ±3.0%"
    assert search.requests_spent == sum(level.requests for level in search.levels)


def test_find_capacity_gives_every_run_its_own_seed():
    watched = Watched(QUEUE)
    find_capacity(watched, start_rps=2.0, options=SearchOptions(targets=(0.9,), first_seed=50))
    seeds = [seed for _, seed, _ in watched.runs]
    assert seeds == list(range(50, 50 + len(seeds)))


def test_find_capacity_goes_on_from_earlier_runs():
    earlier = [QUEUE.run(2.0, seed, 8000) for seed in (91, 92, 93)]
    watched = Watched(QUEUE)
    search = find_capacity(
        watched,
        start_rps=2.0,
        options=SearchOptions(targets=(0.9,), widest_bracket=1.1),
        neighbours=(2.0, 2.5),
        earlier_runs=earlier,
    )
    [capacity] = search.capacities
    assert capacity.capacity_rps == pytest.approx(QUEUE.capacity_rps(0.9), rel=0.05)
    assert watched.runs[0][0] == 2.5  # the first rate is decided
    assert search.requests_spent == 24_000 + sum(requests for _, _, requests in watched.runs)


def test_find_capacity_repeats_exactly():
    options = SearchOptions(targets=(0.9,))
    assert find_capacity(QUEUE, start_rps=2.0, options=options) == find_capacity(
        QUEUE, start_rps=2.0, options=options
    )


def test_find_capacity_keeps_its_budget_of_requests():
    options = SearchOptions(targets=(0.9,), budget=Budget(requests=15_000))
    search = find_capacity(QUEUE, start_rps=2.0, options=options)
    assert search.requests_spent <= 15_000
    assert "of 15,000 are left" in search.stopped
    (capacity,) = search.capacities
    assert not capacity.precise
    assert capacity.limited_by == "max_requests"
    assert capacity.low_rps < QUEUE.capacity_rps(0.9) < capacity.high_rps


def test_find_capacity_keeps_its_budget_of_time():
    options = SearchOptions(targets=(0.9,), budget=Budget(requests=None, time_s=8.0))
    watched = Watched(QUEUE)
    search = find_capacity(watched, start_rps=2.0, options=options)
    assert search.wall_s == len(watched.runs) <= 8
    assert "of 8 s are left" in search.stopped
    assert search.capacities[0].limited_by == "max_time_s"


@dataclass
class InRealTime:
    """A queue whose runs take as long as their requests do on a server."""

    queue: MdcQueue
    runs: list = field(default_factory=list)

    def run(self, rate_rps, seed, requests):
        self.runs.append((rate_rps, seed, requests))
        sample = self.queue.run(rate_rps, seed, requests)
        took_s = requests / min(rate_rps, self.queue.limit_rps) + self.queue.service_s
        return dataclasses.replace(sample, wall_s=took_s)


def in_time(queue, time_s, runner=None):
    """A search like that of a real server, from three quarters of the queue's throughput."""
    options = SearchOptions(
        targets=(0.9,),
        tolerance=0.05,
        requests=100,
        budget=Budget(requests=None, time_s=time_s),
        most_horizons=20.0,
    )
    runner = runner or InRealTime(queue)
    return find_capacity(runner, start_rps=0.75 * queue.limit_rps, options=options)


@pytest.mark.parametrize("time_s", [90.0, 150.0])
def test_find_capacity_uses_its_time_and_tells_the_rate_that_passed(time_s):
    search = in_time(QUEUE, time_s)
    assert 0.95 * time_s < search.wall_s < 1.05 * time_s
    passed_rps = max(level.rate_rps for level in search.levels if level.passes(0.9))
    assert "ended by time" in search.stopped
    assert f"the highest rate that passed 0.9 is {passed_rps:g} req/s" in search.stopped


def test_find_capacity_without_a_decision_in_time_tells_what_the_runs_met():
    search = in_time(MdcQueue(8, 2.0, 6.0), 90.0)
    assert search.capacities[0].outcome is SearchOutcome.UNDECIDED
    assert search.stopped.endswith(
        "no rate passed 0.9, but at 3 req/s 100.0% were in SLO, in runs too short to pass"
    )


def test_find_capacity_with_more_time_keeps_the_shorter_last_run():
    first = InRealTime(QUEUE)
    samples = []
    remembered = RememberingRunner(first, samples, list.append)
    in_time(QUEUE, 90.0, remembered)
    again = InRealTime(QUEUE)
    longer = in_time(QUEUE, 300.0, RememberingRunner(again, samples, list.append))
    assert first.runs[-1][2] not in (100, 400)  # it was as long as the time allowed
    cells = [(rate_rps, seed) for rate_rps, seed, _ in (*first.runs, *again.runs)]
    assert len(set(cells)) == len(cells) == sum(len(level.samples) for level in longer.levels)


def test_find_capacity_continues_with_another_budget():
    first = Budget(requests=12_000)
    short, long = Watched(QUEUE), Watched(QUEUE)
    find_capacity(
        short, start_rps=2.0, options=SearchOptions(targets=(0.9,), requests=500, budget=first)
    )
    options = SearchOptions(targets=(0.9,), requests=500, shares_of=first)
    find_capacity(long, start_rps=2.0, options=options)
    assert len(long.runs) > len(short.runs)
    assert long.runs[: len(short.runs)] == short.runs


def test_find_capacity_with_a_neighbour_spends_fewer_requests():
    options = SearchOptions(targets=(0.9,), tolerance=0.1)
    far = find_capacity(QUEUE, start_rps=0.02, options=options)
    near = find_capacity(QUEUE, start_rps=0.02, options=options, neighbours=(2.3,))
    assert near.requests_spent < far.requests_spent
    assert near.capacities[0].capacity_rps == pytest.approx(far.capacities[0].capacity_rps, rel=0.1)


def test_find_capacity_is_bounded_by_a_growing_backlog():
    # Nobody misses anything for the first thousand requests over the limit.
    queue = MdcQueue(4, 1.0, 100.0)
    search = find_capacity(queue, start_rps=1.0, options=SearchOptions(targets=(0.9,)))
    assert search.capacities[0].capacity_rps == pytest.approx(queue.limit_rps, rel=0.02)
    assert any(level.growing for level in search.levels)


def test_find_capacity_of_a_system_that_never_misses_is_none():
    class Instant:
        def run(self, rate_rps, seed, requests):
            queue = MdcQueue(1, 1e-9 / rate_rps, 1.0)
            return queue.run(rate_rps, seed, requests)

    search = find_capacity(
        Instant(), start_rps=1.0, options=SearchOptions(requests=200, high_rps=1000)
    )
    assert all(capacity.capacity_rps is None for capacity in search.capacities)
    assert search.capacities[0].low_rps == 1000
    assert "no rate up to 1000 req/s falls below 0.9" in search.stopped


def test_find_capacity_of_a_system_that_always_misses_is_zero():
    options = SearchOptions(targets=(0.999,), requests=200, low_rps=0.5)
    search = find_capacity(MdcQueue(1, 1.0, 0.0), start_rps=2.0, options=options)
    (capacity,) = search.capacities
    assert (capacity.capacity_rps, capacity.low_rps, capacity.high_rps) == (0.0, 0.0, 0.5)
    assert "even 0.5 req/s falls below 0.999" in search.stopped


def test_find_capacity_ignores_invalid_levels_and_stays_below_them():
    watched = Watched(QUEUE, late_from_rps=1.5)  # the capacity at 0.9 is 2.2
    search = find_capacity(watched, start_rps=1.0, options=SearchOptions(budget=Budget(100_000)))
    at_90, at_99 = search.capacities
    assert at_90.capacity_rps is None
    assert 1.2 < at_90.low_rps < 1.5
    assert at_99.capacity_rps == pytest.approx(QUEUE.capacity_rps(0.99), rel=0.06)
    late = [level for level in search.levels if level.rate_rps >= 1.5]
    assert late
    assert all(level.counted == 0 for level in late)


def test_find_capacity_without_a_valid_run_is_an_error():
    options = SearchOptions(requests=200, budget=Budget(requests=5000))
    with pytest.raises(SloBenchError, match="the client was late at every rate"):
        find_capacity(Watched(QUEUE, late_from_rps=0.0), start_rps=1.0, options=options)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"targets": ()}, "at least one target"),
        ({"targets": (1.5,)}, "target must lie between 0 and 1 but is 1.5"),
        ({"targets": (0.9, 0.9)}, "each target can be given once"),
        ({"tolerance": 0.0}, "tolerance must lie in"),
        ({"requests": 10}, "requests must be at least 100 but is 10"),
        ({"seeds": 0}, "seeds must be at least 1 but is 0"),
        ({"budget": Budget(requests=0)}, "max_requests must be positive but is 0"),
        ({"low_rps": 3.0, "high_rps": 2.0}, "the lowest rate"),
    ],
)
def test_search_options_refuse_impossible_values(settings, problem):
    with pytest.raises(SloBenchError, match=problem):
        SearchOptions(**settings)


def test_find_capacity_refuses_a_start_of_zero():
    with pytest.raises(SloBenchError, match="start_rps must be positive"):
        find_capacity(QUEUE, start_rps=0.0)


def test_find_capacity_with_runs_shorter_than_the_slo_is_undecided():
    # At 5 req/s the queue grows, but 2,000 requests have arrived before the first can miss.
    queue = MdcQueue(4, 1.0, 350.0)
    options = SearchOptions(targets=(0.9,), budget=Budget(requests=2000))
    search = find_capacity(queue, start_rps=4.05, options=options)
    (capacity,) = search.capacities
    assert search.levels[0].attainment == 1.0
    assert (capacity.capacity_rps, capacity.low_rps, capacity.outcome) == (
        None,
        0.0,
        SearchOutcome.UNDECIDED,
    )
    assert "of 2,000 are left" in search.stopped


@pytest.mark.slow
def test_find_capacity_with_more_budget_decides():
    queue = MdcQueue(4, 1.0, 350.0)
    options = SearchOptions(targets=(0.9,), budget=Budget(requests=2000, horizons=300.0))
    (capacity,) = find_capacity(queue, start_rps=5.0, options=options).capacities
    assert capacity.outcome is SearchOutcome.FOUND
    assert capacity.low_rps <= queue.capacity_rps(0.9) <= capacity.high_rps


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_find_capacity_low_end_was_run_and_passed(number):
    options = SearchOptions(targets=(0.9, 0.99), first_seed=1000 * number)
    search = find_capacity(QUEUE, start_rps=0.7 * (number + 1), options=options)
    levels = {level.rate_rps: level for level in search.levels}
    for capacity in search.capacities:
        assert capacity.low_rps == 0 or levels[capacity.low_rps].passes(capacity.target)
        assert capacity.high_rps <= max(levels)


def test_find_capacity_without_both_sides_is_undecided():
    options = SearchOptions(targets=(0.9,), requests=200, budget=Budget(requests=450))
    (capacity,) = find_capacity(QUEUE, start_rps=0.5, options=options).capacities
    assert capacity.outcome is SearchOutcome.UNDECIDED
    assert capacity.capacity_rps is None
    assert capacity.low_rps == 1.0
    assert capacity.high_rps == math.inf


def test_coarse_tolerance_decides_by_shorter_runs():
    runs = [MdcQueue(4, 1.0, 1.0).run(2.5, seed, 200) for seed in range(8)]

    def undecided(tolerance):
        growth_limit = SearchOptions(tolerance=tolerance).most_growth
        return sum(CapacityLevel(2.5, (run,), growth_limit).passes(0.9) is None for run in runs)

    assert undecided(0.03) == undecided(0.05) > 0
    assert undecided(0.2) == 0


class NeverSettled:
    """Runs too short to pass; requests miss from 20 req/s on."""

    def run(self, rate_rps, seed, requests):
        each = requests // 20
        return LevelSample(
            batch_met=((0.0 if rate_rps > 20 else float(each)),) * 20,
            batch_requests=(each,) * 20,
            backlog=(0,) * 21,
            horizon_s=1.0,
            window_s=1.0,
            rate_rps=rate_rps,
            seed=seed,
            requests=requests,
            wall_s=requests / rate_rps,
        )


def test_find_capacity_goes_up_from_a_rate_that_meets_its_slo_in_a_run_too_short_to_pass():
    options = SearchOptions(targets=(0.9,), requests=100, budget=Budget(None, 300.0))
    rates = []
    find_capacity(
        NeverSettled(),
        start_rps=9.0,
        options=options,
        neighbours=[9.0],
        watch=lambda so_far: rates.append(so_far.sample.rate_rps),
    )
    assert list(dict.fromkeys(rates))[:4] == [9.0, 10.8, 15.6, 31.2]
