"""Power of a simulated run, and what an output token and a request in SLO cost in J and USD."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...predictors.power import PowerModel
from ..core.records.request_records import Totals


@dataclass(frozen=True)
class Energy:
    """What the power of an instance's GPUs, all of one kind, depends on.

    `weight_bytes` and `kv_bytes` (all that fits) are those of one instance, `bandwidth` is bytes a
    second of one GPU.
    """

    power: PowerModel
    weight_bytes: float
    kv_bytes: float
    bandwidth: float

    def mean_w(self, totals: Totals, operations: float, peak_flops: float) -> float:
        """Mean watts of all GPUs over the run; those that wait count as none.

        A step reads the weights once and the KV in use; `operations` are those of the whole run,
        `peak_flops` that of one GPU.
        """
        if not (totals.gpu_busy_s > 0 and totals.makespan_s > 0):
            return math.nan
        moved = totals.steps * (self.weight_bytes + totals.kv_cache_usage_mean * self.kv_bytes)
        watts = self.power.watts(
            min(1.0, moved / (self.bandwidth * totals.gpu_busy_s)),
            min(1.0, operations / (peak_flops * totals.gpu_busy_s)),
        )
        return watts * totals.gpu_busy_s / totals.makespan_s


def unit_costs(row: Mapping[str, Any]) -> dict[str, float]:
    """Joules and dollars per output token and request in SLO, from a row of `cells.csv`.

    Power and price times the time per token or request; NaN where one of them is not known.
    """
    tokens_per_s, makespan_s = row["output_tokens_per_s"], row["makespan_s"]
    met_per_s = row["attainment"] * row["requests"] / makespan_s if makespan_s > 0 else 0.0
    costs = {}
    for unit, column, factor in (("joules", "gpu_power_mean_w", 1.0), ("usd", _PRICE, 1 / 3600)):
        per_s = row[column]
        per_s = math.nan if per_s is None else per_s * factor
        for denominator, rate in (("output_token", tokens_per_s), ("slo_request", met_per_s)):
            costs[f"{unit}_per_{denominator}"] = per_s / rate if rate > 0 else math.nan
    return costs


_PRICE = "cost_usd_per_hour"
