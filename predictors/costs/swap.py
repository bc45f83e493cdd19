"""Swap costs: KV bytes over the two bandwidths (AdaptiveLLM, Eqs. 2 to 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import SloBenchError
from ..placement import Placement
from ..profiles.link_fit import LEAST_COPIES, fit_link
from ..profiles.profile import Profile, Table
from .grid import Swap

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SwapFit:
    """Both directions, what they rest on, and the error on copies kept out (NaN: none measured)."""

    out: Swap
    into: Swap
    measured: bool
    held_out_percent: float
    source: str


def swap_costs(profile: Profile, placement: Placement, rng: np.random.Generator) -> SwapFit:
    """From the profile's measured copies (table `transfers`), else the catalogue's host link.

    Under tensor parallelism every GPU moves its own heads at once; pipeline parallelism is priced
    as a single node (AdaptiveLLM, §6): the bytes of all layers over one link.

    Raises:
        SloBenchError: a direction has too few copies.
    """
    token_bytes = placement.kv_bytes_per_token / placement.tp
    table = profile.tables.get("transfers")
    if table is None:
        link = placement.host_link
        swap = Swap(link.latency_s, token_bytes / link.bandwidth_bytes_per_s)
        source = f"not measured: the catalogue's {link.name}, {link.origin}"
        return SwapFit(swap, swap, False, math.nan, source)
    out, out_errors = _direction(table, "to-host", token_bytes, rng)
    into, in_errors = _direction(table, "to-gpu", token_bytes, rng)
    percent = float(100 * np.concatenate([out_errors, in_errors]).mean())
    return SwapFit(out, into, True, percent, "copies in the profile's table transfers")


def _direction(
    table: Table, direction: str, token_bytes: float, rng: np.random.Generator
) -> tuple[Swap, Floats]:
    """Latency and bandwidth with the least relative squared error, and errors on a fifth of the
    copies, kept out of a fit of their own.
    """
    chosen = table.words["direction"] == direction
    moved, seconds = table["bytes"][chosen], table["time_us"][chosen] * 1e-6
    if len(moved) < LEAST_COPIES:
        raise SloBenchError(
            f"the table transfers has {len(moved)} copies {direction}, too few to learn from "
            f"({LEAST_COPIES} are needed; directions are to-host and to-gpu)"
        )
    found = fit_link(moved, seconds, rng)
    return Swap(found.latency_s, found.s_per_byte * token_bytes), found.errors
