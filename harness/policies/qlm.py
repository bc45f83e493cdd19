"""One model at a time on a GPU: groups of requests wait for their turn, and models are swapped.

Source: Patke et al., "Queue Management for SLO-Oriented Large Language Model Serving" (SoCC 2024),
as a baseline of Prism (see docs/papers.md), §3.2 and §7.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...predictors.activation import NaiveStart
from ..core.counters import OVERTAKES
from ..core.multi_model_policy import Gpus, MultiModelCluster
from ..core.policy import parameter
from ..core.state import RequestState
from .shared.model_sharing import VllmSharing


@dataclass
class RequestGroup:
    """Requests of one model that wait for its GPUs."""

    gpus: Gpus
    waiting: list[RequestState] = field(default_factory=list)

    @property
    def due_s(self) -> float:
        """The first deadline among them; those without one count from their arrival."""
        return min(
            r.arrival_s + (r.slo.ttft_s if math.isfinite(r.slo.ttft_s) else 0.0)
            for r in self.waiting
        )


@dataclass(frozen=True)
class Qlm(VllmSharing):
    """Groups by model, which here also is by SLO; the group with the first deadline goes next.

    A group waits at the GPUs that hold its model, or else at those with the least work waiting. A
    model whose turn is over gets no more requests, finishes its own, and is swapped for the next
    one, which then has the whole GPU. `swap = "weights"` counts the copy of the weights over the
    GPU's own host link, `start` also a new engine.

    Not built: eviction of running requests to host memory for a more urgent group (here they run to
    their end), its estimator of waiting times (work that waits is counted instead), several GPUs
    for one group.
    """

    swap: str = parameter("weights", choices=("weights", "start"))
    control_every_s: float = parameter(0.25, 0.05, 60.0, log=True)

    @property
    def starts(self) -> NaiveStart:
        return NaiveStart() if self.swap == "start" else NaiveStart(engine_s=0.0, group_s=0.0)

    @property
    def control_interval_s(self) -> float:
        return self.control_every_s

    def mechanisms(self) -> dict[str, str]:
        return {
            "model_swaps": "models loaded in place of those that stood on their GPUs",
            OVERTAKES: "requests that began before older ones of their GPU",
        }

    def new_state(self) -> dict[int, RequestGroup]:
        return {}  # by model

    def begin(self, cluster: MultiModelCluster) -> None:
        """The most popular models stand on the GPUs, one on each."""
        free = set(range(cluster.gpus))
        for model in sorted(cluster.models, key=lambda m: (-m.rate_rps, m.index)):
            for gpus in _blocks(cluster, model.tp):
                if free.issuperset(gpus):
                    cluster.activate(model, gpus, loaded=True)
                    free.difference_update(gpus)
                    break

    def arrived(self, r: RequestState, model: int, cluster: MultiModelCluster) -> None:
        groups: dict[int, RequestGroup] = cluster.state
        if model not in groups:
            groups[model] = RequestGroup(self._home(model, cluster))
        groups[model].waiting.append(r)
        self._turn(groups[model].gpus, cluster)

    def _home(self, model: int, cluster: MultiModelCluster) -> Gpus:
        model_instance = cluster.serving[model]
        if model_instance is not None:
            return model_instance.gpus
        work_s = [0.0] * cluster.gpus
        for other, group in cluster.state.items():
            for gpu in group.gpus:
                work_s[gpu] += len(group.waiting) * cluster.models[other].work_s
        for standing in cluster.model_instances:
            for gpu in standing.gpus:
                work_s[gpu] += standing.n_admitted * cluster.models[standing.model].work_s
        blocks = _blocks(cluster, cluster.models[model].tp)
        return min(blocks, key=lambda gpus: (max(work_s[gpu] for gpu in gpus), gpus))

    def control_step(self, cluster: MultiModelCluster) -> None:
        for gpus in {group.gpus for group in cluster.state.values()}:
            self._turn(gpus, cluster)

    def _turn(self, gpus: Gpus, cluster: MultiModelCluster) -> None:
        """The next group of these GPUs begins, if they are its own."""
        groups: dict[int, RequestGroup] = cluster.state
        rivals = {m: g for m, g in groups.items() if set(g.gpus) & set(gpus)}
        if not rivals:
            return
        first = min(rivals, key=lambda m: (rivals[m].due_s, m))
        group = rivals[first]
        model_instance = cluster.serving[first]
        if model_instance is None or model_instance.gpus != group.gpus:
            cluster.bring(group.gpus)
            candidates = {id(t): t for gpu in group.gpus for t in cluster.on(gpu)}
            if any(t.busy or t.ready_s > cluster.now_s for t in candidates.values()):
                return
            for t in candidates.values():
                cluster.evict(t)
            cluster.counters.add("model_swaps")
            model_instance = cluster.activate(cluster.models[first], group.gpus)
        for r in group.waiting:
            cluster.send(r, model_instance)
        del groups[first]


def _blocks(cluster: MultiModelCluster, tp: int) -> list[Gpus]:
    """Neighbouring GPUs of one node that a model of `tp` parts can have."""
    gpu_groups: list[Gpus] = []
    for node in range(0, cluster.gpus, cluster.node_gpus):
        end = min(node + cluster.node_gpus, cluster.gpus)
        gpu_groups += [tuple(range(k, k + tp)) for k in range(node, end - tp + 1, tp)]
    return gpu_groups
