"""A link from copies that were timed: seconds = latency + bytes / bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import SloBenchError
from .least_squares import non_negative
from .profile import MeasuredLink, Table

Floats = NDArray[np.float64]

LEAST_COPIES = 5
_HELD_OUT = 0.2


@dataclass(frozen=True)
class LinkFit:
    """The line through all copies, and relative errors on those kept out of a line of their own."""

    latency_s: float
    s_per_byte: float
    errors: Floats

    @property
    def link(self) -> MeasuredLink:
        """As a profile keeps it."""
        bandwidth = 1 / max(self.s_per_byte, 1e-15)
        return MeasuredLink(bandwidth, self.latency_s, float(100 * self.errors.mean()))


def fit_link(moved_bytes: Floats, seconds: Floats, rng: np.random.Generator) -> LinkFit:
    """Least relative squared error; a fifth of the copies, drawn at random, judge the line.

    Raises:
        SloBenchError: there are too few copies.
    """
    if len(moved_bytes) < LEAST_COPIES:
        raise SloBenchError(
            f"{len(moved_bytes)} copies are too few to learn from ({LEAST_COPIES} are needed)"
        )
    order = rng.permutation(len(moved_bytes))
    held = order[: max(1, round(_HELD_OUT * len(moved_bytes)))]
    kept = np.setdiff1d(order, held)
    latency_s, s_per_byte = _line(moved_bytes[kept], seconds[kept])
    errors = np.abs((latency_s + s_per_byte * moved_bytes[held]) / seconds[held] - 1)
    latency_s, s_per_byte = _line(moved_bytes, seconds)
    return LinkFit(latency_s, s_per_byte, errors)


def fit_links(tables: Mapping[str, Table], seed: int = 0) -> dict[str, MeasuredLink]:
    """`host` from the table `transfers`, `peer` from `moves`, where those are there."""
    found = {}
    for name, kind in (("host", "transfers"), ("peer", "moves")):
        if kind in tables and len(tables[kind]) >= LEAST_COPIES:
            table, rng = tables[kind], np.random.default_rng(seed)
            found[name] = fit_link(table["bytes"], table["time_us"] * 1e-6, rng).link
    return found


def _line(moved: Floats, seconds: Floats) -> tuple[float, float]:
    terms = np.column_stack([np.ones(len(moved)), moved]) / seconds[:, None]
    latency_s, s_per_byte = non_negative(terms, np.ones(len(moved))).tolist()
    return latency_s, s_per_byte
