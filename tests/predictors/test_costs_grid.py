"""Cost grids: lookups against numpy, files against damage."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.predictors.costs.grid import CostGrid, Swap, read_cost_grid
from slo_bench.workloads.errors import FileFormatError

AXES = (np.array([0.0, 16, 64, 256]), np.array([0.0, 1, 8]), np.array([0.0, 128, 1024]))


def linear_grid(a=1e-5, b=1e-4, c=1e-6, base=0.01):
    tokens, sequences, kv = np.meshgrid(*AXES, indexing="ij")
    return CostGrid(
        *AXES, base + a * tokens + b * sequences + c * kv, Swap(1e-5, 2e-6), Swap(2e-5, 3e-6)
    )


@given(st.integers(0, 1000), st.integers(0, 20), st.integers(0, 3000))
def test_grid_interpolates_and_extrapolates_a_plane_exactly(tokens, sequences, each):
    kv = sequences * each
    expected = 0.01 + 1e-5 * tokens + 1e-4 * sequences + (1e-6 * each if sequences else 0.0)
    assert linear_grid().step_seconds(tokens, sequences, kv) == pytest.approx(expected)


def test_grid_at_its_points_is_exact():
    rng = np.random.default_rng(0)
    grid = dataclasses.replace(linear_grid(), step_s=rng.random((4, 3, 3)))
    for i, tokens in enumerate(AXES[0]):
        for j, sequences in enumerate(AXES[1]):
            for k, each in enumerate(AXES[2]):
                if sequences or not each:
                    seconds = grid.step_seconds(int(tokens), int(sequences), int(sequences * each))
                    assert seconds == pytest.approx(grid.step_s[i, j, k])


def test_grid_extrapolation_is_never_negative():
    falling = dataclasses.replace(
        linear_grid(), step_s=np.array([3.0, 2, 1, 0.5])[:, None, None] * np.ones((4, 3, 3))
    )
    assert falling.step_seconds(10_000) == 0.0


def test_swap_seconds_have_latency_and_are_zero_for_no_tokens():
    assert linear_grid().swap_out.seconds(16) == pytest.approx(1e-5 + 16 * 2e-6)
    assert linear_grid().swap_in.seconds(0) == 0.0


def test_cost_grid_survives_its_file(tmp_path):
    grid = dataclasses.replace(linear_grid(), about={"model": "llama-3-8b"})
    grid.write(tmp_path / "new" / "costs.npz")
    read = read_cost_grid(tmp_path / "new" / "costs.npz")
    assert (read.step_s == grid.step_s).all()
    assert (read.swap_out, read.swap_in, read.about) == (grid.swap_out, grid.swap_in, grid.about)


def damaged(**changes):
    grid = linear_grid()
    arrays = {
        "tokens": AXES[0],
        "sequences": AXES[1],
        "kv_tokens": AXES[2],
        "step_s": grid.step_s,
        "swap_out_s": np.array([0.0, 1.0]),
        "swap_in_s": np.array([0.0, 1.0]),
        "about": np.array(json.dumps({"format": 1})),
    } | changes
    return {name: array for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_s": None}, "step_s"),
        ({"step_s": np.ones((2, 2, 2))}, "shape"),
        ({"tokens": np.array([0.0, 64, 16, 256])}, "tokens must ascend"),
        ({"tokens": np.array([1.0, 16, 64, 256])}, "tokens must ascend from 0"),
        ({"step_s": np.full((4, 3, 3), np.nan)}, "seconds from 0 on"),
        ({"swap_in_s": np.array([-1.0, 1.0])}, "swap_in_s must hold seconds"),
        ({"swap_in_s": np.array([1.0])}, "latency and seconds per token"),
        ({"about": np.array("{}")}, "format 1"),
    ],
)
def test_damaged_cost_grid_is_refused(tmp_path, changes, message):
    np.savez(tmp_path / "bad.npz", **damaged(**changes))
    with pytest.raises(FileFormatError, match=message):
        read_cost_grid(tmp_path / "bad.npz")


@pytest.mark.parametrize("content", [b"", b"tokens = 1", b"PK\x03\x04 cut short"])
def test_file_that_is_no_cost_grid_is_refused(tmp_path, content):
    (tmp_path / "other.npz").write_bytes(content)
    with pytest.raises(FileFormatError, match="not a cost grid"):
        read_cost_grid(tmp_path / "other.npz")
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_cost_grid(tmp_path / "none.npz")
