"""Every model has a fixed part of a GPU's memory, and keeps it.

Source: the baseline S-Partition of Prism (see docs/papers.md), §7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.multi_model_policy import Fleet, Hosted
from ..core.policy import knob
from ..core.state import RequestState
from .shared.model_sharing import VllmSharing, by_load


@dataclass(frozen=True)
class StaticPartition(VllmSharing):
    """Models stand where `by_load` puts them; what KV memory a GPU has left is cut once.

    `shares`: `equal`, or by the `demand` for KV that the mean rates make. The paper says neither.
    Compute is shared as under Prism. A model that fits nowhere, and a request that its model's
    part could never hold, are rejected.
    """

    shares: str = knob("equal", choices=("equal", "demand"))

    def begin(self, fleet: Fleet) -> None:
        found = by_load(fleet.models, fleet)
        placed = [fleet.models[m] for m in found]
        left = [pool.free for pool in fleet.pools]
        for model in placed:
            for gpu in found[model.index]:
                left[gpu] -= model.weight_pages
        for model in placed:
            quota = min(
                int(left[gpu] * self._share(model, [m for m in placed if gpu in found[m.index]]))
                for gpu in found[model.index]
            )
            fleet.activate(model, found[model.index], quota_pages=quota, loaded=True)

    def _share(self, model: Hosted, beside: Sequence[Hosted]) -> float:
        if self.shares == "equal":
            return 1 / len(beside)
        total = sum(m.kv_demand for m in beside)
        return model.kv_demand / total if total else 1 / len(beside)

    def arrived(self, r: RequestState, model: int, fleet: Fleet) -> None:
        tenant = fleet.serving[model]
        if tenant is None or not fleet.could_hold(r, tenant):
            fleet.reject(r)
        else:
            fleet.send(r, tenant)
