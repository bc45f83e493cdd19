import numpy as np
import pytest

from slo_bench.workloads.errors import SloBenchError, UnknownNameError
from slo_bench.workloads.slo import SloSpec, parse_slo
from slo_bench.workloads.workload import Workload


def workload(n=6, **columns):
    return Workload(
        np.arange(n, dtype=float),
        np.full(n, 10),
        np.full(n, 5),
        class_index=np.arange(n) % 2,
        class_names=("chat", "code"),
        **columns,
    )


def applied(spec, seed=0, **columns):
    return spec.apply(workload(**columns), np.random.default_rng(seed))


def test_slo_applies_to_all_requests():
    with_slo = applied(parse_slo("ttft=1,tpot=0.15"))
    assert with_slo.ttft_slo_s.tolist() == [1.0] * 6
    assert with_slo.tpot_slo_s.tolist() == [0.15] * 6
    assert np.isinf(with_slo.e2e_slo_s).all()
    assert np.isinf(with_slo.deadline_s).all()


@pytest.mark.parametrize(
    "spec",
    [
        "ttft=1; code:ttft=3,e2e=60",
        {"ttft": 1, "code": {"ttft": 3, "e2e": "60"}},
        {"ttft_s": 1, "code": {"ttft_slo_s": 3, "e2e_s": 60}},
    ],
)
def test_slo_by_class(spec):
    with_slo = applied(parse_slo(spec))
    assert with_slo.ttft_slo_s.tolist() == [1, 3, 1, 3, 1, 3]
    assert with_slo.e2e_slo_s.tolist() == [np.inf, 60] * 3


def test_drawn_slo_bounds_stay_in_range_and_repeat():
    spec = parse_slo("e2e=uniform(1,350),ttft=choice(1,2,5),deadline=60")
    with_slo = applied(spec)
    assert ((with_slo.e2e_slo_s >= 1) & (with_slo.e2e_slo_s <= 350)).all()
    assert len(set(with_slo.e2e_slo_s)) == 6
    assert set(with_slo.ttft_slo_s) <= {1, 2, 5}
    assert with_slo.deadline_s.tolist() == [60] * 6
    assert applied(spec).e2e_slo_s.tobytes() == with_slo.e2e_slo_s.tobytes()
    assert applied(spec, seed=1).e2e_slo_s.tobytes() != with_slo.e2e_slo_s.tobytes()


def test_slo_scale_multiplies_every_bound():
    bounds_s = np.full(6, 4.0)
    with_slo = applied(parse_slo("ttft=1", slo_scale=0.5).scaled(3), e2e_slo_s=bounds_s)
    assert with_slo.ttft_slo_s.tolist() == [1.5] * 6
    assert with_slo.e2e_slo_s.tolist() == [6.0] * 6
    assert np.isinf(with_slo.tpot_slo_s).all()


@pytest.mark.parametrize("nothing", ["", None, {}, " ; "])
def test_empty_slo_keeps_that_of_the_workload(nothing):
    assert parse_slo(nothing) == SloSpec()
    assert applied(parse_slo(nothing), ttft_slo_s=np.full(6, 2.0)).ttft_slo_s.tolist() == [2.0] * 6


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("ttft=0", "positive but is 0"),
        ("ttft=-1", "positive but is -1"),
        ("ttft=nan", "finite"),
        ("ttft=inf", "finite"),
        ("ttft=fast", "number but is 'fast'"),
        ("ttft", "write ttft=1"),
        ("ttft=", "cannot read"),
        (":ttft=1", "class name is missing"),
        ("ttft=uniform(3,1)", "must not be below"),
        ("ttft=uniform(3)", "two bounds"),
        ("ttft=uniform(0,1)", "positive"),
        ("ttft=choice()", "write uniform"),
        ("ttft=normal(1,2)", "uniform"),
        ("ttft=1,ttft=2", "twice"),
        ({"ttft": True}, "finite|number"),
        ({"ttft": [1]}, "number"),
    ],
)
def test_malformed_slos_are_refused(spec, says):
    with pytest.raises(SloBenchError, match=says):
        parse_slo(spec)


def test_unknown_slo_key_is_refused_with_a_suggestion():
    with pytest.raises(UnknownNameError, match="did you mean ttft"):
        parse_slo("ttfs=1")


def test_unknown_slo_class_is_refused_with_a_suggestion():
    with pytest.raises(UnknownNameError, match="did you mean code"):
        applied(parse_slo("coed:ttft=1"))
    single = Workload(np.zeros(1), np.ones(1, int), np.ones(1, int))
    with pytest.raises(SloBenchError, match="no classes"):
        parse_slo("chat:ttft=1").apply(single, np.random.default_rng(0))


@pytest.mark.parametrize("scale", [0, -1, float("nan")])
def test_impossible_slo_scales_are_refused(scale):
    with pytest.raises(SloBenchError, match="slo_scale"):
        parse_slo("ttft=1", slo_scale=scale)


@pytest.mark.parametrize(
    ("with_units", "in_seconds"),
    [
        ("ttft=1s,tpot=80ms", "ttft=1,tpot=0.08"),
        ("ttft=1.5 s; chat:e2e=2min", "ttft=1.5; chat:e2e=120"),
        ("tpot=150000us,deadline=1h", "tpot=0.15,deadline=3600"),
        ("e2e=uniform(500ms,350s)", "e2e=uniform(0.5,350)"),
        ({"ttft": "350ms", "chat": {"tpot": "35e1ms"}}, "ttft=0.35; chat:tpot=0.35"),
    ],
)
def test_slo_bounds_take_units_of_time(with_units, in_seconds):
    assert parse_slo(with_units) == parse_slo(in_seconds)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("ttft=1m", "there is no unit m; write us, ms, s, min, h"),
        ("ttft=0ms", "must be positive"),
        ("ttft=1.2.3s", "number"),
        ("ttft=ms", "number"),
    ],
)
def test_slo_bounds_with_wrong_units_are_refused(spec, says):
    with pytest.raises(SloBenchError, match=says):
        parse_slo(spec)
