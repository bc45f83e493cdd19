"""Profiles and grids of costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slo_bench.predictors.costs.grid import CostGrid, Swap, read_cost_grid
from slo_bench.predictors.profiles.profile_format import Source, read_profile, write_profile
from slo_bench.predictors.profiles.whole_steps import LoggedStep, profile_of_steps

from .target import Target, beside, from_file


def targets(folder: Path) -> list[Target]:
    """A folder of a profile with one file edited."""
    steps = [
        LoggedStep(n, 100 * n, [(0, 64 * n)] if n % 2 else [], 0.01 + 0.001 * n)
        for n in range(1, 41)
    ]
    profile = profile_of_steps(
        steps, model="llama-3-8b", gpu="a100-80g", source=Source("a test", "here")
    )
    header = write_profile(profile, folder / "profile")
    edited_files = [
        beside(header.parent, path, read_profile, "a profile")
        for path in sorted(header.parent.iterdir())
    ]
    grid, axis = folder / "grid.npz", np.array([0.0, 8.0])
    CostGrid(axis, axis, axis, np.ones((2, 2, 2)), Swap(0.1, 0.1), Swap(0.1, 0.1)).write(grid)
    return [
        *edited_files,
        Target("cost grid", [grid.read_bytes()], from_file(folder, "grid.npz", read_cost_grid)),
    ]
