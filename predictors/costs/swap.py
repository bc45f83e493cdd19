"""Swap costs: KV bytes over the two bandwidths (AdaptiveLLM, Eqs. 2 to 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..placement import Placement
from ..profiles.link_fit import DIRECTIONS, fit_direction
from ..profiles.profile import Profile
from .grid import Swap


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
    lines = [fit_direction(table, direction, rng) for direction in DIRECTIONS]
    out, into = (Swap(line.latency_s, line.s_per_byte * token_bytes) for line in lines)
    percent = float(100 * np.concatenate([line.errors for line in lines]).mean())
    return SwapFit(out, into, True, percent, "copies in the profile's table transfers")
