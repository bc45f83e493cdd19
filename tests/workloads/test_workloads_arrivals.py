import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo_bench.workloads.arrivals import Gamma, Poisson, parse_arrivals
from slo_bench.workloads.errors import SloBenchError, UnknownNameError
from slo_bench.workloads.streams import Streams

PROCESSES = [
    "constant",
    "poisson",
    "gamma(cv=2)",
    "gamma(shape=4)",
    "weibull(0.7)",
    "onoff(on_s=10,off_s=20)",
    "onoff(on_s=5,off_s=5,phases=random)",
    "periodic(period_s=100,amplitude=0.8)",
    "ramp(1,3,over_s=50)",
    "ramp(1,3)",
    "steps(1,4,0,every_s=20)",
    "steps(1,4)",
]


def rng(seed=0):
    return Streams(seed).rng("arrivals")


@pytest.mark.parametrize("text", PROCESSES)
def test_arrivals_have_the_offered_mean_rate(text):
    times_s = parse_arrivals(text).times_s(5.0, rng(3), requests=60_000)
    assert len(times_s) / times_s[-1] == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("text", PROCESSES)
def test_arrivals_of_a_duration_number_rate_times_duration(text):
    times_s = parse_arrivals(text).times_s(5.0, rng(4), duration_s=12_000)
    assert times_s[-1] < 12_000
    assert len(times_s) == pytest.approx(60_000, rel=0.05)


@pytest.mark.parametrize("text", PROCESSES)
@given(rate=st.floats(0.01, 1000), seed=st.integers(0, 2**40), n=st.integers(1, 300))
@settings(max_examples=15, deadline=None)
def test_arrival_times_are_sorted_and_not_negative(text, rate, seed, n):
    times_s = parse_arrivals(text).times_s(rate, rng(seed), requests=n)
    assert len(times_s) == n
    assert times_s[0] >= 0
    assert (np.diff(times_s) >= 0).all()
    again = parse_arrivals(text).times_s(rate, rng(seed), requests=n)
    assert times_s.tobytes() == again.tobytes()


@pytest.mark.parametrize("text", ["constant", "poisson", "gamma(cv=2)", "weibull(0.7)"])
def test_arrivals_at_another_rate_are_scaled_in_time(text):
    process = parse_arrivals(text)
    slow = process.times_s(2.0, rng(), requests=1000)
    fast = process.times_s(8.0, rng(), requests=1000)
    np.testing.assert_allclose(slow, 4 * fast)


@pytest.mark.parametrize("text", ["poisson", "gamma(cv=3)", "weibull(0.5)"])
def test_longer_arrivals_begin_like_shorter_ones(text):
    process = parse_arrivals(text)
    by_count = process.times_s(3.0, rng(), requests=500)
    by_time = process.times_s(3.0, rng(), duration_s=1000.0)
    n = min(len(by_count), len(by_time))
    np.testing.assert_array_equal(by_count[:n], by_time[:n])


def test_poisson_counts_have_their_variance():
    counts = [len(Poisson().times_s(10, rng(seed), duration_s=20)) for seed in range(300)]
    assert np.mean(counts) == pytest.approx(200, abs=3)
    assert np.var(counts) == pytest.approx(200, rel=0.35)


def test_gamma_gaps_have_the_asked_variation():
    gaps = np.diff(Gamma(cv=2).times_s(1.0, rng(), requests=200_000))
    assert gaps.std() / gaps.mean() == pytest.approx(2, rel=0.03)


def test_onoff_is_silent_when_off():
    times_s = parse_arrivals("onoff(on_s=10,off_s=20)").times_s(5.0, rng(), requests=5000)
    assert (times_s % 30 <= 10 + 1e-6).all()


def test_steps_share_the_load_by_level():
    times_s = parse_arrivals("steps(1,3,every_s=100)").times_s(5.0, rng(), requests=50_000)
    low = (times_s % 200 < 100).mean()
    assert low == pytest.approx(0.25, abs=0.01)


def test_periodic_peaks_in_the_first_half():
    times_s = parse_arrivals("periodic(period_s=100)").times_s(5.0, rng(), requests=50_000)
    assert (times_s % 100 < 50).mean() == pytest.approx(0.5 + 0.5 / np.pi, abs=0.01)


def test_constant_arrivals_by_hand():
    times_s = parse_arrivals("constant").times_s(2.0, rng(), duration_s=2.0)
    assert times_s.tolist() == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("poison", "did you mean poisson"),
        ("gamma", "either cv or shape"),
        ("gamma(cv=-1)", "gamma cv must lie in 0.001..100"),
        ("gamma(cv=1e308)", "gamma cv must lie in 0.001..100"),
        ("gamma(shape=1e-320)", "gamma shape must lie in 0.0001.."),
        ("gamma(cv=nan)", "finite"),
        ("gamma(cw=2)", "did you mean cv"),
        ("onoff(10)", "lacks off_s"),
        ("onoff(on_s=ten,off_s=1)", "must be a number but is 'ten'"),
        ("onoff(1,2,phases=maybe)", "fixed"),
        ("periodic(60,amplitude=2)", "0..1"),
        ("steps()", "levels"),
        ("steps(0,0)", "above zero"),
        ("weibull(0)", "0.1..100"),
        ("concurrency(0)", "at least 1"),
        ("concurrency(1.5)", "whole number"),
        ("poisson(", "cannot read|not closed"),
        ("", "cannot read"),
        ("gamma(1,2,3)", "takes"),
        ("gamma(cv=1,cv=2)", "twice"),
        ("gamma(cv=2,3)", "needs a key"),
    ],
)
def test_malformed_arrival_processes_are_refused(text, says):
    with pytest.raises(SloBenchError, match=says):
        parse_arrivals(text)


@pytest.mark.parametrize("rate", [0.0, -3.0, float("nan"), float("inf")])
def test_arrivals_refuse_impossible_rates(rate):
    with pytest.raises(SloBenchError, match="rate_rps"):
        Poisson().times_s(rate, rng(), requests=1)


def test_arrivals_of_a_span_without_requests_are_refused():
    with pytest.raises(SloBenchError, match="no request arrives"):
        Poisson().times_s(0.001, rng(), duration_s=0.001)


def test_unknown_arrival_process_is_an_unknown_name_error():
    with pytest.raises(UnknownNameError):
        parse_arrivals("lognormal(1)")
