"""Workloads written out in one line."""

from __future__ import annotations

import numpy as np
import pytest

from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import RequestType
from slo_bench.workloads.source import load_source
from slo_bench.workloads.writer import write_csv

MIX = (
    "mix(chat=synthetic(prompt=300,output=uniform(200,500),priority=2):3,"
    "embed=embed(texts=uniform(16,128),tokens=uniform(10,20)):1)"
)


def test_embed_source_makes_embedding_requests():
    workload = load_source("embed(texts=uniform(16,128),tokens=7,priority=1)").make(
        rate_rps=2, requests=500, seed=1
    )
    assert (workload.request_type == RequestType.EMBED).all()
    assert (workload.priority == 1).all()
    assert workload.num_inputs.min() >= 16
    assert workload.num_inputs.max() <= 128
    assert len(set(workload.num_inputs.tolist())) > 50
    np.testing.assert_array_equal(workload.prompt_tokens, 7 * workload.num_inputs)
    np.testing.assert_array_equal(workload.output_tokens, 1)
    assert workload[3].num_inputs == workload.num_inputs[3]


def test_synthetic_source_has_lengths_and_priority():
    workload = load_source("synthetic(prompt=10,output=uniform(2,4),priority=-1)").make(
        rate_rps=2, requests=100
    )
    assert (workload.request_type == RequestType.GENERATE).all()
    assert (workload.priority == -1).all()
    assert set(workload.output_tokens.tolist()) == {2, 3, 4}


def test_mix_of_synthetic_and_embed_sources():
    workload = load_source(MIX).make(rate_rps=2, requests=2000)
    embeds = workload.request_type == RequestType.EMBED
    assert embeds.mean() == pytest.approx(0.25, abs=0.03)
    assert (workload.priority[~embeds] == 2).all()
    assert (workload.num_inputs[~embeds] == 1).all()
    assert (workload.prompt_tokens[embeds] % workload.num_inputs[embeds] == 0).all()


def test_mixed_requests_survive_csv(tmp_path):
    workload = load_source(MIX).make(rate_rps=2, requests=50)
    write_csv(workload, tmp_path / "mixed.csv")
    back = load_source(tmp_path / "mixed.csv").make()
    for column in ("request_type", "num_inputs", "priority", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(back, column), getattr(workload, column))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("embed(texts=3)", "lacks tokens"),
        ("embed(texts=3,tokens=0)", "fixed tokens must be at least 1"),
        ("synthetic(prompt=3)", "lacks output"),
        ("embed(texts=3,tokens=4,dims=5)", "dims"),
        ("embed(texts=3,tokens=4,priority=1e12)", "priority must be below"),
    ],
)
def test_malformed_inline_sources_are_refused(text, problem):
    with pytest.raises(SloBenchError, match=problem):
        load_source(text)


def test_inline_source_refuses_lengths_from_outside():
    with pytest.raises(SloBenchError, match="says its own lengths"):
        load_source("embed(texts=3,tokens=4)", prompt_tokens="5")
