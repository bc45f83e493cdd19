"""Fits: coefficients that are found again, errors on rows kept out, formulas as step times."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.predictors.profiles.fit_profile import coefficients, fit
from slo_bench.predictors.profiles.formulas import FORMULAS, profiled_step_time
from slo_bench.predictors.profiles.least_squares import non_negative
from slo_bench.predictors.profiles.observations import observations
from slo_bench.predictors.profiles.profile_format import Fitted, Profile, table_of
from slo_bench.predictors.profiles.step_time_table import Host
from slo_bench.workloads.errors import SloBenchError

BASE = Profile("llama-3-8b", "a100-80g")
NINE = {
    "c0": 1.4,
    "c1": 0.7,
    "c2": 0.9,
    "c2_mixed": 1.8,
    "c3": 2.0,
    "c4": 1.2,
    "c5_s": 1e-6,
    "c6_s": 4e-6,
    "c7_s": 2e-4,
    "c8_s": 7e-4,
}
ASCENDRA = {"c1": 0.3, "c2": 0.6, "c3": 0.2, "c4": 0.7, "c5_s": 0.004}
PHASES = {
    f"{phase}_{x}": v
    for phase in ("prefill", "small", "large")
    for x, v in zip(
        "abc",
        {
            "prefill": (0.02, 1.4e-4, 8e-9),
            "small": (0.023, 6e-7, 6e-5),
            "large": (0.02, 5e-7, 1.2e-4),
        }[phase],
        strict=True,
    )
} | {"large_from": 95.0}


def measured(formula: str, values: dict[str, float]) -> Profile:
    """Steps whose times the formula itself has made."""
    step_time = FORMULAS[formula].step_time(BASE, values, Host())
    rows = []
    for chunks, chunk, before, n, kv in [
        *((0, 0, 0, n, kv) for n in (1, 4, 16, 64, 128) for kv in (16, 128, 1024, 2048)),
        *((k, c, x, 0, 0) for k in (1, 3) for c in (16, 128, 512, 2048) for x in (0, 1024)),
        *((1, c, x, n, 512) for c in (16, 256, 1024) for x in (0, 2048) for n in (1, 8, 64)),
    ]:
        seconds = step_time.step_s(n, n * kv, [(before, chunk)] * chunks)
        rows.append((chunks, chunk, before, n, kv, 1e6 * seconds))
    return dataclasses.replace(BASE, tables={"steps": table_of("steps", rows)})


@pytest.mark.parametrize(("formula", "values"), [("nine", NINE), ("ascendra", ASCENDRA)])
def test_formula_fits_its_own_step_times(formula, values):
    profile = measured(formula, values)
    refit = fit(profile)
    quality = {q.formula: q for q in refit.qualities}[formula]
    assert quality.held_out_percent < 0.01
    assert quality.extrapolated_percent < 0.01
    assert refit.profile.best == formula
    refitted = profiled_step_time(refit.profile, Host()).model
    truth = FORMULAS[formula].step_time(BASE, values, Host())
    for step in ((1, 900, ()), (100, 90000, ()), (0, 0, [(0, 700)]), (9, 9000, [(300, 99)])):
        assert refitted.step_s(*step) == pytest.approx(truth.step_s(*step), rel=1e-4)


def test_fit_prefers_the_formula_of_the_data():
    errors = {q.formula: q.held_out_percent for q in fit(measured("nine", NINE)).qualities}
    assert errors["ascendra"] > 1
    assert errors["nine"] < errors["ascendra"]


def test_fitted_coefficients_are_never_negative():
    observed = observations(measured("ascendra", ASCENDRA))
    seconds = np.random.default_rng(0).lognormal(0, 0.2, len(observed)) * observed.seconds
    noisy = dataclasses.replace(observed, seconds=seconds)
    assert min(coefficients(BASE, "nine", noisy).values()) >= 0


@given(seed=st.integers(0, 2**32 - 1))
def test_non_negative_least_squares_meets_its_optimality_conditions(seed):
    rng = np.random.default_rng(seed)
    terms, values = rng.normal(size=(20, 5)), rng.normal(size=20)
    x = non_negative(terms, values)
    gain = terms.T @ (values - terms @ x)
    assert (x >= 0).all()
    assert (gain < 1e-6).all()  # nothing at zero would help
    assert np.abs(gain[x > 0]).max(initial=0) < 1e-6  # the others are at their best


def test_fit_of_too_few_steps_is_refused():
    few = table_of("steps", [(0, 0, 0, n, 100, 1000) for n in (1, 2, 3)])
    with pytest.raises(SloBenchError, match="makes 3 steps, too few"):
        fit(dataclasses.replace(BASE, tables={"steps": few}))
    with pytest.raises(SloBenchError, match="do not make whole steps"):
        fit(BASE)


@pytest.mark.parametrize(
    ("formula", "values"), [("nine", NINE), ("ascendra", ASCENDRA), ("distserve", PHASES)]
)
@given(
    seqs=st.integers(1, 200),
    mean=st.integers(1, 30000),
    steps=st.integers(1, 3000),
    step_s=st.sampled_from([0.0, 0.001]),
)
def test_formula_span_equals_the_sum_of_its_steps(formula, values, seqs, mean, steps, step_s):
    timed = FORMULAS[formula].step_time(BASE, values, Host(step_s=step_s))
    kv = seqs * mean
    each = [timed.step_s(seqs, kv + k * seqs, ()) for k in range(steps)]
    span_s = timed.span_s(seqs, kv, steps)
    assert span_s == pytest.approx(sum(each), rel=1e-9)
    assert timed.steps_within(seqs, kv, span_s) == steps
    assert timed.steps_within(seqs, kv, np.nextafter(span_s, np.inf)) == steps + 1


def test_distserve_formula_by_hand():
    timed = FORMULAS["distserve"].step_time(BASE, PHASES, Host())
    assert timed.step_s(10, 5000, ()) == pytest.approx(0.023 + 6e-7 * 5000 + 6e-5 * 10)
    assert timed.step_s(95, 5000, ()) == pytest.approx(0.02 + 5e-7 * 5000 + 1.2e-4 * 95)
    assert timed.step_s(0, 0, [(0, 100), (0, 300)]) == pytest.approx(
        0.02 + 1.4e-4 * 400 + 8e-9 * (100**2 + 300**2)
    )
    # A prompt in two pieces costs its two constants, and its squares once.
    pieces = timed.step_s(0, 0, [(0, 512)]) + timed.step_s(0, 0, [(512, 512)])
    assert pieces == pytest.approx(timed.step_s(0, 0, [(0, 1024)]) + 0.02)


def test_profile_step_time_by_each_of_its_formulas():
    profile = dataclasses.replace(BASE, best="distserve", fits={"distserve": Fitted(PHASES)})
    timed = profiled_step_time(profile)
    assert timed.fitted
    assert "distserve" in timed.provenance
