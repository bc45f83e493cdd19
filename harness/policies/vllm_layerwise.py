"""vLLM that loads and stores KV layer by layer, in parallel to the computation.

Source: BanaServe (docs/papers.md), §4.3.3; Mooncake (Qin et al., FAST 2025), §5.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...predictors.placement import Placement
from ..core.decisions import Limits
from ..core.policy import AnyPolicy
from ..core.view import View
from .vllm import Vllm


@dataclass(frozen=True)
class LayerwiseVllm(Vllm):
    """Schedules as vLLM does; copies lengthen a step by the first layer, and by what exceeds its
    computation (see `Limits.overlap_swap`).
    """

    layers: int = 0
    store_s_per_token: float = 0.0

    def limits(self, view: View) -> Limits:
        return replace(
            super().limits(view),
            overlap_swap=True,
            layers=self.layers,
            store_s_per_token=self.store_s_per_token,
        )


def with_store(policy: AnyPolicy, placement: Placement) -> AnyPolicy:
    """`policy` on instances that write the KV of prompts to a store in host memory; each GPU writes
    its part. Policies that do not know layers stay as they are.
    """
    if not isinstance(policy, LayerwiseVllm):
        return policy
    each_s = placement.kv_bytes_per_token / placement.gpus
    each_s /= placement.host_link.bandwidth_bytes_per_s
    return replace(policy, layers=placement.model.layers, store_s_per_token=each_s)
