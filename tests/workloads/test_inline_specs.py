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


HOT = "hot-prefixes(prefixes=4,tokens=100,exponent=1,prompt=uniform(5,40),output=7,priority=3)"


def test_hot_prefixes_are_shared_by_their_full_blocks_alone():
    workload = load_source(HOT).make(rate_rps=2, requests=4000, seed=3)
    assert set(workload.prompt_tokens.tolist()) == set(range(105, 141))
    assert set(workload.output_tokens.tolist()) == {7}
    assert (workload.priority == 3).all()
    assert (workload.session == -1).all()
    own_blocks: set[int] = set()
    prefixes: dict[tuple[int, ...], int] = {}
    for blocks, tokens in zip(workload.prefix_blocks, workload.prompt_tokens, strict=True):
        assert len(blocks) == tokens // 16
        prefixes[blocks[:6]] = prefixes.get(blocks[:6], 0) + 1  # 100 tokens are 6 full blocks
        assert not own_blocks & set(blocks[6:])
        own_blocks |= set(blocks[6:])
    assert len(prefixes) == 4
    assert len({block for blocks in prefixes for block in blocks} | own_blocks) == 24 + len(
        own_blocks
    )
    # Zipf 1: 12/25, 6/25, 4/25, 3/25.
    shares = [count / 4000 for count in sorted(prefixes.values(), reverse=True)]
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.02)


def test_hot_prefixes_of_the_catalogue_are_those_of_the_written_form():
    written = "hot-prefixes(10,4096,1.2,uniform(200,900),uniform(50,250))"
    workloads = [
        load_source(text).make(rate_rps=9, requests=50) for text in (written, "hot-prefixes")
    ]
    for column in ("arrival_s", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(*(getattr(w, column) for w in workloads))
    assert list(workloads[0].prefix_blocks) == list(workloads[1].prefix_blocks)
    assert workloads[0].prompt_tokens.min() >= 4296
    longer = load_source("hot-prefixes", prompt_tokens="1000", output_tokens="3")
    assert set(longer.make(rate_rps=9, requests=5).prompt_tokens.tolist()) == {5096}


def test_lengths_and_prefixes_of_a_seed_do_not_depend_on_the_rate():
    slow, fast = (load_source(HOT).make(rate_rps=rate, requests=50) for rate in (1, 20))
    assert list(slow.prefix_blocks) == list(fast.prefix_blocks)


def test_hot_prefixes_survive_csv(tmp_path):
    workload = load_source(HOT).make(rate_rps=2, requests=30)
    write_csv(workload, tmp_path / "hot.csv")
    back = load_source(tmp_path / "hot.csv").make()
    assert list(back.prefix_blocks) == list(workload.prefix_blocks)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("embed(texts=3)", "lacks tokens"),
        ("embed(texts=3,tokens=0)", "fixed tokens must be at least 1"),
        ("synthetic(prompt=3)", "lacks output"),
        ("embed(texts=3,tokens=4,dims=5)", "dims"),
        ("embed(texts=3,tokens=4,priority=1e12)", "priority must be below"),
        ("hot-prefixes(prefixes=0)", "prefixes of hot-prefixes must lie in 1"),
        ("hot-prefixes(tokens=9e99)", "tokens of hot-prefixes must lie in 1"),
        ("hot-prefixes(exponent=-1)", "exponent of hot-prefixes must lie in 0"),
        ("hot-prefixes(count=3)", "unknown setting of hot-prefixes 'count'"),
        ("mix(a=hot-prefixes:1)", "shares prefixes between its requests"),
    ],
)
def test_malformed_inline_sources_are_refused(text, problem):
    with pytest.raises(SloBenchError, match=problem):
        load_source(text)


def test_inline_source_refuses_lengths_from_outside():
    with pytest.raises(SloBenchError, match="says its own lengths"):
        load_source("embed(texts=3,tokens=4)", prompt_tokens="5")
