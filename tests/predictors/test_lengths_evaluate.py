"""Scores by hand, what the answer's text gives away, and baselines that learn what they may."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from slo_bench.predictors.lengths.distribution import (
    DEFAULT_EDGES,
    PredictedDistributions,
    buckets_in,
)
from slo_bench.predictors.lengths.evaluate_predictor import (
    leak_accuracy,
    reliability,
    score,
    waiting_saved,
    write_predictions,
)
from slo_bench.predictors.lengths.length_baselines import baselines
from slo_bench.predictors.lengths.predictor_config import Base, NetworkShape, PredictorConfig
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.labelled_prompts import LabelledPrompt

_spec = importlib.util.spec_from_file_location(
    "tiny_models", Path(__file__).with_name("tiny_models.py")
)
tiny_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_models)
answered = tiny_models.answered


def test_saved_waiting_of_an_order_by_brute_force():
    """Brute force over pairs: who comes first makes the other one wait for its length."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 50, 40)
    scores = tokens + draw.integers(-20, 20, 40)

    def waiting(by):
        return sum(
            tokens[i] * (1.0 if by[i] < by[j] else 0.5 if by[i] == by[j] else 0.0)
            for i in range(40)
            for j in range(40)
            if i != j
        )

    random, best = waiting(np.zeros(40)), waiting(tokens)
    saved = waiting_saved(scores, tokens)
    assert saved == pytest.approx((random - waiting(scores)) / (random - best))
    assert 0.3 < saved < 1
    assert waiting_saved(tokens * 2.0, tokens) == 1
    assert waiting_saved(-tokens, tokens) == -1
    assert waiting_saved(np.zeros(40), tokens) == 0
    assert np.isnan(waiting_saved(scores, np.full(40, 7)))


def test_score_of_three_answers_by_hand():
    """Three answers of 4, 12 and 100 tokens, all said to be in [8, 16) with 80 %."""
    shares = np.array([[0.1, 0.8, 0.1, 0, 0, 0, 0, 0, 0, 0]] * 3)
    lengths = PredictedDistributions.of_buckets(DEFAULT_EDGES, shares)
    quality = score("c", "p", lengths, np.array([4, 12, 100]), 0.0)
    assert quality.exact == pytest.approx(1 / 3)
    assert quality.within_one == pytest.approx(2 / 3)
    assert quality.calibration_error == pytest.approx(0.8 - 1 / 3, abs=1e-6)
    median = lengths.median_tokens()[0]
    assert 8 <= median < 16
    assert quality.mae_tokens == pytest.approx(
        np.mean([median - 4, abs(12 - median), 100 - median])
    )
    assert np.isnan(quality.kendall_tau)  # all are told the same
    assert quality.coverage == pytest.approx(2 / 3)


def test_kendall_tau_judges_the_order():
    lengths = PredictedDistributions.of_buckets(DEFAULT_EDGES, np.eye(10)[[1, 3, 6]])
    assert score("", "", lengths, np.array([1, 2, 3]), 0.0).kendall_tau == pytest.approx(1)
    assert score("", "", lengths, np.array([3, 2, 1]), 0.0).kendall_tau == pytest.approx(-1)


def test_reliability_bins_add_up_to_all_rows():
    rng = np.random.default_rng(0)
    lengths = PredictedDistributions.of_buckets(DEFAULT_EDGES, rng.dirichlet(np.full(10, 0.3), 500))
    bins = reliability(lengths, rng.integers(0, 10, 500))
    assert sum(bin_.rows for bin_ in bins) == 500
    assert [bin_.said for bin_ in bins] == sorted(bin_.said for bin_ in bins)


def test_column_that_reveals_the_length_is_detected():
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(300):
        count = int(rng.integers(1, 600))
        text = " ".join("abcdefgh"[: rng.integers(1, 8)] for _ in range(count))
        rows.append(LabelledPrompt("p", 1, count, "", "", text))
    assert leak_accuracy(rows, DEFAULT_EDGES) > 0.9
    assert leak_accuracy(rows[:20], DEFAULT_EDGES) is None
    without = [LabelledPrompt("p", 1, r.output_tokens, "", "") for r in rows]
    assert leak_accuracy(without, DEFAULT_EDGES) is None


class Said:
    """A predictor that says what it was given."""

    def __init__(self, lengths):
        self._lengths = lengths
        self.config = PredictorConfig(
            NetworkShape(), Base("", "", ""), "", 0.1, 0.0, 0.5, (), {"rows": {}}
        )

    def lengths(self, prompts):
        assert len(prompts) == len(self._lengths)
        return self._lengths


def test_predictions_file_has_a_row_for_each_prompt(tmp_path):
    rows = [
        LabelledPrompt("list, please", 3, 20, "a", "held"),
        LabelledPrompt('tell\nme "all"', 4, 700, "b", "held"),
    ]
    shares = np.array([[0, 0, 0.9, 0.1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0.1, 0.8, 0.1, 0, 0, 0]])
    lengths = PredictedDistributions.of_buckets(DEFAULT_EDGES, shares)
    write_predictions(Said(lengths), rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["prompt"] for row in written] == [row.prompt for row in rows]
    assert [row["model"] for row in written] == ["a", "b"]
    for row, bucket, labelled in zip(written, (2, 5), rows, strict=True):
        assert int(row["output_tokens"]) == labelled.output_tokens
        assert (
            int(row["bucket"]) == buckets_in(DEFAULT_EDGES, np.array([labelled.output_tokens]))[0]
        )
        assert int(row["predicted_bucket"]) == bucket
        median, high_quantile = int(row["predicted_median"]), int(row["predicted_q90"])
        assert DEFAULT_EDGES[bucket] <= median < DEFAULT_EDGES[bucket + 1]
        assert int(row["interval_low"]) < median < high_quantile <= int(row["interval_high"])
    with pytest.raises(SloBenchError, match="cannot write"):
        write_predictions(Said(lengths), rows, tmp_path / "no" / "rows.csv")


def test_baselines_use_the_inputs_they_are_allowed():
    """Of two models one is long-winded; within a model only words tell."""
    short = answered(300, model="a", telling={"name": 4, "list": 20})
    long = answered(300, seed=1, model="b", telling={"explain": 100, "narrate": 700})
    new = answered(80, seed=2, model="a", telling={"name": 4, "list": 20})
    new += answered(80, seed=3, model="b", telling={"explain": 100, "narrate": 700})
    tokens = np.array([row.output_tokens for row in new])
    exact = {
        baseline.name: score("", baseline.name, baseline.lengths(new), tokens, 0.0).exact
        for baseline in baselines([*short, *long], DEFAULT_EDGES)
    }
    assert list(exact) == ["majority per model", "prompt length", "TF-IDF + logistic regression"]
    assert 0.2 < exact["majority per model"] < 0.7
    assert exact["TF-IDF + logistic regression"] > 0.75
    assert exact["prompt length"] < exact["TF-IDF + logistic regression"]
    # Nobody fails at a model that was never seen.
    for baseline in baselines([*short, *long], DEFAULT_EDGES):
        assert len(baseline.lengths(answered(3, model="stranger"))) == 3
