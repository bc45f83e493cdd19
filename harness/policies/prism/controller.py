"""Prism: models come and go on GPUs whose memory they share page by page.

Source: Yu et al., "Prism" (see docs/papers.md): §5.1 memory, §5.2 activation, §6.2 and Algorithm 1
placement, eviction and activation, §6.3 and Algorithm 2 one queue a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from ....predictors.activation import Loader, NaiveStart
from ...core.cluster_policy import INF
from ...core.multi_model_policy import Backlog, Fleet, Gpus, Hosted, IdleModel, Tenant
from ...core.policy import knob
from ...core.state import RequestState
from ..shared.model_sharing import VllmSharing
from .idleness import eviction_order
from .kv_pressure import Demand, Loads, best_gpus, place, swapped
from .shared_queue import SharedQueue

_Idle = tuple[int, float, float, float]  # model, SLO, idle time, its threshold


@dataclass(frozen=True)
class Prism(VllmSharing):
    """Global: Algorithm 1 at each review, activation on demand, eviction of who is idle.

    Local: Algorithm 2 over all models of a GPU; a request goes to its engine when it would begin
    there at once. `local_queue` off: to the engine at once, first come first served.
    `global_placement` off: models come back to where they were put at the start, and move nowhere.
    `activation = "naive"`: engines are started, not taken from a pool. `evicts` off: nobody goes.
    `swaps`: steps of local search after Algorithm 1 at the start, which the paper does not have.

    Where the paper is silent:

    - `threshold` (τ) is a share of the pressure where the model stands.
    - Idle models go when a GPU has less than `low_memory` of its pages free, or when another needs
      the room at once; after how long says `IdleGaps.threshold_s`, with `worth_s`, `worth_share`
      and `default_idle_s`.
    - A model moves only from a GPU that is short of pages or for which requests wait, and only
      where it leaves `low_memory` free. It is loaded at the new place first, then serves there,
      and leaves the old place when its last request there has ended.
    - `reserve` of a model's blocks stays free when a request is let in: the buffer of each engine.
    - A model without room anywhere waits, until the next review, for GPUs on which nobody but idle
      models is in its way.
    """

    on_servers: ClassVar[tuple[str, ...]] = (
        *("max_num_batched_tokens", "max_num_seqs", "local_queue", "activation"),
        *("worth_s", "worth_share", "default_idle_s"),
    )

    review_every_s: float = knob(5.0, 0.1, 600.0, log=True)
    threshold: float = knob(0.3, 0.0, 1.0)
    low_memory: float = knob(0.1, 0.0, 0.9)
    worth_s: float = knob(10.0, 0.1, 3600.0, log=True)
    worth_share: float = knob(0.5, 0.0, 1.0)
    default_idle_s: float = knob(10.0, 0.1, 3600.0, log=True)
    reserve: float = knob(0.02, 0.0, 0.5)
    activation: str = knob("pool", choices=("pool", "naive"))
    local_queue: bool = knob(True)
    global_placement: bool = knob(True)
    evicts: bool = knob(True)
    swaps: int = knob(0, 0, 1000)

    @property
    def starts(self) -> Loader | NaiveStart:
        return Loader() if self.activation == "pool" else NaiveStart()

    @property
    def review_s(self) -> float:
        return self.review_every_s

    def backlog(self, fleet: Fleet) -> Backlog:
        return Queues(fleet, self)

    def begin(self, fleet: Fleet) -> None:
        """Who fits stands somewhere from the start, by Algorithm 1 on the mean rates."""
        demands = [_demand(model, model.rate_rps) for model in fleet.models]
        found = place(demands, _empty(fleet), node_gpus=fleet.node_gpus)
        found = swapped(found, demands, swaps=self.swaps, node_gpus=fleet.node_gpus)
        for index, gpus in sorted(found.gpus.items()):
            fleet.activate(fleet.models[index], gpus, loaded=True)

    # ---------------------------------------------------------------- requests

    def arrived(self, r: RequestState, model: int, fleet: Fleet) -> None:
        queues = _queues(fleet)
        queues.homeless.setdefault(model, []).append(r)
        tenant = fleet.serving[model] or self._activated(fleet.models[model], fleet)
        if tenant is not None:
            self._let_in(tenant, fleet)
        elif not self.evicts:
            fleet.reject(queues.homeless.pop(model)[0])  # nobody will make room

    def _let_in(self, tenant: Tenant, fleet: Fleet) -> None:
        """Who waited for the model to stand somewhere now waits there."""
        queues = _queues(fleet)
        for r in queues.homeless.pop(tenant.model):
            if self.local_queue:
                queues.push(r, tenant)
            else:
                fleet.send(r, tenant)

    def _activated(self, model: Hosted, fleet: Fleet) -> Tenant | None:
        """On the GPUs of least pressure among those on which there is room, or can be made."""
        idle = [t for t in fleet.tenants if self.evicts and self._may_go(t, fleet)]
        room = self._room(idle, fleet)
        needed = model.weight_pages + int(self.reserve * fleet.pools[0].total)
        loads = _loads([t for t in fleet.tenants if t not in idle], fleet)
        for gpu, pages in enumerate(room):
            if pages < needed:
                loads.kv_bytes[gpu] = 0
        demand = _demand(model, fleet.rate_rps[model.index])
        gpus = best_gpus(demand, loads, fleet.node_gpus)
        if not gpus:
            return None
        for gpu in gpus:
            self._make_room(gpu, needed, idle, fleet)
        return fleet.activate(model, gpus)

    def _room(self, idle: Iterable[Tenant], fleet: Fleet) -> list[int]:
        """Free pages of every GPU, if these were evicted."""
        room = [pool.free for pool in fleet.pools]
        for tenant in idle:
            for gpu in tenant.gpus:
                room[gpu] += tenant.weight_pages + tenant.ledger.held_pages
        return room

    def _may_go(self, tenant: Tenant, fleet: Fleet) -> bool:
        waits = fleet.serving[tenant.model] is tenant and _queues(fleet).wanted(tenant)
        return not (tenant.busy or waits) and tenant.ready_s <= fleet.now_s

    def _make_room(self, gpu: int, pages: int, idle: Iterable[Tenant], fleet: Fleet) -> None:
        """Evict these from a GPU, until so many pages are free."""
        here = {t.model: t for t in idle if gpu in t.gpus and t in fleet.tenants}
        order = eviction_order(self._idle(here.values(), fleet))
        while fleet.pools[gpu].free < pages and order:
            fleet.evict(here[order.pop(0)])

    def _idle(self, tenants: Iterable[Tenant], fleet: Fleet) -> list[_Idle]:
        return [
            self._ranked(
                IdleModel(
                    t.model,
                    fleet.models[t.model].weighed_slo_s,
                    fleet.idle_s(t),
                    fleet.gaps[t.model],
                )
            )
            for t in tenants
        ]

    def _ranked(self, one: IdleModel) -> _Idle:
        """What `eviction_order` ranks it by."""
        limit_s = one.gaps.threshold_s(self.worth_s, self.worth_share, self.default_idle_s)
        return one.model, one.slo_s, one.idle_s, limit_s

    # ---------------------------------------------------------------- before real servers

    @property
    def keeps_engines(self) -> bool:
        return self.activation == "pool"

    def server_queue(self) -> SharedQueue:
        return SharedQueue()

    def begins_at_once(self, requests: int, unbegun_tokens: int) -> bool:
        if not self.local_queue:
            return True
        return requests < self.max_num_seqs and unbegun_tokens < self.max_num_batched_tokens

    def leaving_order(self, idle: Iterable[IdleModel]) -> list[int]:
        return eviction_order(map(self._ranked, idle))

    # ---------------------------------------------------------------- reviews

    def review(self, fleet: Fleet) -> None:
        for model in list(_queues(fleet).homeless):
            tenant = fleet.serving[model] or self._activated(fleet.models[model], fleet)
            if tenant is not None:
                self._let_in(tenant, fleet)
        if self.evicts:
            self._relieve(fleet)
        if self.global_placement:
            self._move(fleet)

    def _relieve(self, fleet: Fleet) -> None:
        """GPUs short of pages lose models that have been idle for long, the largest SLO first; any
        idle ones where requests wait for the pages.
        """
        low = int(self.low_memory * fleet.pools[0].total)
        for gpu, pool in enumerate(fleet.pools):
            if pool.free < low:
                waits = _queues(fleet).waits((gpu,))
                idle = [t for t in fleet.on(gpu) if self._may_go(t, fleet)]
                due = idle if waits else self._due(idle, fleet)
                self._make_room(gpu, low, due, fleet)

    def _due(self, idle: Iterable[Tenant], fleet: Fleet) -> list[Tenant]:
        """Those that have been idle for longer than their threshold."""
        due = {
            model for model, _, spell_s, limit_s in self._idle(idle, fleet) if spell_s >= limit_s
        }
        return [t for t in idle if t.model in due]

    def _move(self, fleet: Fleet) -> None:
        """Algorithm 1 over those that stand somewhere; who is idle need not move."""
        pressed = self._pressed(fleet)
        if not any(map(pressed, range(fleet.gpus))):
            return
        idle = [t for t in fleet.tenants if self.evicts and self._may_go(t, fleet)]
        due = self._due(idle, fleet)
        standing = [t for t in fleet.tenants if fleet.serving[t.model] is t and t not in idle]
        demands = [
            _demand(fleet.models[t.model], fleet.rate_rps[t.model], t.gpus) for t in standing
        ]
        found = place(demands, _empty(fleet), threshold=self.threshold, node_gpus=fleet.node_gpus)
        low = int(self.low_memory * fleet.pools[0].total)
        for tenant in standing:
            gpus = found.gpus.get(tenant.model, tenant.gpus)
            model = fleet.models[tenant.model]
            if set(gpus) & set(tenant.gpus) or tenant.ready_s > fleet.now_s:
                continue
            if fleet.moves(tenant.model) or not any(map(pressed, tenant.gpus)):
                continue
            room = self._room((t for t in due if t in fleet.tenants), fleet)
            if all(room[gpu] >= model.weight_pages + low for gpu in gpus):
                for gpu in gpus:
                    self._make_room(gpu, model.weight_pages + low, due, fleet)
                fleet.activate(model, gpus)

    def _pressed(self, fleet: Fleet) -> Callable[[int], bool]:
        """Is a GPU short of pages, or does anybody wait for it?"""
        queues, low = _queues(fleet), self.low_memory * fleet.pools[0].total
        return lambda gpu: fleet.pools[gpu].free < low or queues.waits((gpu,))

    def moved(self, old: Tenant, new: Tenant, fleet: Fleet) -> None:
        _queues(fleet).follow(old, new)


class Queues:
    """Implements `Backlog`: Algorithm 2 on every GPU, at the first GPU of each model."""

    def __init__(self, fleet: Fleet, policy: Prism) -> None:
        self._fleet = fleet
        self._policy = policy
        self._of = [SharedQueue() for _ in range(fleet.gpus)]
        self.homeless: dict[int, list[RequestState]] = {}  # by model: it stands nowhere

    def push(self, r: RequestState, tenant: Tenant) -> None:
        """`r` waits for its model's engine, which stands there."""
        model = self._fleet.models[tenant.model]
        self._fleet.bring(tenant.gpus)
        prefill_s = model.prefill_s(r.target_tokens, self._policy.max_num_batched_tokens)
        self._of[tenant.gpus[0]].push(r, prefill_s)

    def wanted(self, tenant: Tenant) -> bool:
        """Does anybody wait for this model?"""
        model_of = self._fleet.model_of
        return any(model_of(r) == tenant.model for r in self._of[tenant.gpus[0]])

    def follow(self, old: Tenant, new: Tenant) -> None:
        """Who waits for a model that moves waits at its new place."""
        queue = self._of[old.gpus[0]]
        for r in [r for r in queue if self._fleet.model_of(r) == old.model]:
            queue.remove(r)
            self.push(r, new)

    def waits(self, gpus: Iterable[int]) -> bool:
        return any(len(self._of[gpu]) for gpu in gpus)

    def next_s(self, gpus: Iterable[int], now_s: float) -> float:
        """When a model is ready for which somebody waits."""
        later = [
            t.ready_s
            for gpu in gpus
            if len(self._of[gpu])
            for t in self._fleet.on(gpu)
            if t.ready_s > now_s
        ]
        return min(later, default=INF)

    def admit(self, gpus: Iterable[int], now_s: float) -> None:
        for gpu in gpus:
            if len(self._of[gpu]):
                self._admit(gpu, now_s)

    def _admit(self, gpu: int, now_s: float) -> None:
        """In Algorithm 2's order, whoever would begin at once; where memory is short nobody else
        gets what the next one lacks.
        """
        fleet, policy, queue = self._fleet, self._policy, self._of[gpu]
        full: set[int] = set()
        for r in queue.ordered(now_s):
            model = fleet.model_of(r)
            tenant = fleet.serving[model]
            if model in full or tenant is None or tenant.ready_s > now_s:
                continue
            if not self._begins_at_once(tenant):
                full.add(model)
                continue
            ledger = tenant.ledger
            spare = int(policy.reserve * ledger.total)
            coming = max(sum(t.coming_pages for t in fleet.on(g)) for g in tenant.gpus)
            room = ledger.free - ledger.blocks_in(coming)
            if tenant.idle:
                spare = 0
            if room < ledger.blocks(r.target_tokens) + spare:
                return
            queue.remove(r)
            tenant.receive(r, now_s)

    def _begins_at_once(self, tenant: Tenant) -> bool:
        """Is there room in the next iteration of its engine?"""
        if tenant.n_waiting or tenant.n_admitted >= self._policy.max_num_seqs:
            return False
        return tenant.unbegun_tokens < self._policy.max_num_batched_tokens


def _queues(fleet: Fleet) -> Queues:
    assert isinstance(fleet.requests, Queues)
    return fleet.requests


def _demand(model: Hosted, rate_rps: float, gpus: Gpus = ()) -> Demand:
    pages = model.weight_pages
    return Demand(model.index, rate_rps, model.weighed_slo_s, pages, model.tp, gpus)


def _empty(fleet: Fleet) -> Loads:
    return Loads.empty(fleet.gpus, fleet.pools[0].total)


def _loads(tenants: Iterable[Tenant], fleet: Fleet) -> Loads:
    """W and S that these make."""
    loads = _empty(fleet)
    for tenant in tenants:
        demand = _demand(fleet.models[tenant.model], fleet.rate_rps[tenant.model])
        for gpu in tenant.gpus:
            loads.add(gpu, demand)
    return loads
