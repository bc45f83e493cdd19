"""Splitwise: fixed pools of prompt and token machines, KV sent layer by layer.

Source: Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting" (ISCA
2024), §4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.cluster_policy import HOLD, ClusterView, RouteOutcome
from ..core.instance import Instance, Links
from ..core.state import RequestState
from .shared.disaggregated import PREFILL, DisaggregatedPolicy
from .shared.instance_load import queued_tokens
from .shared.kv_transfer import KvNetwork


class LayerWise(KvNetwork):
    """A layer's KV leaves as soon as it is computed: only the last layer's is left at the end.

    The transfer occupies the link as if it had begun so much earlier.
    """

    def ends_s(self, source: Instance, target: Instance, kv_tokens: int, now_s: float) -> float:
        moved_bytes = self.bytes_on_a_link(source, target, kv_tokens)
        layers = source.placement.model.layers
        ahead_s = moved_bytes / self.network.spec.bandwidth_bytes_per_s * (layers - 1) / layers
        end_s = self.network.send(source.number, target.number, moved_bytes, now_s - ahead_s)
        return max(now_s, end_s)


@dataclass(frozen=True)
class Splitwise(DisaggregatedPolicy):
    """Join the shortest queue: of prompts by pending tokens, of answers by requests (§4.3).

    Deviates: the pools are fixed; machines that change sides when a pool overflows (the mixed
    pool) are left out. A token machine is chosen when the prompt is in, not before.
    """

    def links(self, instances: Sequence[Instance]) -> Links:
        return LayerWise(self.over(instances[0].placement))

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        instances = cluster.role(PREFILL)
        return min(instances, key=lambda s: (queued_tokens(s), s.index)) if instances else HOLD
