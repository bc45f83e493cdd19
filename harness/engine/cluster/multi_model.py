"""Several models on shared GPUs under one controller and one clock.

Events are arrivals and control steps. A device group (`simulator/shared_gpu.py`) lags behind until
a request is sent to it, its state is read, or a control step comes, and then catches up at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ....workloads.arrays import Ints
from ...core.counters import Counters, TimedCounters
from ...core.decisions import ReleaseReason
from ...core.idle_gaps import IdleGaps
from ...core.kv.pages import PagePool, PooledKVCacheManager
from ...core.multi_model_policy import Gpus, ModelInstance, ServedModel, SharingPolicy
from ...core.records.request_records import TimeseriesRow
from ...core.state import Release, RequestState
from ..simulator.shared_gpu import SharedGpuInstance, SharedGpus
from .cluster_arrivals import INF, Arrivals
from .recorder import Recorder

_FRUITLESS = 200  # reviews in a row in which nothing happens: nothing will
_RATE_WINDOW_S = 60.0


class SharedGpuCluster:
    """Implements `Fleet`: what a `SharingPolicy` sees and acts on."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        gpus: int,
        pages: int,
        policy: SharingPolicy,
        arrivals: Arrivals,
        recorder: Recorder,
        model_of: Ints,
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
        self.model_instances: list[SharedGpuInstance] = []  # model instances on a GPU
        # The model instance that gets the requests of each model.
        self.serving: list[SharedGpuInstance | None] = [None] * len(models)
        self.rate_rps = [model.rate_rps for model in models]  # of the last minute or so
        self.gaps = [IdleGaps() for _ in models]
        self.activations: list[TimeseriesRow] = []  # how long each took
        self.migrations = 0
        self.retired: list[SharedGpuInstance] = []
        self.state: Any = policy.new_state()
        self.counters: Counters = TimedCounters(policy.mechanisms(), lambda: self.now_s)
        self._policy = policy
        self._arrivals = arrivals
        self._recorder = recorder
        self._model_of: list[int] = model_of.tolist()
        self._sample_s = sample_s
        self._progress = progress
        # Those that will get a model's requests when they are loaded.
        self._successor: dict[int, SharedGpuInstance] = {}
        self._idle_since_s = [0.0] * len(models)
        self._requests_since = [0] * len(models)  # requests since the last review
        self._loading_until_s = [0.0] * gpus  # of each GPU's host link
        self.requests = policy.backlog(self)  # those that wait before the engines
        self._device_groups: list[SharedGpus] = []
        self._device_group_of: list[SharedGpus] = []
        self._rebuild()

    # ---------------------------------------------------------------- what a policy sees

    def model_of(self, r: RequestState) -> int:
        """The number of the model that `r` asks for."""
        return self._model_of[r.id]

    def on(self, gpu: int) -> list[SharedGpuInstance]:
        """Model instances on one GPU."""
        return [t for t in self._device_group_of[gpu].model_instances if gpu in t.gpus]

    def bring(self, gpus: Sequence[int]) -> None:
        """Bring these GPUs up to the present."""
        for gpu in gpus:
            self._device_group_of[gpu].advance(self.now_s)

    def moves(self, model: int) -> bool:
        """Whether the model is being loaded on other GPUs or has not yet left its former ones."""
        return model in self._successor or any(
            t.leaving for t in self.model_instances if t.model == model
        )

    def idle_s(self, model_instance: ModelInstance) -> float:
        """Seconds without a request; below 0 while it is busy or not ready."""
        assert isinstance(model_instance, SharedGpuInstance)
        return -1.0 if model_instance.busy else self.now_s - model_instance.idle_since_s

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

    def activation_s(self, model: ServedModel) -> float:
        """Seconds until a model serves if no other load delays its weights."""
        place = model.placement
        weight_bytes = place.weight_bytes_per_gpu
        return self._policy.starts.activation_s(weight_bytes, place.tp, self.node_gpus)

    # ---------------------------------------------------------------- what it can do

    def activate(
        self,
        model: ServedModel,
        gpus: Gpus,
        *,
        quota_pages: int | None = None,
        loaded: bool = False,
    ) -> SharedGpuInstance:
        """Place `model` on these GPUs. Its weights take their pages at once, and it serves when
        they are loaded. An instance of it on other GPUs serves until then, and leaves when its last
        request has ended. Loads over the same host link are serial. `loaded`: the weights are
        loaded already.
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
            self.activations.append(TimeseriesRow(self.now_s, "activation", model.name, took_s))
        pools = [self.pools[gpu] for gpu in gpus]
        for pool in pools:
            assert pool.free >= model.weight_pages, "weights do not fit"
            pool.free -= model.weight_pages
        place = model.placement
        kv_manager = PooledKVCacheManager(
            pools,
            place.block_bytes_per_gpu,
            place.block_size,
            layers=place.model.layers if self._policy.pages_by_layer else 0,
            fill=self._policy.page_fill,
        )
        if quota_pages is not None:
            kv_manager.quota_blocks = kv_manager.blocks_in(quota_pages)
        model_instance = self._made_instance(
            model.index,
            gpus,
            model.weight_pages,
            kv_manager,
            self._policy.engine,
            model.step_time,
            ready_s=ready_s,
            sample_s=self._sample_s,
        )
        self.model_instances.append(model_instance)
        if self.serving[model.index] is None:
            self.serving[model.index] = model_instance
        else:
            self._successor[model.index] = model_instance
            self.migrations += 1
        self._rebuild()
        return model_instance

    def _made_instance(self, *args: Any, **kwargs: Any) -> SharedGpuInstance:
        return SharedGpuInstance(*args, **kwargs)

    def _links(self, gpus: Gpus) -> list[int]:
        """GPUs over whose host links a load is copied: its own, then others of the node."""
        begin = gpus[0] // self.node_gpus * self.node_gpus
        node = range(begin, min(begin + self.node_gpus, self.gpus))
        others = sorted(set(node) - set(gpus), key=lambda gpu: (self._loading_until_s[gpu], gpu))
        links = self._policy.starts.links_used(len(gpus), self.node_gpus)
        return [*gpus, *others][: max(links, len(gpus))]

    def evict(self, model_instance: ModelInstance) -> None:
        """A model without requests leaves its GPUs at once: its pages are free."""
        assert isinstance(model_instance, SharedGpuInstance)
        self.bring(model_instance.gpus)
        assert not model_instance.busy, "a model with requests cannot be evicted"
        model_instance.instance.free_finished()
        model_instance.kv_manager.close()
        for gpu in model_instance.gpus:
            self.pools[gpu].free += model_instance.weight_pages
        if self._successor.get(model_instance.model) is model_instance:
            del self._successor[model_instance.model]
        elif self.serving[model_instance.model] is model_instance:
            self.serving[model_instance.model] = self._successor.pop(model_instance.model, None)
        self.model_instances.remove(model_instance)
        self.retired.append(model_instance)
        self._rebuild()

    def send(self, r: RequestState, model_instance: ModelInstance) -> None:
        """Send `r` to the engine of a model instance."""
        self.bring(model_instance.gpus)
        model_instance.receive(r, self.now_s)

    def reject(self, r: RequestState) -> None:
        """End `r` as rejected."""
        self._recorder.gone(Release(r, ReleaseReason.REJECT, self.now_s))

    # ---------------------------------------------------------------- running

    def run(self, requests: int) -> None:
        """Serve until that many requests have ended, or no event is left."""
        policy, arrivals, recorder = self._policy, self._arrivals, self._recorder
        policy.begin(self)
        review_s = policy.control_interval_s
        fruitless, before = 0, (0, 0)
        while recorder.ended < requests and fruitless < _FRUITLESS:
            arrival_s = arrivals.next_s()
            if arrival_s < review_s:
                self.now_s = arrival_s
                self._arrive(arrivals.pop())
                continue
            self.now_s = review_s
            review_s += policy.control_interval_s
            for device_group in self._device_groups:
                device_group.advance(self.now_s)
            self._switch_over()
            self._look(policy.control_interval_s)
            policy.control_step(self)
            progress = recorder.ended, sum(t.instance.measures.steps for t in self.model_instances)
            waiting = arrival_s < INF or max(self._loading_until_s) > self.now_s
            fruitless = 0 if waiting or progress != before else fruitless + 1
            before = progress
            if self._progress is not None:
                self._progress(recorder.ended, self.now_s)

    def _arrive(self, r: RequestState) -> None:
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

    def _look(self, since_s: float) -> None:
        """Update request rates and process released requests."""
        weight = 1 - math.exp(-since_s / _RATE_WINDOW_S)
        for model, requests in enumerate(self._requests_since):
            self.rate_rps[model] += weight * (requests / since_s - self.rate_rps[model])
            self._requests_since[model] = 0
        for model_instance in [t for t in self.model_instances if t.leaving and not t.busy]:
            self.evict(model_instance)

    def _ended(self, model_instance: SharedGpuInstance) -> None:
        engine, recorder = model_instance.instance, self._recorder
        eventful = bool(engine.measures.preemptions)
        recorder.finished(engine.finished, model_instance.gpus[0], eventful=eventful)
        engine.finished.clear()
        for release in engine.outbox:
            if release.reason is not ReleaseReason.FINISH:
                recorder.gone(release)
        engine.outbox.clear()
        self._idle_since_s[model_instance.model] = engine.now_s

    def _rebuild(self) -> None:
        """Device groups anew: GPUs that model instances connect. Those that change must be at the
        present.
        """
        device_group_of = list(range(self.gpus))
        for model_instance in self.model_instances:
            joined = {device_group_of[gpu] for gpu in model_instance.gpus}
            if len(joined) > 1:
                least = min(joined)
                device_group_of = [least if group in joined else group for group in device_group_of]
        old = {device_group.gpus: device_group for device_group in self._device_groups}
        self._device_groups = []
        for root in dict.fromkeys(device_group_of):
            gpus = tuple(gpu for gpu, group in enumerate(device_group_of) if group == root)
            model_instances = [t for t in self.model_instances if t.gpus[0] in gpus]
            device_group = old.get(gpus)
            if device_group is not None:
                device_group.model_instances = model_instances
            else:
                device_group = SharedGpus(
                    gpus, model_instances, self.pools, self.now_s, self._ended, self.requests
                )
            self._device_groups.append(device_group)
        by_gpu = {gpu: group for group in self._device_groups for gpu in group.gpus}
        self._device_group_of = [by_gpu[gpu] for gpu in range(self.gpus)]
