"""MemServe: a memory pool on every prefill instance, requests follow their prefix.

Source: Hu et al., "MemServe: Context Caching for Disaggregated LLM Serving with Elastic Memory
Pool" (2024), §4 to §6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...predictors.placement import Placement
from ..core.cluster_policy import HOLD, ClusterView, Role, RouteOutcome, least_loaded
from ..core.counters import STORE_HITS
from ..core.instance import Instance
from ..core.kv.kv_cache_manager import KVCacheManager
from ..core.kv.kv_store_manager import StoreKVCacheManager, Units
from ..core.policy import AnyPolicy, parameter
from ..core.state import RequestState
from .routers import PrefixAware
from .shared.disaggregated import DECODE, PREFILL, DisaggregatedPolicy
from .shared.kv_store_parameters import SharedStoreLedgers


class _HomeKVCacheManager(StoreKVCacheManager):
    """KV store of a prefill instance that remembers which requests' KV began there."""

    __slots__ = ("_homes",)

    def __init__(self, homes: dict[int, Units], kv_manager: StoreKVCacheManager) -> None:
        super().__init__(
            kv_manager.store,
            kv_manager.total,
            kv_manager.block_size,
            kv_manager.host_total,
            kv_manager.unit_tokens // kv_manager.stride,
        )
        self._homes = homes

    def cache_blocks(self, r: RequestState, kv_tokens: int) -> None:
        super().cache_blocks(r, kv_tokens)
        self._homes[r.id] = self.store


class _Away(KVCacheManager):
    """Of a decode instance: what is computed here is sent back to where the prompt was computed."""

    __slots__ = ("_homes",)

    def __init__(self, homes: dict[int, Units], *size: int) -> None:
        super().__init__(*size)
        self._homes = homes

    def cache_blocks(self, r: RequestState, kv_tokens: int) -> None:
        home = self._homes.get(r.id)
        if home is not None:
            units = r.prefix_blocks[self.stride - 1 :: self.stride]
            home.put(reversed(units[: kv_tokens // self.unit_tokens]))
        super().cache_blocks(r, kv_tokens)


@dataclass(frozen=True)
class MemServe(DisaggregatedPolicy):
    """Each prefill instance has a pool in its host's memory (`store_cpu_gib`), which gets the KV of
    answers back when they end, so that the next turn of a conversation finds all of it.

    A request goes where most of its prefix is, on the GPU or in the pool, unless the loads are out
    of balance: then, or with no more than half of it anywhere, where the fewest are.

    Deviates: what is sent back costs no time on the link. The pool's unused memory is not lent from
    prefill to decode instances. When loads are out of balance is taken from SGLang's router.
    """

    store_cpu_gib: float = parameter(64.0, 0.0, 4096.0)

    def mechanisms(self) -> dict[str, str]:
        return super().mechanisms() | {
            STORE_HITS: "requests with prefix KV from a pool",
            "prefix_routes": "requests sent to the instance with most of their prefix",
        }

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        prefill, decode = self.counts(instances)
        homes: dict[int, Units] = {}

        def at_home(*size: int) -> KVCacheManager:
            kv_manager = SharedStoreLedgers(placement, 1, self.store_cpu_gib, 0.0)(*size)
            if isinstance(kv_manager, StoreKVCacheManager):
                return _HomeKVCacheManager(homes, kv_manager)
            return kv_manager

        def away(*size: int) -> KVCacheManager:
            kv_manager = _Away(homes, *size)
            return kv_manager if kv_manager.unit_tokens else KVCacheManager(*size)

        return (
            Role(PREFILL, policy, prefill, prefill_only=True, kv_manager=at_home),
            Role(DECODE, policy, decode, kv_manager=away),
        )

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        instances = cluster.role(PREFILL)
        if not instances:
            return HOLD
        apart = PrefixAware.out_of_balance(instances)
        cached = [_cached_tokens(r, instance) for instance in instances]
        if apart or max(cached) <= PrefixAware.MATCH_SHARE * r.prompt_tokens:
            return least_loaded(instances)
        cluster.counters.add("prefix_routes", r)
        return instances[cached.index(max(cached))]


def _cached_tokens(r: RequestState, instance: Instance) -> int:
    tokens = instance.kv_manager.unit_tokens
    return instance.kv_manager.get_computed_blocks(r) * tokens if tokens else 0
