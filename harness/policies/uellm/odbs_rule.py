"""When a batch of SLO-ODBS closes.

Source: UELLM (see docs/papers.md), Algorithm 3-1, lines 5 to 12 and 20, Eq. 3-3 to 3-5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.policy import parameter

CLOSED_BY_SIZE, CLOSED_BY_CM = "closed_by_size", "closed_by_cm"
CLOSED_BY_THRESHOLD = "closed_by_threshold"
CLOSINGS = {
    CLOSED_BY_THRESHOLD: "batches that Total (Eq. 3-5) closed while requests waited",
    CLOSED_BY_CM: "batches that CM (line 20) closed below max_batch while requests waited",
    CLOSED_BY_SIZE: "batches of max_batch requests while others waited",
}


@dataclass(frozen=True)
class BatchRule:
    """A batch closes when Total = w1·T_l + w2·T_o (Eq. 3-5) would pass a threshold.

    T_l = (SLO + L_CM)·(n + 1)·L1 (Eq. 3-3) and T_o = (length ∓ O_CM)·(n + 1)·L2 (Eq. 3-4) for the
    request that would be the (n + 1)-th; L_CM and O_CM are the largest SLO (s) and predicted
    answer (tokens) of the batch. `slo_weight` is w1, `output_weight` w2, `slo_factor` L1,
    `output_factor` L2. Weights, factors and threshold default to the authors' public code.

    Where the text contradicts itself or is silent:

    - `length_term`: `signed` is line 6 (length - O_CM, negative for an answer shorter than the
      batch's, so that the batch never closes), `sum` is Eq. 3-4, `absolute` the padding that either
      adds.
    - `cm_weights`: `mended` is w1·SLO + w2·length as in line 7, `printed` is line 12, which swaps
      the weights. Line 20 ("adjust the batch size by CM") is: no more than
      max_batch · min(1, `cm_limit` / CM) requests, and at least one.
    """

    slo_weight: float = parameter(1.0, 0.0, 100.0)
    output_weight: float = parameter(0.5, 0.0, 100.0)
    slo_factor: float = parameter(1.2, 0.01, 100.0, log=True)
    output_factor: float = parameter(1.2, 0.01, 100.0, log=True)
    threshold: float = parameter(15_000.0, 1.0, 1e9, log=True)
    max_batch: int = parameter(32, 1, 4096, log=True)
    cm_limit: float = parameter(1_000.0, 1.0, 1e9, log=True)
    length_term: str = parameter("absolute", choices=("absolute", "signed", "sum"))
    cm_weights: str = parameter("mended", choices=("mended", "printed"))

    def total(
        self, length: int, slo_s: float, n: int, longest_slo_s: float, longest_output: int
    ) -> float:
        """Eq. 3-5's left side, lines 5 to 7."""
        if self.length_term == "absolute":
            term = abs(length - longest_output)
        else:
            signed = self.length_term == "signed"
            term = length - longest_output if signed else length + longest_output
        total_latency = (slo_s + longest_slo_s) * (n + 1) * self.slo_factor
        total_output = term * (n + 1) * self.output_factor
        return self.slo_weight * total_latency + self.output_weight * total_output

    def cm(self, length: int, slo_s: float) -> float:
        """Cost measure of the batch (line 12)."""
        if self.cm_weights == "printed":
            return self.slo_weight * length + self.output_weight * slo_s
        return self.slo_weight * slo_s + self.output_weight * length

    def most(self, cm: float) -> int:
        """Most requests of the batch (line 20)."""
        if cm <= self.cm_limit:
            return self.max_batch
        return max(1, int(self.max_batch * self.cm_limit / cm))


class OpenBatch:
    """A batch while it is being built. SLOs in seconds from arrival, infinite where none is."""

    __slots__ = ("_cm", "_longest_output", "_longest_slo_s", "_rule", "size")

    def __init__(self, rule: BatchRule) -> None:
        self._rule = rule
        self.size = 0
        self._longest_slo_s, self._longest_output, self._cm = 0.0, 0, 0.0

    def takes(self, output_tokens: int, slo_s: float) -> bool:
        """Whether the batch stays open with this request; an empty batch accepts any request."""
        return not self.closed_by(output_tokens, slo_s)

    def closed_by(self, output_tokens: int, slo_s: float) -> str:
        """The counter of what closes the batch before this request; empty if it stays open."""
        rule = self._rule
        if not self.size:
            return ""
        if self.size >= rule.max_batch:
            return CLOSED_BY_SIZE
        if self.size >= rule.most(self._cm):
            return CLOSED_BY_CM
        slo_s = slo_s if math.isfinite(slo_s) else 0.0
        longest = self._longest_slo_s, self._longest_output
        total = rule.total(output_tokens, slo_s, self.size, *longest)
        return CLOSED_BY_THRESHOLD if total > rule.threshold else ""

    def add(self, output_tokens: int, slo_s: float) -> None:
        """Add a request to the batch."""
        slo_s = slo_s if math.isfinite(slo_s) else 0.0
        self.size += 1
        self._longest_slo_s = max(self._longest_slo_s, slo_s)
        self._longest_output = max(self._longest_output, output_tokens)
        self._cm = max(self._cm, self._rule.cm(output_tokens, slo_s))
