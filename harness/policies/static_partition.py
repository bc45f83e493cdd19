"""Every model has a fixed part of a GPU's memory, and keeps it.

Source: the baseline S-Partition of Prism (see docs/papers.md), §7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.counters import QUOTA_HITS, REJECTIONS
from ..core.multi_model_policy import MultiModelCluster, ServedModel
from ..core.policy import parameter
from ..core.state import RequestState
from .shared.model_sharing import VllmSharing, by_load


@dataclass(frozen=True)
class StaticPartition(VllmSharing):
    """Models stand where `by_load` puts them; what KV memory a GPU has left is cut once.

    `shares`: `equal`, or by the `demand` for KV that the mean rates make. The paper says neither.
    Compute is shared as under Prism. A model that fits nowhere, and a request that its model's
    part could never hold, are rejected.
    """

    on_servers: ClassVar[bool] = True

    shares: str = parameter("equal", choices=("equal", "demand"))

    def mechanisms(self) -> dict[str, str]:
        return {
            QUOTA_HITS: "preemptions and waits by a model's part while memory was free",
            REJECTIONS: "requests that fit no model's part",
        }

    def begin(self, cluster: MultiModelCluster) -> None:
        gpus_of = by_load(cluster.models, cluster)
        placed = [cluster.models[m] for m in gpus_of]
        left = [pool.free for pool in cluster.pools]
        for model in placed:
            for gpu in gpus_of[model.index]:
                left[gpu] -= model.weight_pages
        for model in placed:
            quota = min(
                int(left[gpu] * self._share(model, [m for m in placed if gpu in gpus_of[m.index]]))
                for gpu in gpus_of[model.index]
            )
            cluster.activate(model, gpus_of[model.index], quota_pages=quota, loaded=True)

    def _share(self, model: ServedModel, beside: Sequence[ServedModel]) -> float:
        if self.shares == "equal":
            return 1 / len(beside)
        total = sum(m.kv_demand for m in beside)
        return model.kv_demand / total if total else 1 / len(beside)

    def arrived(self, r: RequestState, model: int, cluster: MultiModelCluster) -> None:
        model_instance = cluster.serving[model]
        if model_instance is None or not cluster.could_hold(r, model_instance):
            cluster.reject(r)
        else:
            cluster.send(r, model_instance)
