import dataclasses
import math

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from slo_bench import Experiment
from slo_bench.tuner.capacity.level_samples import LevelSample
from slo_bench.tuner.capacity.search_options import Budget, SearchOptions
from slo_bench.tuner.search.evaluate_configuration import (
    RACE_SEEDS,
    ConfigurationEvaluator,
    PruningThreshold,
    pace_of,
    race,
)
from slo_bench.tuner.search.last_race import last_race
from slo_bench.tuner.search.runs import Servers
from slo_bench.tuner.search.settings import TuneSettings
from slo_bench.tuner.search.study_results import close_ones, rivals_pace, rows_of, to_prove
from slo_bench.tuner.search.tuning_run import prepared

BATCHES = 20
TARGET = 0.9


class Formula:
    """Attainment falls on a logistic line over the log of the rate; draws are by seed."""

    def __init__(self, capacity_rps, slope=20.0, valid=True):
        self.capacity_rps = capacity_rps
        self.slope = slope
        self.valid = valid
        self.spent = 0
        self.lowest_rps = math.inf

    def run(self, rate_rps, seed, requests):
        self.spent += requests
        self.lowest_rps = min(rate_rps, self.lowest_rps)
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


def pace_at(capacity_rps, start_rps=2.0, **options):
    search_options = SearchOptions(targets=(TARGET,), requests=2000, **options)
    runner = Formula(capacity_rps)
    return pace_of(runner, search_options, start_rps, gpus=1, first_seed=77), runner


@pytest.fixture
def pace():
    measured_pace, _ = pace_at(4.0)
    assert measured_pace is not None
    assert measured_pace.rate_rps == pytest.approx(4.0, rel=0.05)
    return measured_pace


def raced(runner, pace):
    return race(runner, pace, target=TARGET, first_seed=77)


def met_by(runner, pace, *, first_seed):
    runs = [runner.run(pace.rate_rps, first_seed + k, n) for k, n in enumerate(pace.requests)]
    return tuple(run.batch_met for run in runs)


@pytest.mark.parametrize("start_rps", [0.05, 3.9, 400.0])
def test_pace_is_found_from_any_start_for_a_few_runs(start_rps):
    measured_pace, runner = pace_at(4.0, start_rps)
    assert measured_pace.estimate_rps == pytest.approx(4.0, rel=0.05)
    assert measured_pace.slope == pytest.approx(20.0, rel=0.3)
    ladder = sum(measured_pace.requests)
    assert runner.spent <= 13 * 2000 + 2 * ladder


@pytest.mark.parametrize("valid", [True, False])
def test_no_pace_where_no_rate_fails_or_the_client_is_late(valid):
    runner = Formula(4.0 if not valid else 1e9, valid=valid)
    options = SearchOptions(targets=(TARGET,), requests=2000)
    assert pace_of(runner, options, 2.0, gpus=1, first_seed=77) is None


class Patient(Formula):
    """Whoever waits misses its SLO after 100 s alone: shorter runs meet it at any rate."""

    def run(self, rate_rps, seed, requests):
        short = requests / rate_rps < 100
        sample = super().run(rate_rps / 10 if short else rate_rps, seed, requests)
        return dataclasses.replace(
            sample, rate_rps=rate_rps, horizon_s=20.0, window_s=0.85 * requests / rate_rps
        )


@pytest.mark.parametrize("budget", [Budget(), Budget(4000, horizons=300.0)])
def test_pace_is_not_misled_by_runs_too_short_to_miss_an_slo(budget):
    options = SearchOptions(targets=(TARGET,), requests=200, budget=budget)
    pace = pace_of(Patient(4.0), options, 20.0, gpus=1, first_seed=77)
    assert pace is not None
    assert pace.estimate_rps == pytest.approx(4.0, rel=0.05)
    assert not raced(Patient(4.4), pace).lost


class Flattered(Formula):
    """As with sessions, whose later requests come late: short runs meet their SLO at any rate."""

    def run(self, rate_rps, seed, requests):
        sample = super().run(rate_rps / 10 if requests < 200 else rate_rps, seed, requests)
        return dataclasses.replace(sample, rate_rps=rate_rps)


