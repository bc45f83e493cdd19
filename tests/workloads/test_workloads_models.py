import numpy as np
import pytest

from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.models import parse_models
from slo_bench.workloads.source import load_source


def draw(models, requests=40_000, rate_rps=10.0, **settings):
    source = load_source("alpaca", models=models, **settings)
    return source.make(rate_rps=rate_rps, requests=requests, seed=5)


def test_zipf_models_have_their_popularity():
    workload = draw("zipf(4, exponent=1)")
    shares = np.bincount(workload.model_index) / len(workload)
    np.testing.assert_allclose(shares, np.array([12, 6, 4, 3]) / 25, atol=0.01)
    assert workload.model_names == ("model-0", "model-1", "model-2", "model-3")


def test_named_models_are_in_order_of_popularity():
    workload = draw("zipf(llama-3-8b, opt-13b, exponent=0)")
    assert workload.model_names == ("llama-3-8b", "opt-13b")
    assert workload.model_index.mean() == pytest.approx(0.5, abs=0.01)


def test_models_fall_idle_for_spells():
    busy = draw("zipf(8)")
    idle = draw("zipf(8, active_s=30, idle_s=300)")
    assert (idle.arrival_s == busy.arrival_s).all()

    def longest_gap_s(workload, model):
        return np.diff(workload.arrival_s[workload.model_index == model]).max()

    assert longest_gap_s(idle, 0) > 60 > longest_gap_s(busy, 0)


def test_turns_of_a_session_have_one_model():
    workload = draw("zipf(5)", requests=2000, sessions="sessions(turns=uniform(2,4))")
    for session in range(100):
        assert len(set(workload.model_index[workload.session == session])) <= 1
    assert len(set(workload.model_index)) == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("zip(3)", "did you mean zipf"),
        ("zipf", "lacks count"),
        ("zipf(0)", "at least 1"),
        ("zipf(2, exponent=-1)", "negative"),
        ("zipf(2, idle_s=-1)", "negative"),
        ("zipf(2, active_s=0)", "positive"),
        ("zipf(a, a)", "no name twice"),
        ("zipf(a, b, count=3)", "number of names"),
    ],
)
def test_malformed_models_are_refused(text, says):
    with pytest.raises(SloBenchError, match=says):
        parse_models(text)
