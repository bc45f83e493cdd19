"""Models stay where they stand and share the rest of the GPU's memory.

Source: Duan et al., "MuxServe" (ICML 2024), as Prism (see docs/papers.md) ports it: MuxServe++ has
on-demand allocation in place of MuxServe's quotas, and evicts no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.counters import QUOTA_HITS
from ..core.multi_model_policy import MultiModelCluster
from ..core.policy import parameter
from .static_partition import StaticPartition


@dataclass(frozen=True)
class MuxServe(StaticPartition):
    """`memory = "on-demand"` is MuxServe++: any model may take any free page of its GPU.

    `quota` is MuxServe: a part by `shares`, here by demand, for as long as the server runs (it
    adapts its quotas from time to time; that is not built). Requests go to the engines as they
    come, first come first served.
    """

    on_servers: ClassVar[bool] = False  # quotas of servers do not end

    shares: str = parameter("demand", choices=("equal", "demand"))
    memory: str = parameter("on-demand", choices=("on-demand", "quota"))

    def mechanisms(self) -> dict[str, str]:
        descriptions = super().mechanisms()
        if self.memory == "on-demand":
            del descriptions[QUOTA_HITS]
        return descriptions

    def begin(self, cluster: MultiModelCluster) -> None:
        super().begin(cluster)
        if self.memory == "on-demand":
            for model_instance in cluster.model_instances:
                model_instance.kv_manager.quota_blocks = None
