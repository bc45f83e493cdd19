"""One model at a time on a GPU: groups of requests wait for their turn, and models are swapped.

Source: Patke et al., "Queue Management for SLO-Oriented Large Language Model Serving" (SoCC 2024),
as a baseline of Prism (see docs/papers.md), §3.2 and §7.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...predictors.activation import NaiveStart
from ..core.multi_model_policy import Fleet, Gpus
from ..core.policy import knob
from ..core.state import RequestState
from .shared.model_sharing import VllmSharing


@dataclass
class Group:
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
    model whose turn is over gets no more requests, serves those that it has, and is swapped for
    the next one; then the whole GPU is that one's. `swap = "weights"` counts the copy of the
    weights over the GPU's own host link, `start` also a new engine.

    Not built: eviction of running requests to host memory for a more urgent group (here these run
    to their end), its estimator of waiting times (work that waits is counted instead), several
    GPUs for one group.
    """

    swap: str = knob("weights", choices=("weights", "start"))
    review_every_s: float = knob(0.25, 0.05, 60.0, log=True)

    @property
    def starts(self) -> NaiveStart:
        return NaiveStart() if self.swap == "start" else NaiveStart(engine_s=0.0, group_s=0.0)

    @property
    def review_s(self) -> float:
        return self.review_every_s

    def new_state(self) -> dict[int, Group]:
        return {}  # by model

    def begin(self, fleet: Fleet) -> None:
        """The most popular models stand on the GPUs, one on each."""
        free = set(range(fleet.gpus))
        for model in sorted(fleet.models, key=lambda m: (-m.rate_rps, m.index)):
            for gpus in _blocks(fleet, model.tp):
                if free.issuperset(gpus):
                    fleet.activate(model, gpus, loaded=True)
                    free.difference_update(gpus)
                    break

    def arrived(self, r: RequestState, model: int, fleet: Fleet) -> None:
        groups: dict[int, Group] = fleet.state
        if model not in groups:
            groups[model] = Group(self._home(model, fleet))
        groups[model].waiting.append(r)
        self._turn(groups[model].gpus, fleet)

    def _home(self, model: int, fleet: Fleet) -> Gpus:
        tenant = fleet.serving[model]
        if tenant is not None:
            return tenant.gpus
        work_s = [0.0] * fleet.gpus
        for other, group in fleet.state.items():
            for gpu in group.gpus:
                work_s[gpu] += len(group.waiting) * fleet.models[other].work_s
        for standing in fleet.tenants:
            for gpu in standing.gpus:
                work_s[gpu] += standing.n_admitted * fleet.models[standing.model].work_s
        blocks = _blocks(fleet, fleet.models[model].tp)
        return min(blocks, key=lambda gpus: (max(work_s[gpu] for gpu in gpus), gpus))

    def review(self, fleet: Fleet) -> None:
        for gpus in {group.gpus for group in fleet.state.values()}:
            self._turn(gpus, fleet)

    def _turn(self, gpus: Gpus, fleet: Fleet) -> None:
        """The next group of these GPUs begins, if they are its own."""
        groups: dict[int, Group] = fleet.state
        rivals = {m: g for m, g in groups.items() if set(g.gpus) & set(gpus)}
        if not rivals:
            return
        first = min(rivals, key=lambda m: (rivals[m].due_s, m))
        group = rivals[first]
        tenant = fleet.serving[first]
        if tenant is None or tenant.gpus != group.gpus:
            fleet.bring(group.gpus)
            there = {id(t): t for gpu in group.gpus for t in fleet.on(gpu)}
            if any(t.busy or t.ready_s > fleet.now_s for t in there.values()):
                return
            for t in there.values():
                fleet.evict(t)
            tenant = fleet.activate(fleet.models[first], group.gpus)
        for r in group.waiting:
            fleet.send(r, tenant)
        del groups[first]


def _blocks(fleet: Fleet, tp: int) -> list[Gpus]:
    """Neighbouring GPUs of one node that a model of `tp` parts can have."""
    found: list[Gpus] = []
    for node in range(0, fleet.gpus, fleet.node_gpus):
        end = min(node + fleet.node_gpus, fleet.gpus)
        found += [tuple(range(at, at + tp)) for at in range(node, end - tp + 1, tp)]
    return found
