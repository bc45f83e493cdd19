"""Power of a GPU by what it does: shares of its memory bandwidth and of its arithmetic in use.

Fitted to ML.ENERGY's measurements by `scripts/fit_power.py`, with the errors on models that were
left out (docs/accuracy.md).
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from .specs import GpuSpec


@dataclass(frozen=True)
class PowerModel:
    """Power of one GPU while it computes, as shares of its limit `limit_w`.

    constant + bandwidth * (share of the bandwidth) + compute * sqrt(share of the peak FLOP/s), at
    most 1. The root, because power grows fast with the first operations and then reaches the limit,
    where the clock falls.
    """

    limit_w: float
    constant: float
    bandwidth: float
    compute: float

    def watts(self, bandwidth_share: float, compute_share: float) -> float:
        """Watts at these shares of the data sheet's bandwidth and FLOP/s, both 0 to 1."""
        drawn = (
            self.constant
            + self.bandwidth * bandwidth_share
            + self.compute * math.sqrt(compute_share)
        )
        return self.limit_w * min(1.0, drawn)


def power_model(gpu: GpuSpec) -> PowerModel | None:
    """The fit of this GPU; None where its power was not measured."""
    fit = _fits().get(gpu.name)
    if fit is None:
        return None
    return PowerModel(gpu.power_w, fit["constant"], fit["bandwidth"], fit["compute"])


@cache
def _fits() -> dict[str, dict[str, float]]:
    text = (files(__package__) / "power.toml").read_text(encoding="utf-8")
    fits: dict[str, dict[str, float]] = tomllib.loads(text)
    return fits
