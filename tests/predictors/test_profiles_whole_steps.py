"""Whole steps of a server: what is fitted to them, and how it comes back from a file."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.predictors.profiles.formulas import profiled_step_time
from slo_bench.predictors.profiles.profile_format import Source, read_profile, write_profile
from slo_bench.predictors.profiles.whole_steps import (
    COEFFICIENTS,
    LoggedStep,
    made_of,
    observed,
    profile_of_steps,
)
from slo_bench.workloads.errors import SloBenchError

SOURCE = Source("a server", "steps.jsonl")


def truth(decode_seqs, kv_tokens, chunks):
    if not chunks:
        return 2e-3 + 1e-5 * decode_seqs + 1e-4 * max(0, decode_seqs - 32) + 1e-7 * kv_tokens
    tokens = decode_seqs + sum(chunk for _, chunk in chunks)
    pairs = sum(chunk * (before + chunk / 2) for before, chunk in chunks)
    return 4e-3 + 2e-5 * tokens + 1e-8 * pairs + 3e-7 * kv_tokens


def drawn(count, seed=0, noise=0.0, prefill=0.3):
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        seqs = int(rng.integers(1, 60))
        kv = seqs * int(rng.integers(1, 500))
        chunks = []
        if rng.random() < prefill:
            lengths = rng.integers(1, 600, size=rng.integers(1, 4))
            chunks = [(int(rng.integers(0, 300)), int(length)) for length in lengths]
        seconds = truth(seqs, kv, chunks) * rng.lognormal(0, noise)
        steps.append(LoggedStep(seqs, kv, chunks, seconds))
    return steps


def fitted(steps):
    return profile_of_steps(steps, model="tiny", gpu="cpu", source=SOURCE)


def test_whole_steps_recover_a_sum():
    model = profiled_step_time(fitted(drawn(600))).model
    for step in drawn(50, seed=1):
        predicted_s = model.step_s(step.decode_seqs, step.decode_kv_tokens, step.chunks)
        assert predicted_s == pytest.approx(step.duration_s, rel=1e-3)


def test_whole_steps_with_noise_keep_the_mean():
    steps = drawn(3000, noise=0.4)
    model = profiled_step_time(fitted(steps)).model
    predicted_s = sum(model.step_s(s.decode_seqs, s.decode_kv_tokens, s.chunks) for s in steps)
    assert predicted_s == pytest.approx(sum(s.duration_s for s in steps), rel=0.03)


def test_whole_steps_leave_stalls_out():
    steps = drawn(300)
    stalled = [LoggedStep(5, 100, [], 3.0) for _ in range(3)]
    profile = fitted(steps + stalled)
    assert len(profile.tables["steps"]) == 300
    assert profile.fits["sums"].held_out_percent < 0.1


@pytest.mark.parametrize("prefill", [0.0, 1.0])
def test_whole_steps_price_a_missing_kind_as_the_other(prefill):
    model = profiled_step_time(fitted(drawn(300, prefill=prefill))).model
    for chunks in ((), [(0, 40)]):
        assert model.step_s(4, 800, chunks) > 1e-3


def test_whole_steps_profile_survives_its_file(tmp_path):
    profile = fitted(drawn(100))
    again = read_profile(write_profile(profile, tmp_path / "server.toml"))
    assert (again.best, again.gpu, again.model) == ("sums", "cpu", "tiny")
    assert len(again.tables["steps"]) == 100
    original, reread = (profiled_step_time(p).model for p in (profile, again))
    assert original.step_s(7, 900, [(5, 40)]) == pytest.approx(reread.step_s(7, 900, [(5, 40)]))


def test_whole_steps_of_too_few_steps_are_refused():
    with pytest.raises(SloBenchError, match=r"29 steps, too few to fit \(30 are needed\)"):
        fitted(drawn(29))


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), min_size=1, max_size=9))
def test_whole_steps_equal_chunks_keep_tokens_and_pairs(chunks):
    from slo_bench.predictors.profiles.whole_steps import _table

    observations = observed(_table([LoggedStep(3, 60, chunks, 0.01)]))
    tokens = sum(chunk for _, chunk in chunks)
    assert observations.tokens[0] == pytest.approx(3 + tokens)
    assert observations.pairs[0] == pytest.approx(sum(c * (b + c / 2) for b, c in chunks))
    assert observations.context_tokens[0] >= 0


@given(
    st.lists(st.floats(0, 1e-3), min_size=len(COEFFICIENTS), max_size=len(COEFFICIENTS)),
    st.integers(1, 900),
    st.integers(0, 50),
    st.integers(1, 200),
)
def test_whole_steps_span_equals_the_sum_of_its_steps(values, seqs, tokens_each, steps):
    model = made_of(dict(zip(COEFFICIENTS, values, strict=True)))
    each = [model.step_s(seqs, seqs * (tokens_each + k), ()) for k in range(steps)]
    whole_s = model.span_s(seqs, seqs * tokens_each, steps)
    assert whole_s == pytest.approx(math.fsum(each))
    assert all(a <= b for a, b in pairwise(each))
    assert model.steps_within(seqs, seqs * tokens_each, whole_s) == steps
