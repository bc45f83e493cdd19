"""Workloads of several models, each with requests of its own."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.models import expanded, shape_of
from slo_bench.workloads.slo import parse_slo
from slo_bench.workloads.source import load_source
from slo_bench.workloads.workload import Workload


def _draw(
    models: str, rate_rps: float = 9.0, duration_s: float = 7200.0, seed: int = 3
) -> Workload:
    return load_source("arena", models=models).make(
        rate_rps=rate_rps, duration_s=duration_s, seed=seed
    )


def _times(workload: Workload, model: int) -> np.ndarray:
    return workload.arrival_s[workload.model_index == model]


def test_fleet_has_the_features_of_production_traces() -> None:
    """Prism, §3.1: long tail, idle gaps, bursts, swings."""
    workload = _draw("fleet(llama-3.1-8b*18)", duration_s=4 * 3600)
    requests_by_model = np.sort(np.bincount(workload.model_index, minlength=18))
    assert 0.15 < requests_by_model[: int(0.6 * 18)].sum() / requests_by_model.sum() < 0.3
    cvs, gaps, swings = [], [], []
    for model in range(18):
        times = _times(workload, model)
        minutes = np.bincount((times // 60).astype(int), minlength=240)
        cvs.append(minutes.std() / minutes.mean())
        gaps.append((np.diff(times) > 30).sum() / 4)  # an hour
        pairs = minutes[:-1] > 0
        swings.append((minutes[1:][pairs] >= 5 * minutes[:-1][pairs]).sum())
    assert np.median(cvs) > 1
    assert min(gaps) > 5
    assert min(swings) > 0


def test_fleet_models_have_their_shares() -> None:
    workload = _draw("fleet(a, b, c, exponent=1, idle_s=20, active_s=20)", duration_s=200_000)
    shares = np.bincount(workload.model_index) / len(workload)
    np.testing.assert_allclose(shares, np.array([6, 3, 2]) / 11, atol=0.02)
    assert len(workload) == pytest.approx(9 * 200_000, rel=0.03)


def test_fleet_without_spells_and_swings_is_poisson() -> None:
    workload = _draw("fleet(a, b, idle_s=0, swing=1)", duration_s=20_000)
    counts = np.bincount((workload.arrival_s // 100).astype(int))
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.25)


def test_fleet_spells_do_not_depend_on_the_rate() -> None:
    slow, fast = (_draw("fleet(a, b)", rate) for rate in (5.0, 50.0))
    busy = set((_times(slow, 0) // 10).astype(int))
    busier = set((_times(fast, 0) // 10).astype(int))
    assert len(busy - busier) < 0.1 * len(busy)


def test_fleet_has_the_asked_number_of_requests() -> None:
    source = load_source("arena", models="fleet(a, b)")
    workload = source.make(rate_rps=3.0, requests=500, seed=0)
    again = source.make(rate_rps=3.0, requests=500, seed=0)
    assert len(workload) == 500
    assert (workload.arrival_s == again.arrival_s).all()
    assert (workload.model_index == again.model_index).all()


def test_fleet_copies_of_a_model_are_expanded() -> None:
    assert expanded(("a*3", "b", "c*2")) == ("b", "a#1", "c#1", "a#2", "c#2", "a#3")
    assert shape_of("llama-3.1-8b#12") == "llama-3.1-8b"


def test_fleet_maps_models_of_a_trace(tmp_path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["arrival_s,prompt_tokens,output_tokens,model"]
    rows += [f"{k},10,5,{name}" for k, name in enumerate("xyzyyz")]
    trace.write_text("\n".join(rows))
    workload = load_source(trace, models="assign(big, small)").make()
    assert workload.model_names == ("big#1", "small#1", "big#2")
    assert workload.model_index.tolist() == [2, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("models", "settings", "says"),
    [
        ("fleet(a, swing=0.5)", {}, "at least 1"),
        ("fleet(a, idle_s=-1)", {}, "negative"),
        ("fleet(a, active_s=0)", {}, "positive"),
        ("fleet(exponent=1)", {}, "one model"),
        ("fleet(a*0)", {}, "cannot read"),
        ("fleet(a, speed=2)", {}, "setting of fleet"),
        ("fleet(a)", {"arrivals": "gamma(cv=2)"}, "arrivals of its own"),
        ("assign()", {}, "write assign"),
    ],
)
def test_malformed_fleets_are_refused(models, settings, says) -> None:
    with pytest.raises(SloBenchError, match=says):
        load_source("arena", models=models, **settings)


def test_trace_without_models_refuses_a_mapping() -> None:
    with pytest.raises(SloBenchError, match="names no models"):
        load_source("arena", models="assign(a)").make(rate_rps=1, requests=5)


def test_slo_by_model_of_a_fleet() -> None:
    slo = parse_slo("ttft=1; a#2:ttft=0.2,tpot=0.03")
    workload = load_source("arena", models="fleet(a*2)").make(rate_rps=5, requests=200, slo=slo)
    second = workload.model_index == 1
    assert set(workload.ttft_slo_s[second]) == {0.2}
    assert set(workload.ttft_slo_s[~second]) == {1.0}
    both = parse_slo("a:ttft=0.3").apply(workload, np.random.default_rng(0))
    assert set(both.ttft_slo_s) == {0.3}
    with pytest.raises(SloBenchError, match="a#3"):
        parse_slo("a#3:ttft=1").apply(workload, np.random.default_rng(0))
