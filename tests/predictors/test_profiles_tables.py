"""Grids that are filled, curves with tiles, tables that become step times."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.predictors.profiles.build_model import grid_of, table_step_time
from slo_bench.predictors.profiles.formulas import available, profiled_step_time
from slo_bench.predictors.profiles.profile_format import Profile, ProfileTable, table_of
from slo_bench.predictors.profiles.step_time_table import Curve, Host
from slo_bench.workloads.errors import SloBenchError

LAYERS = 32


def attention_us(chunk: float, before: float, n: float, kv: float) -> float:
    """Multilinear, so that interpolation has to be exact."""
    return 5 + 0.1 * chunk + 0.001 * chunk * before + 0.02 * n * kv * (2 if chunk else 1)


def attention() -> ProfileTable:
    chunks, kvs = (16, 64, 256, 1024), (16, 128, 1024, 4096)
    rows = [(0, 0, n, kv) for n in (1, 4, 16, 64) for kv in kvs]
    rows += [(c, x, 0, 0) for c in chunks for x in (0, 512, 2048)]
    rows += [
        (c, x, n, kv) for c in chunks for x in (0, 512, 2048) for n in (1, 4, 64) for kv in kvs
    ]
    return table_of("attention", [(*row, LAYERS, attention_us(*row)) for row in rows])


def profile(**tables: ProfileTable) -> Profile:
    linear = [
        (name, tokens, LAYERS, 100 + tokens)
        for name in ("up", "down")
        for tokens in (1, 64, 512, 4096)
    ]
    defaults = {
        "linear": table_of("linear", linear),
        "per_sequence": table_of("per_sequence", [("lm_head", n, 1, 500 + n) for n in (1, 256)]),
        "attention": attention(),
    }
    return Profile("llama-3-8b", "a100-80g", tables={**defaults, **tables})


def expected_s(chunk: int, before: int, n: int, kv: int) -> float:
    tokens, sequences = chunk + n, n + (1 if chunk else 0)
    linear_us = 2 * LAYERS * (100 + tokens)
    return (linear_us + 500 + sequences + LAYERS * attention_us(chunk, before, n, kv)) * 1e-6


@pytest.mark.parametrize("n", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("kv", [16, 100, 3000, 9000])
def test_table_decode_time_is_interpolated_and_extrapolated(n, kv):
    timed = table_step_time(profile(), Host())
    assert timed.step_s(n, n * kv, ()) == pytest.approx(expected_s(0, 0, n, kv))


@pytest.mark.parametrize("chunk", [16, 100, 1024, 1500])
@pytest.mark.parametrize("before", [0, 100, 2048, 5000])
@pytest.mark.parametrize(("n", "kv"), [(0, 0), (1, 16), (10, 700), (64, 5000)])
def test_table_mixed_step_time_is_interpolated_and_extrapolated(chunk, before, n, kv):
    timed = table_step_time(profile(), Host())
    assert timed.step_s(n, n * kv, [(before, chunk)]) == pytest.approx(
        expected_s(chunk, before, n, kv)
    )


def test_table_time_of_several_chunks_equals_one_of_as_many_pairs():
    timed = table_step_time(profile(), Host())
    # Two chunks of 200 after 1000 tokens have as many pairs as one of 400 after 900.
    one_s = timed.step_s(8, 800, [(900, 400)])
    extra_s = 1e-6  # one more sequence through the output head
    assert timed.step_s(8, 800, [(1000, 200), (1000, 200)]) == pytest.approx(one_s + extra_s)
    # Two fresh ones have fewer pairs than one of their joint length: they cost less.
    assert timed.step_s(8, 800, [(0, 200), (0, 200)]) < timed.step_s(8, 800, [(0, 400)])


def test_table_time_has_host_overhead_and_graph_sizes():
    host = Host(step_s=0.001, launch_s=0.006, graph_tokens=256)
    with_host, without = table_step_time(profile(), host), table_step_time(profile(), Host())
    padded = [1, 2, 4, 8, 16, 64, 256]
    assert [host.graph_size(n) for n in (1, 2, 3, 5, 9, 57, 249)] == padded
    assert host.graph_size(257) == 257
    assert Host(graph_tokens=512).graph_size(300) == 304
    added_s = with_host.step_s(64, 6400, ()) - without.step_s(64, 6400, ())
    assert added_s == pytest.approx(0.001)  # replayed, and 64 is a captured size
    added_s = with_host.step_s(4, 400, [(0, 1000)]) - without.step_s(4, 400, [(0, 1000)])
    assert added_s == pytest.approx(0.007)
    # 57 sequences compute as many rows as 64.
    more_s = with_host.step_s(57, 5700, ()) - without.step_s(57, 5700, ())
    assert more_s == pytest.approx(0.001 + 7 * 2 * LAYERS * 1e-6)


def test_table_sizes_within_a_tile_take_the_time_of_the_larger():
    curve = Curve(np.array([16.0, 32.0, 64.0]), np.array([1.0, 2.0, 3.0]))
    assert [curve(n) for n in (16, 17, 32, 48, 64, 96)] == [1.0, 2.0, 2.0, 2.5, 3.0, 4.0]
    assert curve(8) == pytest.approx(0.5)
    assert curve(0) == 0.0
    assert Curve(np.array([8.0]), np.array([2.0]))(100) == 2.0


def test_table_grids_are_filled_along_the_axes_in_order():
    x, y = np.array([0.0, 0, 0, 1, 1, 2, 2, 2]), np.array([0.0, 1, 2, 0, 2, 0, 1, 2])
    values = 10 * x + y * y
    axes, grid = grid_of([x, y], values, fill_along=(0, 1))
    assert [axis.tolist() for axis in axes] == [[0, 1, 2], [0, 1, 2]]
    assert grid[1, 1] == 11.0  # between (0, 1) and (2, 1), not between (1, 0) and (1, 2)
    _, other = grid_of([x, y], values, fill_along=(1, 0))
    assert other[1, 1] == 12.0
    kept = ~((x == 2) & (y == 2))
    _, beyond = grid_of([x[kept], y[kept]], values[kept], fill_along=(0,))
    assert beyond[2, 2] == 24.0  # on along x, from (0, 2) and (1, 2)


def test_table_repeated_points_take_their_median():
    _, grid = grid_of([np.array([1.0, 1, 1, 2])], np.array([5.0, 6.0, 100.0, 7.0]), ())
    assert grid.tolist() == [6.0, 7.0]


def test_table_without_mixed_rows_adds_both_attentions():
    whole = attention()
    apart = whole.rows((whole["prefill_chunk"] == 0) | (whole["n_decode"] == 0))
    timed = table_step_time(profile(attention=apart), Host())
    both = timed.step_s(4, 4 * 1024, [(0, 256)])
    linear_us = 2 * LAYERS * (100 + 260) + 505
    added_us = linear_us + LAYERS * (attention_us(256, 0, 0, 0) + attention_us(0, 0, 4, 1024))
    assert both == pytest.approx(added_us * 1e-6)


def test_table_without_chunks_after_context_costs_their_pairs():
    whole = attention()
    fresh = whole.rows((whole["kv_prefill"] == 0) & (whole["n_decode"] == 0))
    decode = whole.rows(whole["prefill_chunk"] == 0)
    rows = ProfileTable({k: np.concatenate([v, decode[k]]) for k, v in fresh.columns.items()})
    timed = table_step_time(profile(attention=rows), Host())
    assert timed.step_s(0, 0, [(1024, 256)]) > timed.step_s(0, 0, [(0, 256)])
    a, b, c = (timed.step_s(0, 0, [(k, 256)]) for k in (0, 1024, 2048))
    assert c - b == pytest.approx(b - a)


def test_table_step_time_names_a_missing_table():
    lacking = dataclasses.replace(profile(), tables={"linear": profile().tables["linear"]})
    with pytest.raises(SloBenchError, match="has no table 'attention'"):
        table_step_time(lacking)
    assert available(lacking) == ()
    with pytest.raises(SloBenchError, match="gives no step times yet"):
        profiled_step_time(lacking)
    with pytest.raises(SloBenchError, match="unknown formula"):
        profiled_step_time(profile(), formula="tables")
    whole = attention()
    with pytest.raises(SloBenchError, match="too few rows that only decode"):
        table_step_time(profile(attention=whole.rows(whole["prefill_chunk"] > 0)))
    with pytest.raises(SloBenchError, match="too few rows of prefill"):
        table_step_time(profile(attention=whole.rows(whole["prefill_chunk"] == 0)))


def test_table_step_time_wants_lengths_where_multiprocessors_are_known():
    uncounted = table_step_time(profile(), Host())
    counted = table_step_time(dataclasses.replace(profile(), multiprocessors=108), Host())
    assert not uncounted.wants_lengths
    assert counted.wants_lengths
    assert counted.resident == 2 * 108 / 8
    begins = [-6000, *[-(26_000 // 31)] * 31]
    tail_s = counted.tail_s(begins, sum(begins))
    equal_s = counted.step_s(32, 32_000, ())
    assert equal_s == pytest.approx(uncounted.step_s(32, 32_000, ()))
    assert counted.step_s(32, 32_000, (), tail_s) > 1.05 * equal_s


@given(st.integers(1, 300), st.integers(0, 2_000_000), st.sampled_from([None, 108]))
def test_table_decode_steps_lie_on_lines(n, kv, multiprocessors):
    counted = dataclasses.replace(profile(), multiprocessors=multiprocessors)
    timed = table_step_time(counted, Host())
    base_s, token_s, begin, end, unsplit = timed.decode_line(n, kv)
    assert begin <= kv < end
    assert base_s + token_s * kv == pytest.approx(timed.step_s(n, kv, ()), rel=1e-9)
    assert unsplit == (timed.step_s(n, kv, (), 1e-3) != timed.step_s(n, kv, ()))
    if begin > 0:
        assert timed.decode_line(n, int(np.ceil(begin)) - 1)[3] == begin
    if end < np.inf:
        assert timed.decode_line(n, int(np.ceil(end)))[2] == end
