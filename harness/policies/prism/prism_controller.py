"""Prism: models come and go on GPUs whose memory they share page by page.

Source: Yu et al., "Prism" (see docs/papers.md): §5.1 memory, §5.2 activation, §6.2 and Algorithm 1
placement, eviction and activation, §6.3 and Algorithm 2 one queue a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ....predictors.activation import Loader, NaiveStart
from ...core.cluster_policy import INF
from ...core.counters import OVERTAKES, REJECTIONS
from ...core.multi_model_policy import (
    Backlog,
    Gpus,
    ModelInstance,
    MultiModelCluster,
    ServedModel,
)
from ...core.policy import parameter
from ...core.state import RequestState
from ..shared.model_sharing import VllmSharing
from .kv_pressure import Demand, Loads, best_gpus, place, place_by_memory, swapped
from .shared_queue import SharedQueue

_Idle = tuple[int, float, float, float]  # model, SLO, idle time, its threshold


@dataclass(frozen=True)
class PrismGlobal(VllmSharing):
    """Global: Algorithm 1 at each control step, activation on demand, eviction of idle models.

    Local: Algorithm 2 over all models of a GPU; a request goes to its engine when it would begin
    there at once. `local_queue` off: requests go to the engine at once, first come first served.
    `global_placement` off: models return to their first GPUs and never move. `activation =
    "naive"`: engines are started, not taken from a pool. `evicts` off: no model is evicted.
    `swaps`: steps of local search after Algorithm 1 at the start, not in the paper. `placement =
    "printed"`: Algorithm 1 alone at the start, which may leave a model out although there is room.

    Where the paper is silent:

    - `threshold` (τ) is a share of the pressure on the model's present GPUs.
    - Idle models are evicted when a GPU has less than `low_memory` of its pages free, or when
      another needs the room at once; the idle time is that of `IdleGaps.threshold_s`, with
      `worth_s`, `worth_share` and `default_idle_s`.
    - A model moves only from a GPU that is short of pages or for which requests wait, and only
      where it leaves `low_memory` free. It is loaded on the new GPUs first, then serves there, and
      leaves the old ones when its last request there has ended.
    - `reserve` of a model's blocks stays free when a request is let in: the buffer of each engine.
    - A model without room waits, until the next control step, for GPUs that idle models alone
      occupy. With `drains`, requests that come after that wait, so that models which are never
      idle make room.
    """

    on_servers: ClassVar[bool] = True
    in_places: ClassVar[Mapping[str, Any]] = {"reserve": 0.0, "low_memory": 0.0, "drains": True}

    control_every_s: float = parameter(5.0, 0.1, 600.0, log=True)
    threshold: float = parameter(0.3, 0.0, 1.0)
    low_memory: float = parameter(0.1, 0.0, 0.9)
    worth_s: float = parameter(10.0, 0.1, 3600.0, log=True)
    worth_share: float = parameter(0.5, 0.0, 1.0)
    default_idle_s: float = parameter(10.0, 0.1, 3600.0, log=True)
    reserve: float = parameter(0.02, 0.0, 0.5)
    activation: str = parameter("pool", choices=("pool", "naive"))
    local_queue: bool = parameter(True)
    global_placement: bool = parameter(True)
    evicts: bool = parameter(True)
    swaps: int = parameter(0, 0, 1000)
    placement: str = parameter("mended", choices=("mended", "printed"))
    drains: bool = parameter(False)

    @property
    def starts(self) -> Loader | NaiveStart:
        return Loader() if self.activation == "pool" else NaiveStart()

    @property
    def control_interval_s(self) -> float:
        return self.control_every_s

    def mechanisms(self) -> dict[str, str]:
        descriptions = {}
        if self.evicts:
            descriptions["activations"] = "models loaded on demand"
            descriptions["evictions"] = "idle models that left their GPUs"
        else:
            descriptions[REJECTIONS] = "requests for a model that stands on no GPU"
        if self.global_placement:
            descriptions["moves"] = "models loaded on other GPUs by Algorithm 1"
        if self.local_queue:
            text = "requests that began before older ones of their GPU (Algorithm 2)"
            descriptions[OVERTAKES] = text
        return descriptions

    def backlog(self, cluster: MultiModelCluster) -> Backlog:
        return Queues(cluster, self)

    def begin(self, cluster: MultiModelCluster) -> None:
        demands = [_demand(model, model.rate_rps) for model in cluster.models]
        begin = place_by_memory if self.placement == "mended" else place
        assignment = begin(demands, _empty(cluster), node_gpus=cluster.node_gpus)
        assignment = swapped(assignment, demands, swaps=self.swaps, node_gpus=cluster.node_gpus)
        for index, gpus in sorted(assignment.gpus.items()):
            cluster.activate(cluster.models[index], gpus, loaded=True)

    # ---------------------------------------------------------------- requests

    def arrived(self, r: RequestState, model: int, cluster: MultiModelCluster) -> None:
        queues = _queues(cluster)
        queues.homeless.setdefault(model, []).append(r)
        model_instance = cluster.serving[model] or self._activated(cluster.models[model], cluster)
        if model_instance is not None:
            self._let_in(model_instance, cluster)
        elif not self.evicts:
            cluster.reject(queues.homeless.pop(model)[0])  # no model will make room

    def _let_in(self, model_instance: ModelInstance, cluster: MultiModelCluster) -> None:
        """Queue requests that waited for the model's placement at its GPUs."""
        queues = _queues(cluster)
        for r in queues.homeless.pop(model_instance.model):
            if self.local_queue:
                queues.push(r, model_instance)
            else:
                cluster.send(r, model_instance)

    def _activated(self, model: ServedModel, cluster: MultiModelCluster) -> ModelInstance | None:
        """On the GPUs of least pressure among those on which there is room, or can be made."""
        idle = [t for t in cluster.model_instances if self.evicts and self._may_go(t, cluster)]
        room = self._room(idle, cluster)
        needed = model.weight_pages + int(self.reserve * cluster.pools[0].total)
        loads = _loads([t for t in cluster.model_instances if t not in idle], cluster)
        for gpu, pages in enumerate(room):
            if pages < needed:
                loads.kv_bytes[gpu] = 0
        demand = _demand(model, cluster.rate_rps[model.index])
        gpus = best_gpus(demand, loads, cluster.node_gpus)
        if not gpus:
            return None
        for gpu in gpus:
            self._make_room(gpu, needed, idle, cluster, "another model is asked for")
        cluster.counters.add("activations")
        _queues(cluster).drained_s = INF
        return cluster.activate(model, gpus)

    def _room(self, idle: Iterable[ModelInstance], cluster: MultiModelCluster) -> list[int]:
        """Free pages of every GPU, if these were evicted."""
        room = [pool.free for pool in cluster.pools]
        for model_instance in idle:
            for gpu in model_instance.gpus:
                room[gpu] += model_instance.weight_pages + model_instance.kv_manager.held_pages
        return room

    def _may_go(self, model_instance: ModelInstance, cluster: MultiModelCluster) -> bool:
        serves = cluster.serving[model_instance.model] is model_instance
        waits = serves and _queues(cluster).wanted(model_instance)
        return not (model_instance.busy or waits) and model_instance.ready_s <= cluster.now_s

    def _make_room(
        self,
        gpu: int,
        pages: int,
        idle: Iterable[ModelInstance],
        cluster: MultiModelCluster,
        why: str,
    ) -> None:
        """Evict these models from a GPU until `pages` pages are free."""
        here = {t.model: t for t in idle if gpu in t.gpus and t in cluster.model_instances}
        order = eviction_order(self._idle(here.values(), cluster))
        while cluster.pools[gpu].free < pages and order:
            cluster.counters.add("evictions", why=why)
            model_instance = here[order.pop(0)]
            _queues(cluster).leave(model_instance)
            cluster.evict(model_instance)

    def _idle(
        self, model_instances: Iterable[ModelInstance], cluster: MultiModelCluster
    ) -> list[_Idle]:
        return [
            (
                t.model,
                cluster.models[t.model].weighed_slo_s,
                cluster.idle_s(t),
                cluster.gaps[t.model].threshold_s(
                    self.worth_s, self.worth_share, self.default_idle_s
                ),
            )
            for t in model_instances
        ]

    @property
    def keeps_engines(self) -> bool:
        return self.activation == "pool"

    # ---------------------------------------------------------------- reviews

    def control_step(self, cluster: MultiModelCluster) -> None:
        for index in list(_queues(cluster).homeless):
            model = cluster.models[index]
            model_instance = cluster.serving[index] or self._activated(model, cluster)
            if model_instance is not None:
                self._let_in(model_instance, cluster)
        if self.evicts:
            self._relieve(cluster)
        if self.global_placement:
            self._move(cluster)

    def _relieve(self, cluster: MultiModelCluster) -> None:
        """GPUs short of pages lose models that have been idle for long, the largest SLO first; any
        idle ones where requests wait for the pages.
        """
        low = int(self.low_memory * cluster.pools[0].total)
        for gpu, pool in enumerate(cluster.pools):
            if pool.free < low:
                waits = _queues(cluster).waits((gpu,))
                idle = [t for t in cluster.on(gpu) if self._may_go(t, cluster)]
                due = idle if waits else self._due(idle, cluster)
                why = "requests wait for pages" if waits else "idle for long, few pages free"
                self._make_room(gpu, low, due, cluster, why)

    def _due(
        self, idle: Iterable[ModelInstance], cluster: MultiModelCluster
    ) -> list[ModelInstance]:
        """Those that have been idle for longer than their threshold."""
        ranked = self._idle(idle, cluster)
        due = {model for model, _, spell_s, limit_s in ranked if spell_s >= limit_s}
        return [t for t in idle if t.model in due]

    def _move(self, cluster: MultiModelCluster) -> None:
        """Algorithm 1 over all placed models; idle ones need not move."""
        pressed = self._pressed(cluster)
        if not any(map(pressed, range(cluster.gpus))):
            return
        idle = [t for t in cluster.model_instances if self.evicts and self._may_go(t, cluster)]
        due = self._due(idle, cluster)
        standing = [
            t for t in cluster.model_instances if cluster.serving[t.model] is t and t not in idle
        ]
        demands = [
            _demand(cluster.models[t.model], cluster.rate_rps[t.model], t.gpus) for t in standing
        ]
        assignment = place(
            demands, _empty(cluster), threshold=self.threshold, node_gpus=cluster.node_gpus
        )
        low = int(self.low_memory * cluster.pools[0].total)
        for model_instance in standing:
            gpus = assignment.gpus.get(model_instance.model, model_instance.gpus)
            model = cluster.models[model_instance.model]
            if set(gpus) & set(model_instance.gpus) or model_instance.ready_s > cluster.now_s:
                continue
            if cluster.moves(model_instance.model) or not any(map(pressed, model_instance.gpus)):
                continue
            room = self._room((t for t in due if t in cluster.model_instances), cluster)
            if all(room[gpu] >= model.weight_pages + low for gpu in gpus):
                for gpu in gpus:
                    needed = model.weight_pages + low
                    self._make_room(gpu, needed, due, cluster, "another model moves in")
                cluster.counters.add("moves")
                cluster.activate(model, gpus)

    def _pressed(self, cluster: MultiModelCluster) -> Callable[[int], bool]:
        """Whether a GPU is short of pages or a request waits for it."""
        queues, low = _queues(cluster), self.low_memory * cluster.pools[0].total
        return lambda gpu: cluster.pools[gpu].free < low or queues.waits((gpu,))

    def moved(self, old: ModelInstance, new: ModelInstance, cluster: MultiModelCluster) -> None:
        _queues(cluster).follow(old, new)


