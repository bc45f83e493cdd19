import math

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.policy import Bounds
from slo_bench.tuner.search.dimension import Dimension, of_bounds, of_values, parse
from slo_bench.workloads.errors import SloBenchError


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("0..10", Dimension("x", 0, 10)),
        ("1..2000", Dimension("x", 1, 2000, log=True)),  # three orders of magnitude
        ("2..64:log", Dimension("x", 2, 64, log=True)),
        ("0:6:2", Dimension("x", 0.0, 6.0, step=2.0)),
        ("1,2,3", Dimension("x", 1, 3, whole=True, step=1)),
        ("1,2,4", Dimension("x", choices=(1, 2, 4))),
        ("edf,sjf", Dimension("x", choices=("edf", "sjf"))),
        ("true,false", Dimension("x", choices=(True, False))),
    ],
)
def test_parse_dimension_reads_ranges_and_lists(text, dimension):
    assert parse("x", text) == dimension


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("5..1", "from 5 down to 1"),
        ("0..8:log", "start above 0"),
        ("a..b", "cannot read the range 'a..b' of x"),
        ("1..9:lin", "cannot read the range"),
        ("1,,2", "cannot read the values"),
        ("1,1", "value 1 twice"),
        ("6:0:2", "has no values"),
    ],
)
def test_parse_dimension_refuses_malformed_text(text, problem):
    with pytest.raises(SloBenchError, match=problem):
        parse("x", text)


def test_parse_dimension_keeps_whole_numbers():
    with pytest.raises(SloBenchError, match="takes whole numbers"):
        parse("x", "0.5..4", whole=True)
    assert parse("x", "2:6:2", whole=True).points(9) == (2, 4, 6)


def test_parse_dimension_refuses_open_ranges():
    assert of_bounds("x", Bounds(low=0.0)) is None
    assert of_bounds("x", Bounds(file=True)) is None
    assert of_bounds("x", Bounds(1, 1e6, whole=True)).log
    assert of_bounds("x", Bounds(choices=(True, False))).choices == (True, False)


ranges = st.builds(
    lambda low, width, whole, log: Dimension("x", low, low + width, whole, log),
    st.integers(1, 50),
    st.integers(1, 5000),
    st.booleans(),
    st.booleans(),
)
stepped = st.builds(
    lambda low, step, count: of_values("x", [low + step * k for k in range(count)]),
    st.integers(-5, 5),
    st.integers(1, 4),
    st.integers(2, 9),
)
words = st.builds(
    lambda values: Dimension("x", choices=tuple(values)),
    st.lists(st.sampled_from("abcdef"), min_size=1, unique=True),
)


@given(st.one_of(ranges, stepped, words), st.integers(0, 2**31))
def test_dimension_holds_its_suggestions_and_points(dimension, seed):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    value = dimension.suggest(study.ask())
    assert dimension.holds(value)
    assert all(dimension.holds(point) for point in dimension.points(5))
    if math.isfinite(dimension.size) and dimension.size <= 5:
        assert len(dimension.points(5)) == dimension.size
        assert value in dimension.points(5)


@pytest.mark.parametrize(
    ("text", "value", "neighbours"),
    [
        ("1,2,4", 2, [1, 4]),
        ("4,1,2", 1, [2]),
        ("0:6:2", 6, [4]),
        ("0..8", 4.0, [2.0, 6.0]),
        ("0..8", 3.3, [2.0, 4.0]),
        ("edf,sjf,fcfs", "sjf", ["edf", "fcfs"]),
        ("true,false", True, [False]),
    ],
)
def test_neighbours_are_the_next_points_of_numbers_and_all_other_words(text, value, neighbours):
    assert parse("x", text).neighbours(value, max_points=5) == neighbours