def test_no_pace_where_hardly_a_request_meets_its_slo():
    options = SearchOptions(targets=(TARGET,), requests=150)
    assert pace_of(Flattered(4.0), options, 20.0, gpus=1, first_seed=77) is None


def test_climb_of_a_server_tries_no_rate_at_which_a_run_takes_its_whole_time():
    budget = Budget(None, time_s=100.0)
    pace, runner = pace_at(1e-6, 640.0, budget=budget)
    assert pace is None
    assert runner.lowest_rps >= 2000 / 100


def test_race_drops_a_worse_configuration_after_the_shortest_run(pace):
    runner = Formula(3.0)
    outcome = raced(runner, pace)
    assert outcome.lost
    assert runner.spent == pace.requests[0]
    assert outcome.estimate_rps == pytest.approx(3.0, rel=0.15)


def test_race_drops_a_configuration_that_is_better_by_a_hair_before_the_last_run(pace):
    better = Formula(4.004)
    assert raced(better, pace).lost
    assert better.spent < sum(pace.requests)


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
    outcome = raced(Overloaded(2.0), steep)
    assert outcome.lost
    assert outcome.estimate_rps == pytest.approx(2.0, rel=0.05)


def test_race_keeps_a_better_configuration(pace):
    outcome = raced(Formula(4.4), pace)
    assert not outcome.lost
    assert outcome.estimate_rps == pytest.approx(4.4, rel=0.1)


def test_race_against_a_leader_as_far_above_the_target_is_no_win(pace):
    runner = Formula(4.4)
    equal = dataclasses.replace(pace, met=met_by(runner, pace, first_seed=77))
    assert raced(runner, equal).lost


class BetterInTheRace(Formula):
    """Its runs at other rates are less lucky than those at the leader's."""

    def run(self, rate_rps, seed, requests):
        self.capacity_rps = 4.6 if rate_rps == self.pace.rate_rps else 3.6
        return super().run(rate_rps, seed, requests)


def winner(runner, pace, leader, folder):
    """The pace of `runner` after it has won against `leader`."""
    tuning = prepared(Experiment(systems="sarathi"), TuneSettings())
    evaluator = ConfigurationEvaluator(
        tuning.experiment, tuning.space, tuning.aim, 0.05, folder, Servers(folder)
    )
    runner.spec = evaluator.runs_of({}).spec
    pace = dataclasses.replace(pace, met=met_by(leader, pace, first_seed=RACE_SEEDS))
    return evaluator._raced(runner, pace, 1)


def test_who_wins_a_race_leads_whatever_its_climb_says(pace, tmp_path):
    runner = BetterInTheRace(4.6)
    runner.pace = pace
    leader = winner(runner, pace, Formula(4.0), tmp_path)
    assert leader.rate_rps < pace.rate_rps
    assert leader.estimate_rps == pytest.approx(1.01 * pace.estimate_rps)


@pytest.mark.parametrize(("of_before", "climbs"), [(4.0, False), (4.4, True)])
def test_winner_climbs_where_the_rate_says_little(pace, tmp_path, of_before, climbs):
    leader = winner(Formula(1.03 * of_before), pace, Formula(of_before), tmp_path)
    assert (leader.rate_rps > pace.rate_rps) is climbs
    assert leader.estimate_rps > pace.estimate_rps


@pytest.mark.parametrize(("times", "climbs"), [(1.13, False), (4.0, True)])
def test_winner_near_the_leader_takes_its_slope_and_does_not_climb(pace, tmp_path, times, climbs):
    runner = Formula(times * pace.rate_rps, slope=8.0)
    leader = winner(runner, pace, Formula(0.9 * pace.rate_rps), tmp_path)
    assert leader.rate_rps > pace.rate_rps
    assert (leader.slope == pace.slope) is not climbs
    if not climbs:
        assert runner.spent <= sum(pace.requests[:2]) + 2 * sum(leader.requests)


class OnItsOwn(Formula):
    """Draws that no other configuration has: differences are as uncertain as can be."""

    def __init__(self, capacity_rps, number):
        super().__init__(capacity_rps)
        self.number = number
        self.keys = set()

    def run(self, rate_rps, seed, requests):
        self.keys.add((rate_rps, seed, requests))
        sample = super().run(rate_rps, 1000 * seed + self.number, requests)
        return dataclasses.replace(sample, seed=seed)


