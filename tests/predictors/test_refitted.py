"""The five-coefficient model that learns while it serves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slo_bench.predictors.placement import Placement
from slo_bench.predictors.refitted import RefittedModel
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time, work

PLACEMENT = Placement(model("mistral-7b"), gpu("a100-80g"))


def batches(n, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        seqs = int(rng.integers(0, 128))
        chunks = []
        if rng.random() < 0.5 or not seqs:
            chunks = [
                (int(rng.integers(0, 500)), int(rng.integers(1, 1500)))
                for _ in range(rng.integers(1, 4))
            ]
        yield seqs, seqs * int(rng.integers(50, 1500)), chunks


def test_refitted_model_learns_its_own_formula_exactly():
    truth = RefittedModel(PLACEMENT)
    truth._c1, truth._c2, truth._c3, truth._c4, truth._c5 = 0.0, 0.4, 1.1, 0.9, 0.003
    learner = RefittedModel(PLACEMENT)
    assert math.isnan(learner.error)
    for batch in batches(600):
        learner.learn(*batch, truth.step_s(*batch))
    for batch in batches(50, seed=1):
        assert learner.step_s(*batch) == pytest.approx(truth.step_s(*batch), rel=1e-6)
    assert min(learner.coefficients) >= 0


def test_refitted_model_meets_operators_within_a_tenth():
    truth = step_time(PLACEMENT).model
    learner = RefittedModel(PLACEMENT)
    for batch in batches(2000):
        learner.learn(*batch, truth.step_s(*batch))
    assert learner.error < 0.1


def test_refitted_bytes_and_operations_of_a_batch_by_hand():
    """One decode of 100 tokens beside a chunk of 10 after 20: by hand, at the peak."""
    peak = work(PLACEMENT)
    learner = RefittedModel(PLACEMENT)
    memory_s, compute_s = learner._model.sides_s(1, 100, [(20, 10)])
    assert memory_s == pytest.approx(peak.weight_read_s + 130 * peak.kv_read_s_per_token)
    pairs = 100 + 10 * 25
    assert compute_s == pytest.approx(
        11 * peak.linear_s_per_token + pairs * peak.attention_s_per_pair
    )
