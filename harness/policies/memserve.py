"""MemServe: a memory pool on every prefill instance, requests follow their prefix.

Source: Hu et al., "MemServe: Context Caching for Disaggregated LLM Serving with Elastic Memory
Pool" (2024), §4 to §6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...predictors.placement import Placement
from ..core.cluster_policy import HOLD, Instead, Role, View
from ..core.instance import Site
from ..core.kv_cache_manager import BlockLedger
from ..core.kv_store_manager import StoreLedger, Units
from ..core.policy import AnyPolicy, knob
from ..core.routing import least_loaded
from ..core.state import RequestState
from .routers import PrefixAware
from .shared.disaggregated import DECODE, PREFILL, Apart
from .shared.kv_store_parameters import Shelf


class _AtHome(StoreLedger):
    """Of a prefill instance: remembers whose KV began here."""

    __slots__ = ("_homes",)

    def __init__(self, homes: dict[int, Units], ledger: StoreLedger) -> None:
        super().__init__(
            ledger.store,
            ledger.total,
            ledger.block_tokens,
            ledger.host_total,
            ledger.unit_tokens // ledger.stride,
        )
        self._homes = homes

    def publish(self, r: RequestState, kv_tokens: int) -> None:
        super().publish(r, kv_tokens)
        self._homes[r.id] = self.store


class _Away(BlockLedger):
    """Of a decode instance: what is computed here is sent back to where the prompt was computed."""

    __slots__ = ("_homes",)

    def __init__(self, homes: dict[int, Units], ledger: BlockLedger) -> None:
        super().__init__(
            ledger.total,
            ledger.block_tokens,
            ledger.host_total,
            ledger.unit_tokens // ledger.stride,
        )
        self._homes = homes

    def publish(self, r: RequestState, kv_tokens: int) -> None:
        home = self._homes.get(r.id)
        if home is not None:
            units = r.prefix_blocks[self.stride - 1 :: self.stride]
            home.put(reversed(units[: kv_tokens // self.unit_tokens]))
        super().publish(r, kv_tokens)


@dataclass(frozen=True)
class MemServe(Apart):
    """Each prefill instance has a pool in its host's memory (`store_cpu_gib`), which gets the KV of
    answers back when they end, so that the next turn of a conversation finds all of it.

    A request goes where most of its prefix is, on the GPU or in the pool, unless the loads are out
    of balance: then, or with no more than half of it anywhere, where the fewest are.

    Deviates: what is sent back costs no time on the link. The pool's unused memory is not lent from
    prefill to decode instances. When loads are out of balance is taken from SGLang's router.
    """

    store_cpu_gib: float = knob(64.0, 0.0, 4096.0)

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        prefill, decode = self.counts(instances)
        homes: dict[int, Units] = {}

        def at_home(*size: int) -> BlockLedger:
            ledger = Shelf(placement, self.store_cpu_gib, 0.0)(*size)
            return _AtHome(homes, ledger) if isinstance(ledger, StoreLedger) else ledger

        def away(*size: int) -> BlockLedger:
            ledger = BlockLedger(*size)
            return _Away(homes, ledger) if ledger.unit_tokens else ledger

        return (
            Role(PREFILL, policy, prefill, hands_over=True, ledger=at_home),
            Role(DECODE, policy, decode, ledger=away),
        )

    def dispatch(self, r: RequestState, cluster: View) -> Site | Instead:
        sites = cluster.role(PREFILL)
        if not sites:
            return HOLD
        apart = PrefixAware.out_of_balance(sites)
        cached = [_cached_tokens(r, site) for site in sites]
        if apart or max(cached) <= PrefixAware.MATCH_SHARE * r.prompt_tokens:
            return least_loaded(sites)
        return sites[cached.index(max(cached))]


def _cached_tokens(r: RequestState, site: Site) -> int:
    ledger = site.ledger
    return ledger.match_units(r) * ledger.unit_tokens if ledger.unit_tokens else 0