def raced_on(capacities_rps, pace, most_requests=200_000, first_seed=0):
    runners = {k: OnItsOwn(rps, k) for k, rps in enumerate(capacities_rps)}
    estimates_rps = last_race(
        runners, pace, target=TARGET, first_seed=first_seed, most_requests=most_requests
    )
    return estimates_rps, [sum(key[-1] for key in runner.keys) for runner in runners.values()]


@pytest.mark.parametrize("first_seed", [0, 100, 200])
def test_last_race_tells_one_per_cent_apart_and_spends_on_the_close(pace, first_seed):
    estimates_rps, spent = raced_on((4.0, 3.5, 4.04, 3.7), pace, first_seed=first_seed)
    assert list(estimates_rps)[:2] == [2, 0]
    assert estimates_rps[2] == pytest.approx(4.04, rel=0.015)
    assert estimates_rps[2] > estimates_rps[0] > max(estimates_rps[1], estimates_rps[3])
    assert 2 * max(spent[1], spent[3]) <= 4 * pace.requests[-1] <= min(spent[0], spent[2])


def test_last_race_keeps_to_its_requests(pace):
    for runs in (7, 8, 20):
        most_requests = runs * pace.requests[-1]
        _, spent = raced_on((4.0, 4.01, 4.02), pace, most_requests)
        assert most_requests - 3 * pace.requests[-1] < sum(spent) <= most_requests


def test_last_race_is_at_the_leaders_capacity_though_its_race_was_optimistic(pace):
    optimistic = dataclasses.replace(pace, estimate_rps=1.15 * pace.estimate_rps)
    estimates_rps, _ = raced_on((4.0, 3.9), optimistic)
    assert estimates_rps[0] == pytest.approx(4.0, rel=0.015)


def test_last_race_ends_where_both_do_the_very_same(pace):
    runners = {0: Formula(4.0), 1: Formula(4.0)}
    last_race(runners, pace, target=TARGET, first_seed=0, most_requests=100_000)
    assert runners[1].spent == 2 * pace.requests[-1]


def test_race_tells_who_is_as_good_within_its_error(pace):
    on_its_own = dataclasses.replace(pace, met=met_by(OnItsOwn(4.0, 1), pace, first_seed=77))
    assert raced(Formula(4.0), on_its_own).close
    assert not raced(Formula(3.0), on_its_own).close
    assert not raced(
        Formula(4.0), dataclasses.replace(pace, met=met_by(Formula(4.0), pace, first_seed=77))
    ).close


def test_race_drops_an_equal_configuration_early(pace):
    runner = Formula(4.0)
    outcome = raced(runner, pace)
    assert outcome.lost
    assert runner.spent == sum(pace.requests[:2])
    assert outcome.estimate_rps == pytest.approx(pace.rate_rps, rel=0.02)


