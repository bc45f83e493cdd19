"""From scattered measurements to full grids that can be interpolated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def grid_of(
    columns: Sequence[Floats], values: Floats, fill_along: Sequence[int]
) -> tuple[list[Floats], Floats]:
    """Axes (the values of each column, ascending) and the full grid of `values` over them.

    Of equal points the median is taken. Cells that were not measured are filled along the axes
    `fill_along`, in that order: straight between their neighbours on that axis, and at last
    beyond them, from the two outermost.
    """
    axes = [np.unique(column) for column in columns]
    where = tuple(np.searchsorted(a, c) for a, c in zip(axes, columns, strict=True))
    shape = tuple(len(axis) for axis in axes)
    flat = np.ravel_multi_index(where, shape)
    order = np.lexsort((values, flat))
    cells, begins, counts = np.unique(flat[order], return_index=True, return_counts=True)
    below, above = (values[order[begins + k // 2]] for k in (counts - 1, counts))
    grid = np.full(shape, np.nan)
    grid.ravel()[cells] = (below + above) / 2
    for beyond in (False, True):
        for axis in fill_along:
            if not np.isnan(grid).any():
                break
            grid = _filled(grid, axes[axis], axis, beyond)
    return axes, grid


def _filled(grid: Floats, at: Floats, axis: int, beyond: bool) -> Floats:
    """`grid` with missing cells filled along one axis, in between or also beyond."""
    lines = np.moveaxis(grid, axis, -1).reshape(-1, len(at)).copy()
    for line in lines:
        known = np.flatnonzero(~np.isnan(line))
        if len(known) in (0, len(at)):
            continue
        missing = np.flatnonzero(np.isnan(line))
        inside = missing[(missing > known[0]) & (missing < known[-1])]
        line[inside] = np.interp(at[inside], at[known], line[known])
        if beyond:
            for outer, ends in (
                (missing[missing < known[0]], known[:2]),
                (missing[missing > known[-1]], known[-2:]),
            ):
                slope = np.ptp(line[ends]) and (line[ends[1]] - line[ends[0]])
                slope = slope / (at[ends[1]] - at[ends[0]]) if len(ends) > 1 else 0.0
                line[outer] = np.maximum(0.0, line[ends[0]] + slope * (at[outer] - at[ends[0]]))
    shape = [grid.shape[k] for k in range(grid.ndim) if k != axis] + [len(at)]
    return np.moveaxis(lines.reshape(shape), -1, axis)
