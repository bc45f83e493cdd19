"""A link from copies that were timed: seconds = latency + bytes / bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import SloBenchError
from .least_squares import non_negative
from .profile import MeasuredLink, ProfileTable

Floats = NDArray[np.float64]

LEAST_COPIES = 5
DIRECTIONS = ("to-host", "to-gpu")
_PARTS = 5


@dataclass(frozen=True)
class LinkFit:
    """The line through all copies, and each one's relative error under a line without it."""

    latency_s: float
    s_per_byte: float
    errors: Floats

    @property
    def link(self) -> MeasuredLink:
        """The link in the form of a profile."""
        bandwidth = 1 / max(self.s_per_byte, 1e-15)
        return MeasuredLink(bandwidth, self.latency_s, float(100 * self.errors.mean()))


def fit_link(moved_bytes: Floats, seconds: Floats, rng: np.random.Generator) -> LinkFit:
    """Least relative squared error. Each fifth of the copies, drawn at random, judges a line
    through the others.

    Raises:
        SloBenchError: there are too few copies.
    """
    if len(moved_bytes) < LEAST_COPIES:
        raise SloBenchError(
            f"{len(moved_bytes)} copies are too few to learn from ({LEAST_COPIES} are needed)"
        )
    order = rng.permutation(len(moved_bytes))
    errors = []
    for held in np.array_split(order, _PARTS):
        kept = np.setdiff1d(order, held)
        latency_s, s_per_byte = _line(moved_bytes[kept], seconds[kept])
        errors.append(np.abs((latency_s + s_per_byte * moved_bytes[held]) / seconds[held] - 1))
    latency_s, s_per_byte = _line(moved_bytes, seconds)
    return LinkFit(latency_s, s_per_byte, np.concatenate(errors))


def fit_direction(transfers: ProfileTable, direction: str, rng: np.random.Generator) -> LinkFit:
    """Copies of a table `transfers` in one of `DIRECTIONS`.

    Raises:
        SloBenchError: there are too few of them.
    """
    chosen = transfers.words["direction"] == direction
    moved, seconds = transfers["bytes"][chosen], transfers["time_us"][chosen] * 1e-6
    if len(moved) < LEAST_COPIES:
        raise SloBenchError(
            f"the table transfers has {len(moved)} copies {direction}, too few to learn from "
            f"({LEAST_COPIES} are needed; directions are {' and '.join(DIRECTIONS)})"
        )
    return fit_link(moved, seconds, rng)


def fit_links(tables: Mapping[str, ProfileTable], seed: int = 0) -> dict[str, MeasuredLink]:
    """`host` from the table `transfers`, `peer` from `moves`, where those are there."""
    found = {}
    for name, kind in (("host", "transfers"), ("peer", "moves")):
        if kind in tables and len(tables[kind]) >= LEAST_COPIES:
            table, rng = tables[kind], np.random.default_rng(seed)
            found[name] = fit_link(table["bytes"], table["time_us"] * 1e-6, rng).link
    return found


def fit_directions(tables: Mapping[str, ProfileTable], seed: int = 0) -> dict[str, MeasuredLink]:
    """The table `transfers` by direction, where there are enough copies."""
    table = tables.get("transfers")
    if table is None:
        return {}
    directions = table.words["direction"]
    known = [name for name in DIRECTIONS if np.count_nonzero(directions == name) >= LEAST_COPIES]
    return {name: fit_direction(table, name, np.random.default_rng(seed)).link for name in known}


def _line(moved: Floats, seconds: Floats) -> tuple[float, float]:
    terms = np.column_stack([np.ones(len(moved)), moved]) / seconds[:, None]
    latency_s, s_per_byte = non_negative(terms, np.ones(len(moved))).tolist()
    return latency_s, s_per_byte
