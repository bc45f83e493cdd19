"""Of one run: what its instances or models had over time, as means over equal spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_POINTS = 96
_MOVES = ("layers", "heads", "taught")
_SERIES = ("load", "requests", "kv_gib", "lengths")


@dataclass(frozen=True)
class Mechanism:
    """Of one cell: what each instance or model had over time, by what it is and whose; when
    modules moved; how long activations took, in seconds.
    """

    apart: Mapping[str, Mapping[str, tuple[Floats, Floats]]] = field(default_factory=dict)
    moved_s: tuple[float, ...] = ()
    activation_s: tuple[float, ...] = ()


def mechanism(told: pd.DataFrame | None) -> Mechanism:
    """What a cell's file tells, over at most 96 equal spans of time; None: there is no file."""
    if told is None:
        return Mechanism()
    end_s = float(told["time_s"].max()) or 1.0
    apart: dict[str, dict[str, tuple[Floats, Floats]]] = {}
    for what in _SERIES:
        own = told[told["what"] == what]
        if not own.empty:
            apart[what] = {
                str(of): _means(rows, end_s) for of, rows in own.groupby("of", observed=True)
            }
    moved = told.loc[told["what"].isin(_MOVES), "time_s"]
    activations = told.loc[told["what"] == "activation", "value"]
    return Mechanism(apart, tuple(moved.tolist()), tuple(activations.tolist()))


def _means(rows: pd.DataFrame, end_s: float) -> tuple[Floats, Floats]:
    """Means over equal spans. A value holds until the next sample, also over whole spans."""
    edges = np.linspace(0.0, end_s, _POINTS + 1)
    time_s, value = rows["time_s"].to_numpy(), rows["value"].to_numpy()
    grid = np.unique(np.concatenate([time_s, edges]))
    held = np.concatenate([[0.0], value])[np.searchsorted(time_s, grid[:-1], side="right")]
    area = np.concatenate([[0.0], np.cumsum(held * np.diff(grid))])
    at_edges = np.interp(edges, grid, area)
    return (edges[:-1] + edges[1:]) / 2, np.diff(at_edges) / np.diff(edges)
