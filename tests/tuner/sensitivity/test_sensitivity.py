"""Perturbed worlds, crossings and flips."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.scaled import ScaledStepTime
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.tuner.sensitivity.perturbations import (
    PERTURBATIONS,
    perturbation,
    world,
)
from slo_bench.tuner.sensitivity.study import Point, Ranked, _flips, highest_rps, study
from slo_bench.workloads.errors import SloBenchError, UnknownNameError

STEP_TIME = step_time(Placement(model("llama-3.1-8b"), gpu("a100-80g"))).model


def cells(*systems, rate=4.0, requests=60, seeds=2, **settings):
    experiment = Experiment(
        systems=systems, rates=[rate], requests=(requests,), seeds=seeds, **settings
    )
    return list(experiment.plan().cells)


@given(
    st.floats(0.05, 20),
    st.integers(1, 256),
    st.integers(1, 200_000),
    st.floats(1e-6, 60),
)
def test_scaled_step_times_are_consistent(factor, seqs, kv_tokens, duration_s):
    scaled = ScaledStepTime(STEP_TIME, factor)
    steps = scaled.steps_within(seqs, kv_tokens, duration_s)
    assert scaled.span_s(seqs, kv_tokens, steps) >= duration_s
    assert steps == 1 or scaled.span_s(seqs, kv_tokens, steps - 1) < duration_s
    assert scaled.step_s(seqs, kv_tokens, [(0, 100)]) == pytest.approx(
        factor * STEP_TIME.step_s(seqs, kv_tokens, [(0, 100)])
    )
    assert scaled.steps_within(seqs, kv_tokens, 0.0) == 0


def step_s(axis, value, spec):
    changed = perturbation(axis).change(spec, value).step_time
    return changed.step_s(32, 32_000, [(0, 512)]), changed.step_s(1, 1, ())


@pytest.mark.parametrize("profile", ["roofline", "operators"])
def test_perturbation_changes_its_part_of_the_step_time(profile):
    (spec, *_) = cells("vllm", profile=profile)
    full_s, small_s = step_s("step-time", 1.0, spec)
    assert step_s("step-time", 2.0, spec) == pytest.approx((2 * full_s, 2 * small_s))
    host_full_s, host_small_s = step_s("host", 3.0, spec)
    assert host_full_s - full_s == pytest.approx(0.002)  # twice the default of 1 ms more
    assert host_small_s - small_s == pytest.approx(0.002)
    slow_full_s, slow_small_s = step_s("attention", 2.0, spec)
    assert slow_full_s > full_s
    # One token attends to nothing; its kernels take their time.
    assert slow_small_s == pytest.approx(
        small_s, rel={"roofline": 1e-3, "operators": 0.05}[profile]
    )
    weights_full_s, weights_small_s = step_s("weights", 2.0, spec)
    assert weights_small_s > 1.5 * small_s
    assert full_s <= weights_full_s < 2 * full_s


@pytest.mark.parametrize("profile", ["roofline", "operators"])
@pytest.mark.parametrize("name", PERTURBATIONS)
def test_perturbation_at_its_neutral_value_changes_nothing(name, profile):
    (spec, *_) = cells("vllm", profile=profile)
    axis, base = perturbation(name), world(spec)
    changed = axis.change(spec, axis.neutral)
    assert changed.step_time.step_s(8, 800, [(0, 64)]) == pytest.approx(
        base.step_time.step_s(8, 800, [(0, 64)]), rel=1e-12
    )
    assert np.allclose(changed.workload.prompt_tokens, base.workload.prompt_tokens)
    if name != "burstiness":  # a gamma process of cv 1 draws Poisson gaps with other numbers
        assert np.array_equal(changed.workload.arrival_s, base.workload.arrival_s)
    assert changed.predicted_output_tokens is None


def test_perturbations_of_noise_and_burstiness():
    (spec, *_) = cells("sjf", requests=4000)
    true = world(spec).workload.output_tokens
    predicted = perturbation("prediction").change(spec, 0.5).predicted_output_tokens
    long = true > 50
    assert np.log(predicted[long] / true[long]).std() == pytest.approx(0.5, rel=0.05)
    gaps_s = np.diff(perturbation("burstiness").change(spec, 3.0).workload.arrival_s)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(3.0, rel=0.15)


def test_perturbation_refuses_bad_names_and_values():
    with pytest.raises(UnknownNameError, match="step-time"):
        perturbation("step-tmie")
    with pytest.raises(SloBenchError, match="at least"):
        perturbation("host").checked((-1.0,))
    assert perturbation("host").checked((2.0, 0.5, 2.0)) == (0.5, 2.0)
    with pytest.raises(UnknownNameError, match="ttft_p99"):
        Ranked("ttft_p98")
    with pytest.raises(SloBenchError, match="target"):
        Ranked(target=90)


@given(st.floats(0.3, 30), st.floats(0.5, 20))
def test_highest_rps_finds_the_crossing(truth, guess):
    crossing_rps = highest_rps(lambda rate: rate <= truth, guess)
    if guess / 20 < truth < guess * 20:
        assert crossing_rps == pytest.approx(truth, rel=0.021)


def test_highest_rps_without_a_crossing():
    assert highest_rps(lambda rate: False, 1.0) == 0.0
    assert math.isfinite(highest_rps(lambda rate: True, 1.0))


def test_rank_flips_by_hand():
    base = Point("base", 0.0, {"a": (3.0, 3.0, 3.0), "b": (2.0, 2.0, 2.0), "c": (1.0, 1.0, 1.0)})
    points = [
        Point("host", 2.0, {"a": (3.0, 3.0, 3.0), "b": (2.0, 2.0, 2.0), "c": (2.0, 2.0, 2.0)}),
        Point("host", 4.0, {"a": (1.0, 1.0, 3.0), "b": (2.0, 2.0, 2.0), "c": (0.5, 0.5, 0.5)}),
    ]
    (flip,) = _flips(base, points, Ranked())
    assert (flip.winner, flip.loser, flip.value) == ("b", "a", 4.0)
    assert (flip.seeds, flip.of_seeds, flip.base_seeds) == (2, 3, 3)
    assert not flip.certain
    # Where less is better the order at the base is the reverse, and so is every step.
    reverse = _flips(base, points, Ranked("ttft_p99"))
    assert [(f.winner, f.loser) for f in reverse] == [("a", "b")]


def test_study_has_the_base_among_the_points_of_an_axis():
    outcome = study(
        cells("vllm", "sarathi", rate=2.0, requests=150),
        [(perturbation("host"), (1.0, 40.0))],
        Ranked("e2e_p99"),
    )
    assert len(outcome.points) == 1  # the neutral value is the base
    assert outcome.base.mean("vllm") != outcome.points[0].mean("vllm")
    (host,) = outcome.axes
    assert [point.value for point in outcome.along(host)] == [1.0, 40.0]


@pytest.mark.slow
def test_capacity_falls_as_step_times_grow():
    reports = []
    outcome = study(
        cells("vllm", "orca", requests=80),
        [(perturbation("step-time"), (0.5, 2.0))],
        Ranked(),
        progress=lambda done, total: reports.append((done, total)),
    )
    fast, slow = outcome.points
    for name in outcome.systems:
        assert fast.mean(name) > outcome.base.mean(name) > slow.mean(name) > 0
    assert reports == [(1, 3), (2, 3), (3, 3)]


def test_prediction_noise_moves_only_predicting_systems():
    axis = perturbation("prediction")
    outcome = study(
        cells("fifo", "sjf", rate=3.0, requests=200), [(axis, (1.0,))], Ranked("e2e_p99")
    )
    (point,) = outcome.points
    assert point.outcomes["fifo"] == outcome.base.outcomes["fifo"]
    assert point.outcomes["sjf"] != outcome.base.outcomes["sjf"]
    assert any("fifo" in note for note in outcome.notes)
    nobody = study(cells("vllm", "orca"), [(axis, (1.0,))], Ranked("attainment"))
    assert nobody.points == []
    assert nobody.axes == ()


def test_study_notes_a_base_that_is_not_stationary():
    """vLLM takes about 8 req/s: at 40 its queue grows for as long as requests arrive."""
    over = cells("vllm", "sarathi", rate=40.0, requests=1500, seeds=1, slo="ttft=1")
    (note,) = study(over, [], Ranked("attainment")).notes
    assert re.match(r"Overloaded at the base: vllm after 3\d\.?\d* s, sarathi after", note)
    calm = cells("vllm", "sarathi", rate=2.0, requests=300, seeds=1)
    assert study(calm, [], Ranked("attainment")).notes == ()


def test_study_refuses_inputs_without_a_ranking():
    with pytest.raises(SloBenchError, match="two systems"):
        study(cells("vllm"), [], Ranked("attainment"))
    twice = cells("vllm", "orca", slo_scale=(1.0, 2.0))
    with pytest.raises(SloBenchError, match="several cells for one seed"):
        study(twice, [], Ranked("attainment"))
