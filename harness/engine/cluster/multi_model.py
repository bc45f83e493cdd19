"""Several models on shared GPUs under one controller and one clock.

Events are arrivals and reviews. An island (`engines.shared`) lags behind until something is sent to
it, its state is asked for, or a review comes, and then catches up in one go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.decisions import Why
from ...core.idle_gaps import IdleGaps
from ...core.multi_model_policy import Gpus, Hosted, SharingPolicy, Tenant
from ...core.pages import PagedLedger, PagePool
from ...core.records import Told
from ...core.release import Release
from ...core.state import RequestState
from ..simulator.shared_gpu import SharedGpuInstance, SharedGpus
from .arrivals import INF, Arrivals
from .recorder import Recorder

_FRUITLESS = 200  # reviews in a row in which nothing happens: nothing will
_RATE_WINDOW_S = 60.0


class SharedGpuCluster:
    """Implements `Fleet`: what a `SharingPolicy` sees and acts on."""

    def __init__(
        self,
        models: Sequence[Hosted],
        gpus: int,
        pages: int,
        policy: SharingPolicy,
        arrivals: Arrivals,
        recorder: Recorder,
        model_of: NDArray[np.int64],
        *,
        node_gpus: int = 8,
        sample_s: float = INF,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        """`pages`: of each GPU, for weights and KV. `model_of`: the model of each row."""
        self.models = models
        self.gpus = gpus
        self.node_gpus = min(node_gpus, gpus)
        self.pools = [PagePool(pages) for _ in range(gpus)]
        self.now_s = 0.0
        self.tenants: list[SharedGpuInstance] = []  # who stands on a GPU
        self.serving: list[SharedGpuInstance | None] = [None] * len(models)  # who gets the requests
        self.rate_rps = [model.rate_rps for model in models]  # of the last minute or so
        self.gaps = [IdleGaps() for _ in models]
        self.activations: list[Told] = []  # how long each took
        self.migrations = 0
        self.retired: list[SharedGpuInstance] = []
        self.state: Any = policy.new_state()
        self._policy = policy
        self._arrivals = arrivals
        self._recorder = recorder
        self._model_of: list[int] = model_of.tolist()
        self._sample_s = sample_s
        self._progress = progress
        # Those that will get a model's requests when they are loaded.
        self._successor: dict[int, SharedGpuInstance] = {}
        self._idle_since_s = [0.0] * len(models)
        self._seen = [0] * len(models)  # requests since the last review
        self._loading_until_s = [0.0] * gpus  # of each GPU's host link
        self.requests = policy.backlog(self)  # those that wait before the engines
        self._islands: list[SharedGpus] = []
        self._island_of: list[SharedGpus] = []
        self._rebuild()

    # ---------------------------------------------------------------- what a policy sees

    def model_of(self, r: RequestState) -> int:
        """The number of the model that `r` asks for."""
        return self._model_of[r.id]

    def on(self, gpu: int) -> list[SharedGpuInstance]:
        """Who stands on a GPU."""
        return [tenant for tenant in self._island_of[gpu].tenants if gpu in tenant.gpus]

    def bring(self, gpus: Sequence[int]) -> None:
        """Bring these GPUs up to the present."""
        for gpu in gpus:
            self._island_of[gpu].advance(self.now_s)

    def moves(self, model: int) -> bool:
        """Is it being loaded elsewhere, or has it not yet left the place that it came from?"""
        return model in self._successor or any(t.leaving for t in self.tenants if t.model == model)

    def idle_s(self, tenant: Tenant) -> float:
        """For how long nobody has asked for it; below 0 while it is busy or not ready."""
        assert isinstance(tenant, SharedGpuInstance)
        return -1.0 if tenant.busy else self.now_s - tenant.idle_since_s

    def could_hold(self, r: RequestState, tenant: Tenant) -> bool:
        """Would an engine on which nobody else is have the memory for `r`?

        Those beside it keep their weights, and have no KV.
        """
        tokens = r.prompt_tokens + r.output_tokens
        quota = tenant.ledger.quota_blocks
        if quota is None:
            weights = max(sum(t.weight_pages for t in self.on(gpu)) for gpu in tenant.gpus)
            quota = tenant.ledger.blocks_in(self.pools[0].total - weights)
        return tenant.ledger.blocks(tokens) <= quota - int(0.02 * quota)

    def activation_s(self, model: Hosted) -> float:
        """How long it takes until a model serves whose weights nobody else delays."""
        place = model.placement
        return self._policy.starts.activation_s(
            place.weight_bytes_per_gpu, place.tp, self.node_gpus
        )

    # ---------------------------------------------------------------- what it can do

    def activate(
        self, model: Hosted, gpus: Gpus, *, quota_pages: int | None = None, loaded: bool = False
    ) -> SharedGpuInstance:
        """`model` stands on these GPUs from now on and gets its requests there.

        Its weights take their pages at once; it serves when they are in. Until then one that
        stands elsewhere goes on, and then leaves when its last request has ended. Loads over the
        same host link follow each other. `loaded`: they are in.
        """
        self.bring(gpus)
        ready_s = self.now_s
        if not loaded:
            links = self._links(gpus)
            begin_s = max(self.now_s, *(self._loading_until_s[gpu] for gpu in links))
            ready_s = begin_s + self.activation_s(model)
            for gpu in links:
                self._loading_until_s[gpu] = ready_s
            took_s = ready_s - self.now_s
            self.activations.append(Told(self.now_s, "activation", model.name, took_s))
        pools = [self.pools[gpu] for gpu in gpus]
        for pool in pools:
            assert pool.free >= model.weight_pages, "weights do not fit"
            pool.free -= model.weight_pages
        place = model.placement
        ledger = PagedLedger(pools, place.block_bytes_per_gpu, place.block_tokens)
        if quota_pages is not None:
            ledger.quota_blocks = ledger.blocks_in(quota_pages)
        tenant = SharedGpuInstance(
            model.index,
            gpus,
            model.weight_pages,
            ledger,
            self._policy.engine,
            model.step_time,
            ready_s=ready_s,
            sample_s=self._sample_s,
        )
        self.tenants.append(tenant)
        if self.serving[model.index] is None:
            self.serving[model.index] = tenant
        else:
            self._successor[model.index] = tenant
            self.migrations += 1
        self._rebuild()
        return tenant

    def _links(self, gpus: Gpus) -> list[int]:
        """GPUs over whose host links a load comes: its own, then others of the node."""
        begin = gpus[0] // self.node_gpus * self.node_gpus
        node = range(begin, min(begin + self.node_gpus, self.gpus))
        others = sorted(
            (gpu for gpu in node if gpu not in gpus),
            key=lambda gpu: (self._loading_until_s[gpu], gpu),
        )
        wanted = self._policy.starts.links_used(len(gpus), self.node_gpus)
        return [*gpus, *others][: max(wanted, len(gpus))]

    def evict(self, tenant: Tenant) -> None:
        """A model without requests leaves its GPUs at once: its pages are free."""
        assert isinstance(tenant, SharedGpuInstance)
        self.bring(tenant.gpus)
        assert not tenant.busy, "a model with requests cannot be evicted"
        tenant.instance.let_go()
        tenant.ledger.close()
        for gpu in tenant.gpus:
            self.pools[gpu].free += tenant.weight_pages
        if self._successor.get(tenant.model) is tenant:
            del self._successor[tenant.model]
        elif self.serving[tenant.model] is tenant:
            self.serving[tenant.model] = self._successor.pop(tenant.model, None)
        self.tenants.remove(tenant)
        self.retired.append(tenant)
        self._rebuild()

    def send(self, r: RequestState, tenant: Tenant) -> None:
        """`r` goes to an engine."""
        self.bring(tenant.gpus)
        tenant.receive(r, self.now_s)

    def reject(self, r: RequestState) -> None:
        """`r` is not served."""
        self._recorder.gone(Release(r, Why.REJECT, self.now_s))

    # ---------------------------------------------------------------- running

    def run(self, requests: int) -> None:
        """Serve until so many requests have ended, or nothing happens any more."""
        policy, arrivals, recorder = self._policy, self._arrivals, self._recorder
        policy.begin(self)
        review_s = policy.review_s
        fruitless, before = 0, (0, 0)
        while recorder.ended < requests and fruitless < _FRUITLESS:
            arrival_s = arrivals.next_s()
            if arrival_s < review_s:
                self.now_s = arrival_s
                self._arrive(arrivals.pop())
                continue
            self.now_s = review_s
            review_s += policy.review_s
            for island in self._islands:
                island.advance(self.now_s)
            self._succeed()
            self._look(policy.review_s)
            policy.review(self)
            progress = recorder.ended, sum(t.instance.measures.steps for t in self.tenants)
            waiting = arrival_s < INF or max(self._loading_until_s) > self.now_s
            fruitless = 0 if waiting or progress != before else fruitless + 1
            before = progress
            if self._progress is not None:
                self._progress(recorder.ended, self.now_s)

    def _arrive(self, r: RequestState) -> None:
        model = self.model_of(r)
        self._seen[model] += 1
        if self._successor:
            self._succeed()
        tenant = self.serving[model]
        if tenant is not None:
            self.bring(tenant.gpus)
            if not tenant.busy:
                self.gaps[model].add(max(0.0, self.now_s - tenant.idle_since_s))
        elif self._idle_since_s[model] < self.now_s:
            self.gaps[model].add(self.now_s - self._idle_since_s[model])
            self._idle_since_s[model] = self.now_s
        self._policy.arrived(r, model, self)

    def _succeed(self) -> None:
        """Models that have been loaded elsewhere get their requests there."""
        for model, new in list(self._successor.items()):
            if new.ready_s <= self.now_s:
                del self._successor[model]
                old = self.serving[model]
                assert old is not None
                self.bring(old.gpus)
                self.bring(new.gpus)
                old.leaving = True
                self.serving[model] = new
                self._policy.moved(old, new, self)

    def _look(self, since_s: float) -> None:
        """Request rates, and who has left."""
        weight = 1 - math.exp(-since_s / _RATE_WINDOW_S)
        for model, seen in enumerate(self._seen):
            self.rate_rps[model] += weight * (seen / since_s - self.rate_rps[model])
            self._seen[model] = 0
        for tenant in [t for t in self.tenants if t.leaving and not t.busy]:
            self.evict(tenant)

    def _ended(self, tenant: SharedGpuInstance) -> None:
        instance, recorder = tenant.instance, self._recorder
        eventful = bool(instance.measures.preemptions)
        recorder.finished(instance.finished, tenant.gpus[0], eventful=eventful)
        instance.finished.clear()
        for release in instance.outbox:
            if release.why is not Why.FINISH:
                recorder.gone(release)
        instance.outbox.clear()
        self._idle_since_s[tenant.model] = instance.now_s

    def _rebuild(self) -> None:
        """Islands anew: GPUs that tenants connect. Those that change must be at the present."""
        island_of = list(range(self.gpus))
        for tenant in self.tenants:
            joined = {island_of[gpu] for gpu in tenant.gpus}
            if len(joined) > 1:
                least = min(joined)
                island_of = [least if of in joined else of for of in island_of]
        old = {island.gpus: island for island in self._islands}
        self._islands = []
        for root in dict.fromkeys(island_of):
            gpus = tuple(gpu for gpu, of in enumerate(island_of) if of == root)
            tenants = [t for t in self.tenants if t.gpus[0] in gpus]
            known = old.get(gpus)
            if known is not None:
                known.tenants = tenants
                self._islands.append(known)
                continue
            made = SharedGpus(gpus, tenants, self.pools, self.now_s, self._ended, self.requests)
            self._islands.append(made)
        self._island_of = [
            next(island for island in self._islands if gpu in island.gpus)
            for gpu in range(self.gpus)
        ]
