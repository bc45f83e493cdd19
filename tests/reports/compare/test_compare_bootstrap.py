"""Resampling and verdicts: exact where it can be, covering where it must."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.records.judging import Judged
from slo_bench.harness.core.records.request_records import Outcome, Records
from slo_bench.harness.results.rate_windows import RateWindow, rate_window
from slo_bench.harness.results.request_figures import Requests
from slo_bench.reports.compare.bootstrap import (
    block_count,
    block_length,
    draw_counts,
    estimates,
    holm,
    interval,
    p_value,
    replicate_figures,
    resample,
)
from slo_bench.reports.compare.results import RunSample, comparable, metrics_named
from slo_bench.workloads.errors import SloBenchError, UnknownNameError

METRICS = comparable()
ALL = tuple(METRICS.values())
COLUMNS = dataclasses.fields(Records)


def sample(n=400, seed=0, slow=1.0, correlated=False):
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1.0, n))
    service_s = np.full(n, 0.8 if correlated else 0.3) * slow
    work_s = np.concatenate([[0.0], np.cumsum((service_s - np.diff(arrival_s, prepend=0))[1:])])
    ttft_s = work_s - np.minimum.accumulate(work_s) + 0.1
    tpot_s = rng.gamma(20.0, 0.002, n) * slow
    tokens = rng.integers(2, 50, n)
    tokens[::7] = 1  # which have no TPOT
    records = dataclasses.replace(
        Records.empty(n),
        arrival_s=arrival_s,
        first_scheduled_s=arrival_s + ttft_s - 0.05,
        first_token_s=arrival_s + ttft_s,
        finish_s=arrival_s + ttft_s + tpot_s * (tokens - 1) + 0.01 * (tokens == 1),
        outcome=np.full(n, Outcome.FINISHED),
        output_tokens=tokens,
    )
    return RunSample(requests_of(records, ttft_s < 1.0), RateWindow(arrival_s[-1], 10.0))


def requests_of(records, met):
    n = len(records)
    judged = None if met is None else Judged(met, {})
    return Requests(records, judged, np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.bool_))


def slower(run):
    """All times after the arrival are 5 % longer."""
    records = run.requests.records
    times_s = {
        name: records.arrival_s + 1.05 * (getattr(records, name) - records.arrival_s)
        for name in ("first_token_s", "finish_s")
    }
    records = dataclasses.replace(records, **times_s)
    return RunSample(requests_of(records, run.requests.met), run.window)


def taken(run, rows):
    """Some requests of a run; from one arrival to the next the window lasts as long as it did
    there, and so does the makespan from one end of a request to the next.
    """
    columns = {c.name: getattr(run.requests.records, c.name)[rows] for c in COLUMNS}

    def lasts(moments_s, seconds):
        begin_s = max(moments_s) - seconds
        before_s = [
            max((t for t in moments_s if t < moments_s[row]), default=begin_s) for row in rows
        ]
        return sum(moments_s[row] for row in rows) - sum(before_s)

    arrivals_s = lasts([*run.requests.records.arrival_s], run.window.arrivals_s)
    makespan_s = lasts([*run.requests.records.finish_s], run.window.makespan_s)
    window = RateWindow(arrivals_s, makespan_s - arrivals_s)
    return RunSample(requests_of(Records(**columns), run.requests.met[rows]), window)


def test_estimates_equal_those_of_cells_csv():
    run = sample()
    by_metric = dict(zip(METRICS, estimates(run, ALL), strict=True))
    records, in_slo = run.requests.records, run.requests.met
    assert by_metric["attainment"] == in_slo.mean()
    assert by_metric["goodput"] == in_slo.sum() / run.window.arrivals_s
    assert by_metric["output_tokens"] == records.output_tokens.sum() / run.window.makespan_s
    assert by_metric["ttft_p99"] == np.quantile(records.ttft_s, 0.99)
    assert by_metric["tpot_mean"] == pytest.approx(np.nanmean(records.tpot_s))
    assert by_metric["weighted_turnaround"] > 1


@pytest.mark.parametrize("n", [40, 400])
def test_replicate_figures_are_those_of_the_drawn_blocks(n):
    run = sample(n)
    blocks = 10
    counts = draw_counts(blocks, 30, np.random.default_rng(1))
    figures = replicate_figures(run, ALL, counts)
    edges = np.linspace(0, n, blocks + 1).round().astype(int)
    for place in range(30):
        rows = np.concatenate(
            [
                np.tile(np.arange(edges[b], edges[b + 1]), int(counts[place, b]))
                for b in range(blocks)
            ]
        )
        drawn = taken(run, rows)
        assert figures[:, place] == pytest.approx(estimates(drawn, ALL), rel=1e-6)


def test_binned_values_give_nearly_the_same_quantiles():
    run = sample(60_000)
    metrics = metrics_named("ttft_p50,ttft_p90,ttft_p99,e2e_mean")
    once = replicate_figures(run, metrics, np.ones((1, 50)))
    assert once[:, 0] == pytest.approx(estimates(run, metrics), rel=1e-3)


def test_estimates_without_met_have_no_attainment():
    run = sample()
    blind = RunSample(requests_of(run.requests.records, None), run.window)
    assert math.isnan(estimates(blind, metrics_named("attainment"))[0])
    assert np.isnan(replicate_figures(blind, metrics_named("goodput"), np.ones((2, 4)))).all()


def test_block_length_grows_with_correlation():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=4000)
    walk = np.zeros(4000)
    for i in range(1, 4000):
        walk[i] = 0.98 * walk[i - 1] + noise[i]
    assert block_length(noise) < 10 < 60 < block_length(walk)
    assert block_length(np.ones(5)) == 1
    assert 1 <= block_count([sample(3)]) <= 3


def test_resample_of_equal_runs_never_differs():
    runs = [sample(seed=s) for s in range(3)]
    drawn = resample(runs, runs, ALL, paired=True, rng=np.random.default_rng(0), replicates=50)
    assert (drawn.a == drawn.b).all()
    assert (drawn.drawn_a == drawn.drawn_b).all()


def test_paired_resample_removes_common_variation():
    a = [sample(seed=s, correlated=True) for s in range(3)]
    b = [slower(r) for r in a]
    metrics = metrics_named("ttft_p99,ttft_mean")
    widths = []
    for paired in (True, False):
        drawn = resample(a, b, metrics, paired=paired, rng=np.random.default_rng(0))
        bounds = interval(drawn.drawn_b[0] - drawn.drawn_a[0], 0.95)
        widths.append(bounds.high - bounds.low)
    assert widths[0] < widths[1] / 3


def test_intervals_cover_zero_for_equal_systems():
    """Two systems that are the same, on other seeds: 95 % intervals of a queue at 0.8 load."""
    metrics = metrics_named("attainment,ttft_mean,ttft_p50")
    trials = 50
    missed = np.zeros(len(metrics))
    for trial in range(trials):
        a = [sample(400, seed=1000 + 10 * trial + s, correlated=True) for s in range(3)]
        b = [sample(400, seed=9000 + 10 * trial + s, correlated=True) for s in range(3)]
        rng = np.random.default_rng(trial)
        drawn = resample(a, b, metrics, paired=False, rng=rng, replicates=200)
        for index in range(len(metrics)):
            bounds = interval(drawn.drawn_b[index] - drawn.drawn_a[index], 0.95)
            missed[index] += not bounds.low <= 0 <= bounds.high
    assert (missed / trials <= 0.12).all(), missed
    assert missed.mean() / trials <= 0.08


def queued(arrival_s, service_s, slo_s=4.0):
    """One run on one server, with requests in SLO by their end-to-end latency."""
    free_s, finish_s = 0.0, np.zeros(len(arrival_s))
    for k, came_s in enumerate(arrival_s):
        finish_s[k] = free_s = max(came_s, free_s) + service_s[k]
    records = dataclasses.replace(
        Records.empty(len(arrival_s)),
        arrival_s=arrival_s,
        first_token_s=finish_s,
        finish_s=finish_s,
        outcome=np.full(len(arrival_s), Outcome.FINISHED),
        output_tokens=np.ones(len(arrival_s)),
    )
    met = finish_s - arrival_s < slo_s
    return RunSample(requests_of(records, met), rate_window(arrival_s, finish_s))


def test_one_run_each_of_equal_systems_on_the_same_requests_seldom_differs():
    """Service at a load of 0.64 that is drawn anew for each system: of all equal ones a fifth
    differed where blocks were as short as suits their spread, and their number was not considered.
    """
    metrics = metrics_named("attainment,goodput,e2e_mean,e2e_p99")
    trials = 150
    differ, slower_differ = np.zeros(len(metrics)), 0
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        arrival_s = rng.exponential(1.0, 300).cumsum()
        a, b = (queued(arrival_s, 0.64 * rng.exponential(1.0, 300)) for _ in range(2))
        slow = queued(arrival_s, 1.0 * rng.exponential(1.0, 300))
        drawn = resample([a], [b], metrics, paired=True, rng=rng, replicates=300)
        draws = drawn.drawn_b - drawn.drawn_a
        differ += [p_value(*pair) < 0.05 for pair in zip(drawn.b - drawn.a, draws, strict=True)]
        drawn = resample([a], [slow], metrics[:1], paired=True, rng=rng, replicates=300)
        difference = float(drawn.b[0] - drawn.a[0])
        slower_differ += p_value(difference, drawn.drawn_b[0] - drawn.drawn_a[0]) < 0.05
    assert (differ / trials <= 0.1).all(), differ
    assert differ.mean() / trials <= 0.07
    assert slower_differ / trials >= 0.7


def test_one_request_a_side_tells_nothing():
    a, b = (queued(np.zeros(1), np.array([seconds])) for seconds in (1.0, 5.0))
    metrics = metrics_named("attainment,e2e_mean")
    drawn = resample([a], [b], metrics, paired=True, rng=np.random.default_rng(1))
    draws = drawn.drawn_b - drawn.drawn_a
    for difference, alone in zip(drawn.b - drawn.a, draws, strict=True):
        assert math.isnan(p_value(difference, alone))
        assert math.isnan(interval(alone, 0.95).low)


def served(seed, gap_s=1.0, seconds=0.8):
    """One run on one server: 200 requests every `gap_s`, service times of a mean of `seconds`."""
    arrival_s = gap_s * np.arange(200.0)
    finish_s = np.zeros(200)
    for k, service_s in enumerate(np.random.default_rng(seed).gamma(8.0, seconds / 8, 200)):
        finish_s[k] = max(arrival_s[k], finish_s[k - 1] if k else 0.0) + service_s
    records = dataclasses.replace(
        Records.empty(200),
        arrival_s=arrival_s,
        first_token_s=finish_s,
        finish_s=finish_s,
        outcome=np.full(200, Outcome.FINISHED),
        output_tokens=np.ones(200),
    )
    return RunSample(requests_of(records, None), rate_window(arrival_s, finish_s))


@pytest.mark.parametrize("gap_s", [1.0, 0.0])
def test_throughput_of_one_seed_tells_only_what_its_run_can_tell(gap_s):
    """All requests finish, so that the makespan alone differs: by its last end, or as a whole."""

    def p(a, b):
        drawn = resample(
            [a], [b], metrics_named("throughput"), paired=True, rng=np.random.default_rng(1)
        )
        return p_value(float(drawn.b[0] - drawn.a[0]), drawn.drawn_b[0] - drawn.drawn_a[0])

    alike = [p(served(k, gap_s), served(1000 + k, gap_s)) for k in range(40)]
    assert np.mean(np.array(alike) < 0.05) <= 0.12
    assert p(served(1, gap_s), served(2, gap_s, seconds=1.6)) < 0.01


def test_goodput_of_other_arrivals_tells_only_what_one_run_can_tell():
    """All requests are in SLO, so that goodput is the rate at which each run's happened to come."""
    goodput = metrics_named("goodput")
    differ = 0
    for trial in range(40):
        runs = []
        for seed in (trial, 1000 + trial):
            arrival_s = np.random.default_rng(seed).exponential(1.0, 200).cumsum()
            run = served(seed)
            records = dataclasses.replace(
                run.requests.records, arrival_s=arrival_s, finish_s=arrival_s + 0.5
            )
            requests = requests_of(records, np.ones(200, dtype=np.bool_))
            runs.append([RunSample(requests, rate_window(arrival_s, records.finish_s))])
        drawn = resample(*runs, goodput, paired=False, rng=np.random.default_rng(1))
        draws = drawn.drawn_b[0] - drawn.drawn_a[0]
        differ += p_value(float(drawn.b[0] - drawn.a[0]), draws) < 0.05
    assert differ <= 5