def test_runs_in_which_leader_and_other_met_all_decide_nothing(pace):
    all_met = tuple((n // BATCHES,) * BATCHES for n in pace.requests)
    assert not raced(Formula(8.0), dataclasses.replace(pace, rate_rps=1.0, met=all_met)).lost
    assert not raced(
        Formula(8.0), dataclasses.replace(pace, rate_rps=1.0, met=(*all_met[:2], pace.met[2]))
    ).lost


def test_race_with_a_leader_of_which_more_requests_count_is_estimated(pace):
    """With sessions later requests arrive when earlier ones are answered."""
    met = tuple((1 + n // BATCHES,) * BATCHES for n in pace.requests)
    assert raced(Formula(9.0), dataclasses.replace(pace, met=met)).lost


def test_race_of_invalid_runs_decides_nothing(pace):
    assert not raced(Formula(1.0, valid=False), pace).lost


def test_pruning_threshold_survives_storage(pace):
    assert PruningThreshold.of_plain(vars(pace)) == pace


def ended_trial(number, key, attrs, pace=None):
    """A trial that has ended, as a study keeps it."""
    internal = {"slo_bench:key": key} | ({} if pace is None else {"slo_bench:leads": vars(pace)})
    trial = optuna.create_trial(
        state=TrialState.PRUNED, user_attrs=attrs, system_attrs=internal, params={}
    )
    trial.number = number
    return trial


@pytest.mark.parametrize("reason", ["failed", "infeasible"])
def test_leader_whose_search_fails_sets_no_pace(pace, reason):
    better = dataclasses.replace(pace, estimate_rps=2 * pace.estimate_rps)
    trials = [ended_trial(0, "a", {}, pace), ended_trial(1, "b", {}, better)]
    assert rivals_pace(trials, gpus=1) == better
    trials.append(ended_trial(2, "b:proved", {"proof": True, reason: "out of memory"}))
    assert rivals_pace(trials, gpus=1) == pace
    rows = rows_of(trials)
    assert {number: row.state for number, row in rows.items()} == {0: "lost", 1: reason}
    assert rows[1].reason == "out of memory"


def test_leader_has_what_the_search_of_its_capacity_found(pace):
    proof = ended_trial(2, "a:proved", {"proof": True, "requests": 900})
    proof.system_attrs["slo_bench:values"] = [3.5]
    rows = rows_of([ended_trial(0, "a", {"default": True, "requests": 200}, pace), proof])
    assert [(row.number, row.default, row.state, row.values) for row in rows.values()] == [
        (0, True, "finished", (3.5,))
    ]
    assert rows[0].requests == 900


def study_that_raced_on(pace, aim):
    """Three trials: two led, one lost closely; the last race put the loser first."""
    better = dataclasses.replace(pace, estimate_rps=1.1 * pace.estimate_rps)
    trials = [
        ended_trial(0, "a", {"default": True, "requests": 200}, pace),
        ended_trial(1, "b", {"requests": 200}, better),
        ended_trial(2, "c", {"lost": True, "close": True, "raced_rps": 4.2, "requests": 200}),
        ended_trial(3, "d", {"lost": True, "close": False, "raced_rps": 4.3, "requests": 200}),
    ]
    for trial, rps in zip(trials, (4.0, 4.4, 4.0, 4.0), strict=True):
        trial.system_attrs["slo_bench:values"] = [rps]
    assert [row.number for row in close_ones(trials, aim)] == [1, 2, 0]
    trials.append(ended_trial(4, "last race", {"last_race": {"trials": [1, 2, 0]}}))
    trials[-1].system_attrs["slo_bench:standings"] = [[2, 4.1, 900], [1, 4.05, 900], [0, 4.0, 500]]
    return trials


def test_former_leader_far_behind_does_not_race_on(pace):
    aim = prepared(Experiment(systems="sarathi"), TuneSettings()).aim
    lost = {"lost": True, "close": True, "requests": 200}
    trials = [
        ended_trial(0, "a", {}, pace),
        ended_trial(1, "b", {}, dataclasses.replace(pace, estimate_rps=9.0)),
        ended_trial(2, "c", lost | {"raced_rps": 7.5}),
    ]
    for trial, rps in zip(trials, (4.0, 9.0, 7.5), strict=True):
        trial.system_attrs["slo_bench:values"] = [rps]
    assert [row.number for row in close_ones(trials, aim)] == [1, 2]


def test_winner_of_the_last_race_leads_whatever_its_races_said(pace):
    aim = prepared(Experiment(systems="sarathi"), TuneSettings()).aim
    trials = study_that_raced_on(pace, aim)
    (row,) = to_prove(trials, aim, default=False)
    assert (row.number, row.values, row.requests) == (2, (4.1,), 900)
    failed = ended_trial(5, "c:proved", {"proof": 4.1, "failed": "out of memory"})
    assert [row.number for row in to_prove([*trials, failed], aim, default=False)] == [1]
    proved = ended_trial(5, "c:proved", {"proof": 4.1, "requests": 2000})
    proved.system_attrs["slo_bench:values"] = [3.6]
    assert to_prove([*trials, proved], aim, default=False) == []
    later = ended_trial(6, "e", {"requests": 200}, dataclasses.replace(pace, estimate_rps=5.0))
    later.system_attrs["slo_bench:values"] = [5.0]
    assert [row.number for row in to_prove([*trials, proved, later], aim, default=False)] == [6]
