"""Mooncake: a pool of KV over all hosts, prefill where the first token would come first.

Source: Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving" (FAST
2025), §5 and §6, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...predictors.placement import Placement
from ..core.cluster_policy import HOLD, REJECT, Instead, View
from ..core.instance import Site
from ..core.kv_cache_manager import BlockLedger
from ..core.policy import knob
from ..core.state import RequestState
from .shared.disaggregated import PREFILL, Apart
from .shared.instance_load import queued_tokens
from .shared.kv_store_parameters import Shelf


@dataclass(frozen=True)
class Mooncake(Apart):
    """Each prefill instance's time to first token is estimated: queue, what it must load, what it
    must compute, given the prefix on its own GPU and in the pool; the least wins.

    The pool is host memory (`store_cpu_gib` an instance) and disks (`store_ssd_gib`); new KV is
    written to memory, the least recently used goes to disk. `early_reject`: a request whose
    estimate exceeds its TTFT SLO is refused (§7; off, as other systems refuse nobody).

    Deviates: the pool is one store that every GPU reads over its own host link, so that hot blocks
    need no copies on several hosts.
    """

    store_cpu_gib: float = knob(64.0, 0.0, 4096.0)
    store_ssd_gib: float = knob(512.0, 0.0, 65536.0)
    early_reject: bool = knob(False)

    def ledgers(self, placement: Placement, instances: int) -> Callable[..., BlockLedger]:
        return Shelf(placement, self.store_cpu_gib * instances, self.store_ssd_gib * instances)

    def dispatch(self, r: RequestState, cluster: View) -> Site | Instead:
        sites = cluster.role(PREFILL)
        if not sites:
            return HOLD
        ttft_s, _, best = min((estimated_ttft_s(r, site), site.index, site) for site in sites)
        if self.early_reject and ttft_s > r.slo.ttft_s:
            return REJECT
        return best


def estimated_ttft_s(r: RequestState, site: Site) -> float:
    """Queue, then loading or computing, whichever is longer: they run side by side."""
    queue_s = queued_tokens(site) * site.sizes.s_per_token
    ledger = site.ledger
    cached, load_s = 0, 0.0
    if ledger.unit_tokens:
        units = ledger.match_units(r)
        cached, load_s = units * ledger.unit_tokens, ledger.load_s(r, units)
    compute_s = site.step_time.step_s(0, 0, ((cached, r.target_tokens - cached),))
    return queue_s + max(load_s, compute_s)
