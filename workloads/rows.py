"""Some rows of a workload, with other arrivals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .prefixes import SessionBlocks
from .workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def take(workload: Workload, rows: Ints, arrival_s: Floats) -> Workload:
    """Select these rows in this order, with these arrival times. A request whose predecessor is
    left out, or comes later, no longer waits for it.
    """
    if len(rows) == len(workload) and (rows == np.arange(len(rows))).all():
        return dataclasses.replace(workload, arrival_s=arrival_s)
    columns: dict[str, Any] = {
        f.name: getattr(workload, f.name)[rows]
        for f in dataclasses.fields(workload)
        if isinstance(getattr(workload, f.name), np.ndarray)
    }
    where = np.full(len(workload) + 1, -1, dtype=np.int64)
    where[rows] = np.arange(len(rows))
    follows = where[columns["follows"]]
    columns["follows"] = np.where(follows < np.arange(len(rows)), follows, -1)
    columns["arrival_s"] = arrival_s
    blocks = workload.prefix_blocks
    if isinstance(blocks, SessionBlocks):
        columns["prefix_blocks"] = blocks.take(rows)
    elif blocks is not None:
        columns["prefix_blocks"] = [blocks[row] for row in rows]
    if workload.texts is not None:
        columns["texts"] = [workload.texts[row] for row in rows]
    return dataclasses.replace(workload, **columns)