def test_p_value_of_draws():
    draws = np.linspace(-1.0, 3.0, 1001)
    assert p_value(1.0, draws) == pytest.approx(0.5, abs=0.01)
    assert p_value(0.0, draws) == 1.0
    assert math.isnan(p_value(math.nan, draws))
    rng = np.random.default_rng(0)
    far = p_value(10.0, 10 + rng.normal(size=2000))
    assert 0 < far < 1e-10
    assert p_value(1.0, np.ones(999)) == pytest.approx(2 / 1000)
    assert math.isnan(interval(np.full(10, np.nan), 0.95).low)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, math.nan])[0] == 0.01


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_raises_p_values_and_keeps_their_order(p_values):
    adjusted = holm(p_values)
    assert all(0 <= p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    pairs = sorted(zip(p_values, adjusted, strict=True))
    assert [q for _, q in pairs] == sorted(q for _, q in pairs)


def test_metrics_named_finds_names_and_refuses_others():
    assert [m.short for m in metrics_named("goodput_rps, ttft_p99_s,attainment")] == [
        "goodput",
        "ttft_p99",
        "attainment",
    ]
    with pytest.raises(UnknownNameError, match="ttft_p99"):
        metrics_named("ttft_p98")
    for empty in ("", " ", ","):
        with pytest.raises(SloBenchError, match="no metric is named; known: attainment"):
            metrics_named(empty)
