"""Models on GPUs as a `SharingPolicy` sees them, in a simulation and before real servers alike."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from ...core.counters import Counters
from ...core.idle_gaps import IdleGaps
from ...core.kv.pages import PagePool, PooledKVCacheManager
from ...core.multi_model_policy import Gpus, ModelInstance, ServedModel, SharingPolicy
from ...core.state import RequestState

_RATE_WINDOW_S = 60.0


class PlacedInstance(ModelInstance, Protocol):
    """A model on its GPUs. `leaving`: its successor serves, and it goes when its last request has
    ended.
    """

    leaving: bool
    idle_since_s: float


Instance = TypeVar("Instance", bound=PlacedInstance)


class PlacedModels(ABC, Generic[Instance]):
    """Implements the part of `MultiModelCluster` that only counts: pages, who stands where, rates
    and idle gaps. A subclass loads and removes models and serves their requests.
    """

    def __init__(
        self,
        models: list[ServedModel],
        gpus: int,
        pages: int,
        policy: SharingPolicy,
        counters: Counters,
        *,
        node_gpus: int = 8,
    ) -> None:
        """`pages`: of each GPU, for weights and KV."""
        self.models = models
        self.gpus = gpus
        self.node_gpus = min(node_gpus, gpus)
        self.pools = [PagePool(pages) for _ in range(gpus)]
        self.model_instances: list[Instance] = []
        # The model instance that gets the requests of each model.
        self.serving: list[Instance | None] = [None] * len(models)
        self.rate_rps = [model.rate_rps for model in models]  # of the last minute or so
        self.gaps = [IdleGaps() for _ in models]
        self.state: Any = policy.new_state()
        self.counters: Counters = counters
        self._policy = policy
        # Those that will get a model's requests when they are loaded.
        self._successor: dict[int, Instance] = {}
        self._idle_since_s = [0.0] * len(models)
        self._requests_since = [0] * len(models)  # requests since the last review
        self.requests = policy.backlog(self)  # those that wait before the engines

    # ---------------------------------------------------------------- what a subclass does

    now_s: float

    @abstractmethod
    def model_of(self, r: RequestState) -> int:
        """The number of the model that `r` asks for."""

    @abstractmethod
    def reject(self, r: RequestState) -> None:
        """End `r` as rejected."""

    @abstractmethod
    def _ready_s(self, model: ServedModel, gpus: Gpus, loaded: bool) -> float:
        """When a model that is activated now can serve; infinite if that is not known."""

    @abstractmethod
    def _made_instance(
        self,
        model: ServedModel,
        gpus: Gpus,
        kv_manager: PooledKVCacheManager,
        ready_s: float,
    ) -> Instance:
        """An instance of the model, whose pages are taken already."""

    @abstractmethod
    def _removed(self, model_instance: Instance) -> None:
        """Forget an instance without requests, whose pages are still taken."""

    def bring(self, gpus: Sequence[int]) -> None:
        """Bring these GPUs up to the present."""

    def _rebuild(self) -> None:
        """Called when other model instances stand on the GPUs."""

    # ---------------------------------------------------------------- what a policy sees

    def on(self, gpu: int) -> list[Instance]:
        """Model instances on one GPU."""
        return [t for t in self.model_instances if gpu in t.gpus]

    def moves(self, model: int) -> bool:
        """Whether the model is being loaded on other GPUs or has not yet left its former ones."""
        return model in self._successor or any(
            t.leaving for t in self.model_instances if t.model == model
        )

    def idle_s(self, model_instance: ModelInstance) -> float:
        """Seconds without a request; below 0 while it is busy or not ready."""
        if model_instance.busy:
            return -1.0
        return self.now_s - self._placed(model_instance).idle_since_s

    def _placed(self, model_instance: ModelInstance) -> Instance:
        return next(t for t in self.model_instances if t is model_instance)

    def could_hold(self, r: RequestState, model_instance: ModelInstance) -> bool:
        """Whether the engine, with no other request, would have the memory for `r`. Other models on
        its GPUs count with their weights and without KV.
        """
        tokens = r.prompt_tokens + r.output_tokens
        quota = model_instance.kv_manager.quota_blocks
        if quota is None:
            weights = max(sum(t.weight_pages for t in self.on(gpu)) for gpu in model_instance.gpus)
            quota = model_instance.kv_manager.blocks_in(self.pools[0].total - weights)
        return model_instance.kv_manager.blocks(tokens) <= quota - int(0.02 * quota)

    # ---------------------------------------------------------------- what it can do

    def activate(
        self,
        model: ServedModel,
        gpus: Gpus,
        *,
        quota_pages: int | None = None,
        loaded: bool = False,
    ) -> Instance:
        """Place `model` on these GPUs. Its weights take their pages at once, and it serves when
        they are loaded. An instance of it on other GPUs serves until then, and leaves when its last
        request has ended. `loaded`: the weights are loaded already.
        """
        self.bring(gpus)
        ready_s = self._ready_s(model, gpus, loaded)
        pools = [self.pools[gpu] for gpu in gpus]
        for pool in pools:
            assert pool.free >= model.weight_pages, "weights do not fit"
            pool.free -= model.weight_pages
        place = model.placement
        kv_manager = PooledKVCacheManager(
            pools,
            place.block_bytes_per_gpu,
            place.block_size,
            layers=place.stage_layers if self._policy.pages_by_layer else 0,
            fill=self._policy.page_fill,
        )
        if quota_pages is not None:
            kv_manager.quota_blocks = kv_manager.blocks_in(quota_pages)
        model_instance = self._made_instance(model, gpus, kv_manager, ready_s)
        self.model_instances.append(model_instance)
        if self.serving[model.index] is None:
            self.serving[model.index] = model_instance
        else:
            self._successor[model.index] = model_instance
        self._rebuild()
        return model_instance

    def evict(self, model_instance: ModelInstance) -> None:
        """A model without requests leaves its GPUs at once: its pages are free."""
        placed = self._placed(model_instance)
        self.bring(placed.gpus)
        assert not placed.busy, "a model with requests cannot be evicted"
        self._removed(placed)
        placed.kv_manager.close()
        for gpu in placed.gpus:
            self.pools[gpu].free += placed.weight_pages
        self._serves_no_more(placed)
        self.model_instances.remove(placed)
        self._rebuild()

    def _serves_no_more(self, placed: Instance) -> None:
        """The model's requests go to its successor, if it has one."""
        if self._successor.get(placed.model) is placed:
            del self._successor[placed.model]
        elif self.serving[placed.model] is placed:
            self.serving[placed.model] = self._successor.pop(placed.model, None)

    def send(self, r: RequestState, model_instance: ModelInstance) -> None:
        """Send `r` to the engine of a model instance."""
        self.bring(model_instance.gpus)
        model_instance.receive(r, self.now_s)

    # ---------------------------------------------------------------- events

    def _arrive(self, r: RequestState) -> None:
        """Note that `r` has come, and let the policy place it."""
        model = self.model_of(r)
        self._requests_since[model] += 1
        if self._successor:
            self._switch_over()
        model_instance = self.serving[model]
        if model_instance is not None:
            self.bring(model_instance.gpus)
            if not model_instance.busy:
                self.gaps[model].add(max(0.0, self.now_s - model_instance.idle_since_s))
        elif self._idle_since_s[model] < self.now_s:
            self.gaps[model].add(self.now_s - self._idle_since_s[model])
            self._idle_since_s[model] = self.now_s
        self._policy.arrived(r, model, self)

    def _review(self, since_s: float) -> None:
        """Let the policy look at everything, `since_s` after it last did."""
        self._switch_over()
        weight = 1 - math.exp(-since_s / _RATE_WINDOW_S)
        for model, requests in enumerate(self._requests_since):
            self.rate_rps[model] += weight * (requests / since_s - self.rate_rps[model])
            self._requests_since[model] = 0
        self._remove_left()
        self._policy.control_step(self)

    def _remove_left(self) -> None:
        """Remove instances whose successors serve, when their last request has ended."""
        for model_instance in [t for t in self.model_instances if t.leaving and not t.busy]:
            self.evict(model_instance)

    def _switch_over(self) -> None:
        """Route requests to models that have finished loading on other GPUs."""
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
