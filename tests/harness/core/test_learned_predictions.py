"""What a policy inside a server believes about step times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.core.predictions import LearnedPredictions


def test_learned_step_time_is_zero_before_the_first_step():
    assert LearnedPredictions().step_s(3, 100, [(0, 50)]) == 0.0


def test_learned_step_time_ignores_a_slow_first_prefill():
    learned = LearnedPredictions()
    learned.learn(0, 0, [(0, 64)], 30.0)
    assert learned.step_s(0, 0, [(0, 64)]) == 0.0
    learned.learn(0, 0, [(0, 64)], 0.5)
    assert learned.step_s(0, 0, [(0, 64)]) == pytest.approx(0.5, rel=1e-3)


def test_learned_step_time_ignores_first_decode_and_empty_steps():
    learned = LearnedPredictions()
    for _ in range(3):
        learned.learn(0, 0, [], 9.0)
    learned.learn(2, 20, [], 9.0)
    assert learned.step_s(2, 20, []) == 0.0
    learned.learn(2, 20, [], 0.25)
    assert learned.step_s(2, 20, []) == pytest.approx(0.25, rel=1e-3)


@given(st.integers(0, 2**32 - 1))
def test_learned_step_time_recovers_a_linear_model(seed):
    draw = np.random.default_rng(seed)

    def true_s(decodes, kv_tokens, chunks):
        read = kv_tokens + sum(before + tokens // 2 for before, tokens in chunks)
        return 0.01 + 2e-4 * decodes + 3e-7 * read + 5e-5 * sum(tokens for _, tokens in chunks)

    def drawn():
        decodes = int(draw.integers(1, 200))
        chunks = [(int(draw.integers(0, 500)), int(draw.integers(1, 1000)))]
        return decodes, decodes * int(draw.integers(1, 3000)), chunks[: draw.integers(0, 2)]

    learned = LearnedPredictions()
    for _ in range(100):
        step = drawn()
        learned.learn(*step, true_s(*step))
    for _ in range(10):
        step = drawn()
        assert learned.step_s(*step) == pytest.approx(true_s(*step), rel=0.02)
