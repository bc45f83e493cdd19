"""DistServe: prompts on some instances, answers on others, KV goes over between them.

Source: Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large
Language Model Serving" (OSDI 2024), §3 and §4.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.cluster_policy import OnServers, ServerRole
from ..core.policy import AnyPolicy
from .shared.disaggregated import DECODE, PREFILL, DisaggregatedPolicy


@dataclass(frozen=True)
class DistServe(DisaggregatedPolicy):
    """First come, first served everywhere; each request goes where the fewest are (§4.3).

    Deviates: every instance schedules as vLLM does, where the paper batches prompts up to a length
    that saturates the GPU. All instances are placed alike. There is one real server of each
    kind unless more are set.
    """

    def on_servers(self, policy: AnyPolicy) -> OnServers:
        return OnServers(
            (
                ServerRole(PREFILL, max(1, self.prefill_instances)),
                ServerRole(DECODE, max(1, self.decode_instances)),
            ),
            ("prefill_instances", "decode_instances"),
            splits=True,
        )
