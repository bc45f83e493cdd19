from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.workloads.errors import SloBenchError, UnknownNameError
from slo_bench.workloads.lengths import (
    MixtureComponent,
    PairLengths,
    Quantiles,
    mean_tokens,
    normal_cumulative,
    normal_quantile,
    pair,
    parse_lengths,
)

GRID = (np.arange(100_000) + 0.5) / 100_000


@given(st.floats(1e-12, 1 - 1e-12))
def test_normal_quantile_agrees_with_the_standard_library(u):
    assert normal_quantile(np.array([u]))[0] == pytest.approx(NormalDist().inv_cdf(u), abs=2e-6)


@given(st.floats(-8, 8))
def test_normal_cumulative_agrees_with_the_standard_library(z):
    assert normal_cumulative(np.array([z]))[0] == pytest.approx(NormalDist().cdf(z), abs=1e-7)


@pytest.mark.parametrize("text", ["512", "fixed(512)", "fixed(tokens=512)"])
def test_fixed_lengths_are_constant(text):
    assert (parse_lengths(text).at(GRID) == 512).all()


def test_uniform_lengths_include_both_ends_equally():
    tokens = parse_lengths("uniform(1,4)").at(GRID)
    assert np.bincount(tokens).tolist() == [0, 25_000, 25_000, 25_000, 25_000]


def test_geometric_lengths_have_their_mean():
    assert mean_tokens(parse_lengths("geometric(mean=4)")) == pytest.approx(4, rel=0.01)
    assert (parse_lengths("geometric(1)").at(GRID) == 1).all()


def test_lognormal_lengths_by_median_and_by_mean():
    by_median = parse_lengths("lognormal(median=300, sigma=0.8)")
    assert np.median(by_median.at(GRID)) == 300
    assert mean_tokens(by_median) == pytest.approx(300 * np.exp(0.32), rel=0.01)
    assert mean_tokens(parse_lengths("lognormal(mean=300, sigma=0.8)")) == pytest.approx(
        300, rel=0.01
    )
    assert parse_lengths("lognormal(median=300, sigma=2, max=400)").at(GRID).max() == 400


def test_quantile_lengths_are_log_linear_between_knots():
    lengths = parse_lengths("quantiles(0=10, 0.5=100, 1=1000)")
    assert lengths.at(np.array([0, 0.25, 0.5, 0.75, 1.0])).tolist() == [10, 32, 100, 316, 1000]


def test_mixture_lengths_follow_their_weights():
    tokens = parse_lengths("mixture(3, fixed(10), 1, uniform(100,200))").at(GRID)
    assert (tokens == 10).mean() == pytest.approx(0.75, abs=1e-4)
    assert tokens[tokens > 10].min() == 100
    assert tokens[tokens > 10].max() == 200


@pytest.mark.parametrize("rho", [-0.8, -0.3, 0.0, 0.5, 0.9])
def test_rank_correlation_is_that_of_spearman(rho):
    part = MixtureComponent(
        parse_lengths("lognormal(median=5000)"), parse_lengths("lognormal(median=900)"), 1, rho
    )
    drawn = PairLengths((part,)).draw(40_000, np.random.default_rng(1))
    ranks = [np.argsort(np.argsort(c)) for c in (drawn.prompt_tokens, drawn.output_tokens)]
    assert np.corrcoef(*ranks)[0, 1] == pytest.approx(rho, abs=0.02)


def test_rank_correlation_keeps_both_distributions():
    lengths = [parse_lengths("uniform(1,100)"), parse_lengths("uniform(1,100)")]
    drawn = PairLengths((MixtureComponent(*lengths, rank_correlation=0.7),)).draw(
        100_000, np.random.default_rng(2)
    )
    counts = np.bincount(drawn.output_tokens, minlength=101)[1:]
    assert counts.min() > 800
    assert counts.max() < 1200


def test_longer_draw_of_lengths_begins_like_a_shorter_one():
    lengths = pair(parse_lengths("lognormal(median=50)"), parse_lengths("uniform(1,9)"))
    short = lengths.draw(10, np.random.default_rng(5))
    long = lengths.draw(1000, np.random.default_rng(5))
    assert short.prompt_tokens.tolist() == long.prompt_tokens[:10].tolist()
    assert short.output_tokens.tolist() == long.output_tokens[:10].tolist()


def test_total_length_is_kept_within_its_limit():
    part = MixtureComponent(parse_lengths("uniform(1,5000)"), parse_lengths("uniform(1,5000)"))
    drawn = PairLengths((part,), max_total_tokens=4096).draw(5000, np.random.default_rng(0))
    assert (drawn.prompt_tokens + drawn.output_tokens).max() <= 4096
    assert min(drawn.prompt_tokens.min(), drawn.output_tokens.min()) >= 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fixed(0)", "at least 1"),
        ("0", "at least 1"),
        ("-5", "at least 1"),
        ("nan", "finite|length distribution"),
        ("uniform(5,1)", "at least low=5"),
        ("uniform(1.5,3)", "whole number"),
        ("lognormal(sigma=1)", "median or mean"),
        ("lognormal(median=3,sigma=-1)", "sigma must lie in 0..10"),
        ("lognormal(1e308)", "median or mean must be at most 2,147,483,648"),
        ("lognormal(9,1e308)", "sigma must lie in 0..10"),
        ("lognormal(median=-3)", "positive"),
        ("geometric(0.5)", "at least 1"),
        ("quantiles(0.5=3)", "two at least|rise from 0"),
        ("quantiles(0=5,1=3)", "must not decrease"),
        ("quantiles(1,2)", "write quantiles"),
        ("mixture(1)", "write mixture"),
        ("mixture(0, fixed(1))", "positive"),
        ("mixture()", "one at least"),
    ],
)
def test_malformed_lengths_are_refused(text, says):
    with pytest.raises(SloBenchError, match=says):
        parse_lengths(text)


def test_unknown_length_distribution_is_refused_with_a_suggestion():
    with pytest.raises(UnknownNameError, match="did you mean lognormal"):
        parse_lengths("lognorml(median=3)")


def test_quantile_lengths_need_both_ends():
    with pytest.raises(SloBenchError, match="rise from 0 to 1"):
        Quantiles((0.1, 1), (1, 2))


def test_prompt_lengths_drawn_alone_are_the_same():
    whole = PairLengths(
        (
            MixtureComponent(
                parse_lengths("lognormal(6, 1)"), parse_lengths("uniform(1, 900)"), 2.0, 0.6
            ),
            MixtureComponent(parse_lengths(40), parse_lengths(7), max_output_tokens=64),
        ),
        max_total_tokens=1200,
    )
    pairs = whole.draw(500, np.random.default_rng(3))
    alone = whole.prompts_alone().draw(500, np.random.default_rng(3))
    assert alone.prompt_tokens.tolist() == pairs.prompt_tokens.tolist()
    assert set(alone.output_tokens.tolist()) == {1}