class Queues:
    """Implements `Backlog`: Algorithm 2 on every GPU, at the first GPU of each model."""

    def __init__(self, cluster: MultiModelCluster, policy: PrismGlobal) -> None:
        self._fleet = cluster
        self._policy = policy
        self._of = [SharedQueue() for _ in range(cluster.gpus)]
        self.homeless: dict[int, list[RequestState]] = {}  # by model: it stands nowhere
        self.drained_s = INF  # requests that came later wait

    def push(self, r: RequestState, model_instance: ModelInstance) -> None:
        """`r` waits for its model's engine, which stands there."""
        model = self._fleet.models[model_instance.model]
        self._fleet.bring(model_instance.gpus)
        prefill_s = model.prefill_s(r.target_tokens, self._policy.max_num_batched_tokens)
        self._of[model_instance.gpus[0]].push(r, prefill_s)

    def wanted(self, model_instance: ModelInstance) -> bool:
        """Whether a request waits for this model that may be let in."""
        model_of, last_s = self._fleet.model_of, self.drained_s
        return any(
            model_of(r) == model_instance.model and r.arrival_s <= last_s
            for r in self._of[model_instance.gpus[0]]
        )

    def _note_drain(self, now_s: float) -> None:
        """From when on requests wait, where `drains` holds: a model lacks room and none is coming
        that could go again.
        """
        if not (self._policy.drains and self.homeless):
            self.drained_s = INF
        elif all(t.ready_s <= now_s for t in self._fleet.model_instances):
            self.drained_s = min(self.drained_s, now_s)

    def forget(self, r: RequestState) -> None:
        """Remove `r` from wherever it waits: its client has gone."""
        for model, requests in list(self.homeless.items()):
            if r in requests:
                requests.remove(r)
                if not requests:
                    del self.homeless[model]
        for queue in self._of:
            if r in queue:
                queue.remove(r)

    def follow(self, old: ModelInstance, new: ModelInstance) -> None:
        """Move requests that wait for a model to the queue of its new GPUs."""
        queue = self._of[old.gpus[0]]
        for r in [r for r in queue if self._fleet.model_of(r) == old.model]:
            queue.remove(r)
            self.push(r, new)

    def leave(self, model_instance: ModelInstance) -> None:
        """Requests that `drains` kept from a model wait until it stands somewhere again."""
        queue, model = self._of[model_instance.gpus[0]], model_instance.model
        for r in [r for r in queue if self._fleet.model_of(r) == model]:
            queue.remove(r)
            self.homeless.setdefault(model, []).append(r)

    def waits(self, gpus: Iterable[int]) -> bool:
        return any(len(self._of[gpu]) for gpu in gpus)

    def next_s(self, gpus: Iterable[int], now_s: float) -> float:
        """Next time at which a model with waiting requests becomes ready."""
        later = [
            t.ready_s
            for gpu in gpus
            if len(self._of[gpu])
            for t in self._fleet.on(gpu)
            if t.ready_s > now_s
        ]
        return min(later, default=INF)

    def admit(self, gpus: Iterable[int], now_s: float) -> None:
        self._note_drain(now_s)
        for gpu in gpus:
            if len(self._of[gpu]):
                self._admit(gpu, now_s)

    def _admit(self, gpu: int, now_s: float) -> None:
        """Admit, in the order of Algorithm 2, every request that would begin at once; where memory
        is short, no other request gets the memory that the next one lacks.
        """
        cluster, policy, queue = self._fleet, self._policy, self._of[gpu]
        begin: dict[int, ModelInstance] = {}
        for model in {cluster.model_of(r) for r in queue}:
            model_instance = cluster.serving[model]
            ready = model_instance is not None and model_instance.ready_s <= now_s
            if model_instance and ready and self._begins_at_once(model_instance):
                begin[model] = model_instance
        if not begin:  # whatever the order
            return
        for r in queue.ordered(now_s):
            model = cluster.model_of(r)
            if model not in begin or r.arrival_s > self.drained_s:
                continue
            model_instance = begin[model]
            kv_manager = model_instance.kv_manager
            spare = int(policy.reserve * kv_manager.total)
            coming = max(sum(t.coming_pages for t in cluster.on(g)) for g in model_instance.gpus)
            room = kv_manager.free - kv_manager.blocks_in(coming)
            if model_instance.idle:
                spare = 0
            if room < kv_manager.blocks(r.target_tokens) + spare:
                return
            queue.remove(r)
            model_instance.receive(r, now_s)
            if not self._begins_at_once(model_instance):
                del begin[model]
                if not begin:
                    return

    def _begins_at_once(self, model_instance: ModelInstance) -> bool:
        """Is there room in the next iteration of its engine?"""
        if model_instance.n_waiting or model_instance.n_admitted >= self._policy.max_num_seqs:
            return False
        return model_instance.unbegun_tokens < self._policy.max_num_batched_tokens


