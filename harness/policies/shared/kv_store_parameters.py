"""KV stores sized by parameters, and the KV cache managers of the instances that share them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....predictors.placement import Placement
from ....predictors.specs import GIB, LinkSpec
from ...core.kv.kv_cache_manager import KVCacheManager
from ...core.kv.kv_store import KvStore, TierSpec
from ...core.kv.kv_store_manager import StoreKVCacheManager

SSD = LinkSpec("ssd", bandwidth_bytes_per_s=5e9, latency_s=100e-6, origin="an NVMe disk (estimate)")
GPUS_PER_NODE = 8  # at most; they share one disk


@dataclass
class SharedStoreLedgers:
    """Makes the KV cache managers of instances that share one store: host memory, and a disk below
    it.

    `cpu_gib` and `ssd_gib` are for the whole store. A GPU reads host memory over its host link; a
    disk gives 5 GB/s, of which each GPU of its node has the same share. With several GPUs an
    instance, each reads its own part.
    """

    placement: Placement
    instances: int
    cpu_gib: float
    ssd_gib: float
    store: KvStore | None = None

    def __call__(
        self,
        total: int,
        block_size: int = 16,
        host_total: int = 0,
        prefix_block_size: int = 0,
    ) -> KVCacheManager:
        """A KV cache manager on the shared store; without prefix cache a plain one."""
        plain = KVCacheManager(total, block_size, host_total, prefix_block_size)
        if not plain.unit_blocks:
            return plain
        if self.store is None:
            gpus = self.placement.gpus
            sharing = min(GPUS_PER_NODE, self.instances * gpus)
            ssd = replace(SSD, bandwidth_bytes_per_s=SSD.bandwidth_bytes_per_s / sharing)
            tiers = [
                TierSpec("CPU", int(self.cpu_gib * GIB / gpus), self.placement.host_link),
                TierSpec("SSD", int(self.ssd_gib * GIB / gpus), ssd),
            ]
            unit_bytes = plain.unit_blocks * self.placement.block_bytes_per_gpu
            self.store = KvStore(tiers, unit_bytes)
        return StoreKVCacheManager(self.store, total, block_size, host_total, prefix_block_size)
