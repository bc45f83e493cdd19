"""What a placement of modules is worth.

Source: BanaServe (docs/papers.md), §4.4.1, Eq. 4-15 and 4-16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObjectiveWeights:
    """alpha, beta and gamma of Eq. 4-15; the paper gives no values.

    Of a full GPU, of a second of latency, and of a thousand tokens a second.
    """

    utilisation: float = 1.0
    per_s: float = 1.0
    per_thousand_tokens_per_s: float = 1.0


@dataclass(frozen=True, slots=True)
class BanaServeObjective:
    """Eq. 4-15 and its parts. The two latencies are of very unlike size, so both are reported."""

    utilisation: float  # mean over GPUs
    ttft_s: float  # mean over requests
    tpot_s: float  # mean over requests that have one
    tokens_per_s: float
    weights: ObjectiveWeights = ObjectiveWeights()

    @property
    def latency_s(self) -> float:
        """Eq. 4-16: TTFT and TPOT added up."""
        return self.ttft_s + self.tpot_s

    @property
    def value(self) -> float:
        """Eq. 4-15: the more the better."""
        w = self.weights
        return (
            w.utilisation * self.utilisation
            - w.per_s * self.latency_s
            + w.per_thousand_tokens_per_s * self.tokens_per_s / 1000
        )


def of_run(row: Mapping[str, float]) -> float:
    """Eq. 4-15 with all weights 1, of the figures of one run by the names of their columns."""
    tpot_s = row["tpot_mean_s"]
    return BanaServeObjective(
        row["mfu"],
        row["ttft_mean_s"],
        0.0 if math.isnan(tpot_s) else tpot_s,
        row["output_tokens_per_s"],
    ).value