def _queues(cluster: MultiModelCluster) -> Queues:
    assert isinstance(cluster.requests, Queues)
    return cluster.requests


def _demand(model: ServedModel, rate_rps: float, gpus: Gpus = ()) -> Demand:
    pages = model.weight_pages
    return Demand(model.index, rate_rps, model.weighed_slo_s, pages, model.tp, gpus)


def _empty(cluster: MultiModelCluster) -> Loads:
    return Loads.empty(cluster.gpus, cluster.pools[0].total)


def _loads(model_instances: Iterable[ModelInstance], cluster: MultiModelCluster) -> Loads:
    """W and S that these make."""
    loads = _empty(cluster)
    for model_instance in model_instances:
        model = model_instance.model
        demand = _demand(cluster.models[model], cluster.rate_rps[model])
        for gpu in model_instance.gpus:
            loads.add(gpu, demand)
    return loads


def eviction_order(idle: Iterable[tuple[int, float, float, float]]) -> list[int]:
    """Models to evict, the first one first, from (model, SLO, idle time, its threshold).

    Those past their threshold by falling SLO; after them, for want of anything better, the others,
    the longest idle first: a request that has no memory at all is worse than one that waits for
    weights again.
    """
    ranked = sorted(
        (spell_s < threshold_s, -slo_s if spell_s >= threshold_s else -spell_s, model)
        for model, slo_s, spell_s, threshold_s in idle
    )
    return [model for _, _, model in ranked]
