"""Mooncake: a pool of KV over all hosts, prefill where the first token would come first.

Source: Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving" (FAST
2025), §5 and §6, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...predictors.placement import Placement
from ..core.cluster_policy import HOLD, INF, MANY, REJECT, ClusterView, Role, RouteOutcome
from ..core.counters import REJECTIONS, STORE_HITS
from ..core.instance import Instance
from ..core.kv.kv_cache_manager import KVCacheManager
from ..core.kv.layer_pipeline import pipeline_s
from ..core.policy import AnyPolicy, parameter
from ..core.state import RequestState
from .shared.disaggregated import PREFILL, DisaggregatedPolicy
from .shared.instance_load import queued_tokens
from .shared.kv_store_parameters import SharedStoreLedgers
from .vllm_layerwise import with_store


@dataclass(frozen=True)
class Mooncake(DisaggregatedPolicy):
    """Each prefill instance's time to first token is estimated: queue, what it must load, what it
    must compute, given the prefix on its own GPU and in the pool; the smallest estimate wins.

    The pool is host memory (`store_cpu_gib` an instance) and disks (`store_ssd_gib`); new KV is
    written to memory, the least recently used goes to disk. `early_reject`: a request whose
    estimate exceeds its TTFT SLO is rejected (§7; off by default, as other systems reject none).

    Deviates: the pool is one store that every GPU reads over its own host link, so that popular
    blocks need no copies on several hosts.
    """

    store_cpu_gib: float = parameter(64.0, 0.0, 4096.0)
    store_ssd_gib: float = parameter(512.0, 0.0, 65536.0)
    early_reject: bool = parameter(False)

    @property
    def drop_rule(self) -> str:
        return "its estimated TTFT exceeds its SLO" if self.early_reject else ""

    def mechanisms(self) -> dict[str, str]:
        descriptions = super().mechanisms() | {STORE_HITS: "requests with prefix KV from the pool"}
        if self.early_reject:
            descriptions[REJECTIONS] = "requests whose estimated TTFT exceeded their SLO"
        return descriptions

    def kv_managers(self, placement: Placement, instances: int) -> Callable[..., KVCacheManager]:
        return SharedStoreLedgers(
            placement, instances, self.store_cpu_gib * instances, self.store_ssd_gib * instances
        )

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        return super().layout(with_store(policy, placement), placement, instances)

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        instances = cluster.role(PREFILL)
        if not instances:
            return HOLD
        first = instances[0]
        alike_but_queues = not first.kv_manager.unit_tokens
        if alike_but_queues and len(instances) == 1 and not self.early_reject:
            return first
        if alike_but_queues and len(instances) >= MANY:
            queued_s = cluster.kept(queued_tokens, PREFILL) * first.sizes.s_per_token
            estimates_s = queued_s + prefill_s(r, first, 0, 0.0)
            place = int(estimates_s.argmin())
            return self._unless_late(r, float(estimates_s[place]), instances[place])
        ttft_s, best = INF, first
        alike: Instance | None = None  # the one that `own_s` was worked out for
        last_prefix, own_s = (0, 0.0), 0.0
        for instance in instances:
            prefix = found_prefix(r, instance)
            if alike is None or prefix != last_prefix or instance.step_time is not alike.step_time:
                alike, last_prefix, own_s = instance, prefix, prefill_s(r, instance, *prefix)
            estimate_s = queued_tokens(instance) * instance.sizes.s_per_token + own_s
            if estimate_s < ttft_s or (estimate_s == ttft_s and instance.index < best.index):
                ttft_s, best = estimate_s, instance
        return self._unless_late(r, ttft_s, best)

    def _unless_late(
        self, r: RequestState, ttft_s: float, instance: Instance
    ) -> Instance | RouteOutcome:
        return REJECT if self.early_reject and ttft_s > r.slo.ttft_s else instance


def found_prefix(r: RequestState, instance: Instance) -> tuple[int, float]:
    """Tokens of `r` that the instance need not compute, and seconds to load their KV."""
    kv_manager = instance.kv_manager
    if not kv_manager.unit_tokens:
        return 0, 0.0
    units = kv_manager.get_computed_blocks(r)
    return units * kv_manager.unit_tokens, kv_manager.load_s(r, units)


def prefill_s(r: RequestState, instance: Instance, cached: int, load_s: float) -> float:
    """Loading and computing, layer by layer side by side."""
    compute_s = instance.step_time.step_s(0, 0, ((cached, r.target_tokens - cached),))
    return pipeline_s(instance.placement.model.layers, load_s, compute_s)
