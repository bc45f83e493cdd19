"""The model's error of a difference: common errors cancel, others do not."""

import numpy as np
import pytest

from slo_bench.reports.compare.model_error import (
    ErrorDraws,
    crossings_rps,
    difference_band,
    error_draws,
    holds,
    mean_draws,
    rate_draws,
)
from slo_bench.workloads.errors import SloBenchError

SPEED = np.linspace(0.5, 1.5, 40)  # of the real server over the simulated one
BASIS = "vllm, kernel tables, a100-80g, tp 1, seen"


def row(draws, basis=BASIS, **columns):
    return {
        "cell": "vllm_rate-1",
        "model": "llama-3.1-8b",
        "band_basis": basis,
        "band_level": 0.9,
        "band_draws": " ".join(f"{value:.4g}" for value in draws),
        **columns,
    }


def capacity(rps, basis=BASIS):
    """The rate that a system carries whose rate is in proportion to the server's speed."""
    rates = np.arange(0.5, 20.0, 0.5)
    draws = {
        float(rate): error_draws(
            row(np.clip(1.9 - rate / (rps * SPEED), 0, 1), basis), "attainment"
        )
        for rate in rates
    }
    return rate_draws(draws, 0.9)


def test_an_error_that_both_systems_share_cancels_in_their_difference():
    a, b = capacity(5.0), capacity(6.0)
    level_low, level_high = np.quantile(b.values, (0.05, 0.95))
    assert level_low < np.quantile(a.values, 0.95)  # the levels overlap
    band = difference_band(a, b)
    assert band.high - band.low < (level_high - level_low) / 4
    assert holds(1.0, band)
    assert holds(-1.0, difference_band(b, a))


def test_an_error_of_each_system_alone_does_not_cancel():
    a, b = capacity(5.0), capacity(6.0, BASIS.replace("vllm", "sglang"))
    band = difference_band(a, b)
    assert band.low < 0 < band.high
    assert holds(1.0, band) is False
    far = capacity(19.0, BASIS.replace("vllm", "sglang"))
    assert holds(1.0, difference_band(a, far))


def test_errors_that_leave_no_difference_tell_nothing():
    flat = ErrorDraws("s", 0.9, np.ones(40))
    some = ErrorDraws("s", 0.9, np.where(np.arange(40) < 25, 0.8, 1.0))
    assert difference_band(flat, flat) is None
    assert difference_band(flat, None) is None
    assert holds(-1.0, difference_band(flat, some))
    assert difference_band(flat, ErrorDraws("s", 0.9, np.r_[np.ones(25), np.zeros(15)])) is None


def test_errors_beyond_the_rates_that_both_tried_tell_nothing():
    a = ErrorDraws("s", 0.9, np.r_[np.full(20, 5.0), np.full(20, 1.0)], low=1.0, high=9.0)
    b = ErrorDraws("s", 0.9, np.r_[np.full(20, 4.0), np.full(20, 1.2)], low=1.2, high=9.0)
    assert difference_band(a, b).high == pytest.approx(-1.0)


def test_latency_by_the_models_error_lies_between_the_ends_of_its_band():
    cell = row(np.ones(40), ttft_p99_s=2.0, band_low_ttft_p99_s=1.0, band_high_ttft_p99_s=4.0)
    draws = error_draws(cell, "ttft_p99_s").values
    assert np.interp((0.05, 0.95), (np.arange(40) + 0.5) / 40, draws) == pytest.approx(
        [1.0, 4.0], rel=0.05
    )
    assert error_draws(cell, "tpot_p99_s") is None


def test_draws_of_a_row_without_bands_are_unknown_and_damaged_ones_are_refused():
    assert error_draws({"cell": "a"}, "attainment") is None
    assert error_draws(row([]), "attainment") is None
    with pytest.raises(SloBenchError, match="band_draws of cell vllm_rate-1 must be numbers"):
        error_draws(row([]) | {"band_draws": "1 x"}, "attainment")


def test_mean_draws_need_one_basis():
    a, b = (error_draws(row([share] * 3), "attainment") for share in (0.8, 1.0))
    assert mean_draws([a, b]).values == pytest.approx([0.9] * 3)
    assert mean_draws([a, None]) is None
    assert mean_draws([a, error_draws(row([1.0] * 3, "other"), "attainment")]) is None


@pytest.mark.parametrize(
    ("attainment_by_rate", "rate_rps"),
    [({1.0: 1.0, 2.0: 0.8}, 1.5), ({2.0: 0.8}, 1.0), ({1.0: 0.95, 3.0: 0.9}, 3.0)],
)
def test_crossings_rps_are_linear_between_rates(attainment_by_rate, rate_rps):
    shares = np.array([*attainment_by_rate.values()])[:, None]
    assert crossings_rps([*attainment_by_rate], shares, 0.9) == pytest.approx([rate_rps])


@pytest.mark.parametrize(
    "damage", [{"band_draws": " "}, {"band_draws": "0.5 inf"}, {"band_level": 2.0}]
)
def test_draws_that_are_no_shares_are_refused(damage):
    with pytest.raises(SloBenchError, match="must be shares from 0 to 1"):
        error_draws(row([0.5, 0.6]) | damage, "attainment")
