"""Length predictors: buckets of Eq. 3-1, a stated accuracy, names and settings."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.harness.experiments.execution.cells import predicted_output_tokens
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.predictors.lengths.distribution import error_shares, measured_confusion
from slo_bench.predictors.output_length import (
    bucket_accuracy,
    buckets_of,
    length_predictor,
    longest_tokens,
)
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.length_buckets import bucket_last_tokens, bucket_middle_tokens, bucket_of
from slo_bench.workloads.workload import Workload


def workload(outputs):
    outputs = np.array(outputs)
    return Workload(np.zeros(len(outputs)), np.full(len(outputs), 10), outputs)


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        (1, 0),
        (7, 0),
        (8, 1),
        (15, 1),
        (16, 2),
        (1023, 7),
        (1024, 8),
        (2047, 8),
        (2048, 9),
        (9999, 9),
    ],
)
def test_bucket_of_a_length(tokens, bucket):
    assert bucket_of(tokens) == bucket
    assert buckets_of(np.array([tokens]))[0] == bucket


def test_bucket_middle_and_last_tokens():
    assert [bucket_middle_tokens(b) for b in (0, 1, 2, 8)] == [4, 12, 24, 1536]
    assert [bucket_last_tokens(b) for b in (0, 1, 2, 8)] == [7, 15, 31, 2047]
    for bucket in range(10):
        assert bucket_of(bucket_middle_tokens(bucket)) == bucket
        assert bucket_of(bucket_last_tokens(bucket)) == bucket


def predicted(text, outputs, seed=0):
    return length_predictor(text).predict(workload(outputs), np.random.default_rng(seed))


def test_oracle_and_constant_predictions():
    assert predicted("oracle", [3, 700]).tolist() == [3, 700]
    assert predicted("constant(256)", [3, 700]).tolist() == [256, 256]


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.8, 0.9951, 1.0])
def test_noisy_predictor_has_the_stated_accuracy(accuracy):
    true = np.random.default_rng(1).integers(1, 4000, 20_000)
    predictions = predicted(f"noisy(accuracy={accuracy})", true)
    assert bucket_accuracy(predictions, true) == pytest.approx(accuracy, abs=0.01)


def test_factor_of_the_noisy_predictor_scales_every_prediction():
    true = np.random.default_rng(1).integers(1, 4000, 500)
    plain, halved = predicted("noisy(0.5)", true), predicted("noisy(0.5,factor=0.5)", true)
    assert (halved == np.maximum(np.rint(plain / 2), 1)).all()


def test_noisy_predictor_errs_as_measured():
    true = np.random.default_rng(1).integers(1, 4000, 60_000)
    buckets, predicted_buckets = buckets_of(true), buckets_of(predicted("noisy(accuracy=0)", true))
    assert (buckets != predicted_buckets).all()
    shares = error_shares()
    for bucket in range(10):
        drawn_buckets = predicted_buckets[buckets == bucket]
        if len(drawn_buckets) > 400:
            drawn = np.bincount(drawn_buckets, minlength=10) / len(drawn_buckets)
            assert drawn == pytest.approx(shares[bucket], abs=0.06)


def test_error_shares_are_those_of_the_measured_confusion():
    counts, shares = measured_confusion(), error_shares()
    assert counts.shape == shares.shape == (10, 10)
    assert shares.sum(axis=1) == pytest.approx(1)
    assert not shares.diagonal().any()
    # Where many were kept back they decide; where none was, the distances of all errors do.
    wrong = counts - np.diag(counts.diagonal())
    fullest = int(wrong.sum(axis=1).argmax())
    assert shares[fullest] == pytest.approx(wrong[fullest] / wrong[fullest].sum(), abs=0.15)
    fewest = int(wrong.sum(axis=1).argmin())
    assert shares[fewest].max() < 1
    # It says more than a step to either side.
    beyond = np.abs(np.subtract.outer(np.arange(10), np.arange(10))) > 1
    assert (wrong * beyond).sum() / wrong.sum() > 0.1


def test_noisy_predictor_with_the_same_seed_repeats():
    true = np.arange(1, 500)
    assert (predicted("noisy(0.5)", true, 3) == predicted("noisy(0.5)", true, 3)).all()
    assert (predicted("noisy(0.5)", true, 3) != predicted("noisy(0.5)", true, 4)).any()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("orcale", "unknown length predictor 'orcale'; did you mean oracle"),
        ("noisy", "'noisy' lacks accuracy"),
        ("noisy(accuracy=1.2)", "noisy accuracy must be from 0 to 1 but is 1.2"),
        ("noisy(0.5,factor=0)", "noisy factor must be above 0, at most 100, but is 0"),
        ("noisy(acc=0.5)", "unknown setting of noisy 'acc'; did you mean accuracy"),
        ("constant(0)", "constant tokens must be at least 1 but is 0"),
        ("constant(2.5)", "constant tokens must be a whole number but is 2.5"),
        ("noisy(0.5", "cannot read 'noisy\\(0.5'"),
    ],
)
def test_impossible_length_predictors_are_refused(text, problem):
    with pytest.raises(SloBenchError, match=problem):
        length_predictor(text)
    with pytest.raises(SloBenchError, match=problem):
        Experiment(length_predictor=text, requests=10, rates=[1], seeds=1).plan()


def test_systems_of_an_experiment_get_the_same_predictions():
    experiment = Experiment(
        systems=["sjf", "s3"],
        length_predictor=["oracle", "noisy(0.6)"],
        requests=50,
        rates=[1],
        seeds=1,
    )
    cells = experiment.plan().cells
    assert len(cells) == 4
    assert {cell.columns["length_predictor"] for cell in cells} == {"oracle", "noisy(0.6)"}
    outputs = workload(range(1, 51))
    predictions = {
        cell.system: predicted_output_tokens(cell, outputs)
        for cell in cells
        if "0.6" in cell.length_predictor
    }
    assert predictions["sjf"].tolist() == predictions["s3"].tolist()
    assert all(
        predicted_output_tokens(c, outputs) is None for c in cells if c.length_predictor == "oracle"
    )


def test_spread_predictor_is_exact_where_it_is_sure():
    outputs = np.random.default_rng(1).integers(1, 2000, 500)
    lengths = workload(outputs)
    for text in ("spread(correlation=0.3, unsure=0)", "spread(correlation=1)"):
        predictor = length_predictor(text)
        median = predictor.predict(lengths, np.random.default_rng(2))
        longest = longest_tokens(predictor, lengths, np.random.default_rng(2))
        assert (median == outputs).all()
        assert (longest == outputs).all()


@pytest.mark.parametrize("correlation", [0.0, 0.4, 0.8])
def test_spread_quantiles_hold_for_every_prediction(correlation):
    """Half of the answers with a like median do not exceed it, nine in ten not the quantile."""
    outputs = np.ceil(np.random.default_rng(1).lognormal(5, 0.8, 40_000)).astype(np.int64)
    lengths = workload(outputs)
    predictor = length_predictor(f"spread(correlation={correlation}, unsure=1)")
    median = predictor.predict(lengths, np.random.default_rng(2))
    longest = longest_tokens(predictor, lengths, np.random.default_rng(2))
    for part in np.array_split(np.argsort(median, kind="stable"), 4):
        assert (outputs[part] <= median[part]).mean() == pytest.approx(0.5, abs=0.02)
        assert (outputs[part] <= longest[part]).mean() == pytest.approx(0.9, abs=0.02)
    scores = [np.argsort(np.argsort(x, kind="stable")) for x in (median, outputs)]
    assert np.corrcoef(*scores)[0, 1] == pytest.approx(
        6 / np.pi * np.arcsin(correlation / 2), abs=0.02
    )
