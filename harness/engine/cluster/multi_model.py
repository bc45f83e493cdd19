"""Several models on shared GPUs under one controller and one clock.

Events are arrivals and control steps. A device group (`simulator/shared_gpu.py`) lags behind until
a request is sent to it, its state is read, or a control step comes, and then catches up at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....workloads.arrays import Ints
from ...core.counters import TimedCounters
from ...core.decisions import ReleaseReason
from ...core.kv.pages import PooledKVCacheManager
from ...core.multi_model_policy import Gpus, ServedModel, SharingPolicy
from ...core.records.request_records import TimeseriesRow
from ...core.state import Release, RequestState
from ..simulator.shared_gpu import SharedGpuInstance, SharedGpus
from .cluster_arrivals import INF, Arrivals
from .placed_models import PlacedModels
from .recorder import Recorder

_FRUITLESS = 200  # reviews in a row in which nothing happens: nothing will


class SharedGpuCluster(PlacedModels[SharedGpuInstance]):
    """Implements `MultiModelCluster`: what a `SharingPolicy` sees and acts on."""

    def __init__(
        self,
        models: list[ServedModel],
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
        self.now_s = 0.0
        self.activations: list[TimeseriesRow] = []  # how long each took
        self.retired: list[SharedGpuInstance] = []
        self._arrivals = arrivals
        self._recorder = recorder
        self._model_of: list[int] = model_of.tolist()
        self._sample_s = sample_s
        self._progress = progress
        self._loading_until_s = [0.0] * gpus  # of each GPU's host link
        counters = TimedCounters(policy.mechanisms(), lambda: self.now_s)
        super().__init__(models, gpus, pages, policy, counters, node_gpus=node_gpus)
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

    def activation_s(self, model: ServedModel) -> float:
        """Seconds until a model serves if no other load delays its weights."""
        if self._policy.start_s:
            return self._policy.start_s
        place = model.placement
        weight_bytes = place.weight_bytes_per_gpu
        return self._policy.starts.activation_s(weight_bytes, place.tp, self.node_gpus)

    # ---------------------------------------------------------------- loading and removing

    def _ready_s(self, model: ServedModel, gpus: Gpus, loaded: bool) -> float:
        """Loads over the same host link are serial."""
        if loaded:
            return self.now_s
        links = self._links(gpus)
        begin_s = max(self.now_s, *(self._loading_until_s[gpu] for gpu in links))
        ready_s = begin_s + self.activation_s(model)
        for gpu in links:
            self._loading_until_s[gpu] = ready_s
        took_s = ready_s - self.now_s
        self.activations.append(TimeseriesRow(self.now_s, "activation", model.name, took_s))
        return ready_s

    def _made_instance(
        self, model: ServedModel, gpus: Gpus, kv_manager: PooledKVCacheManager, ready_s: float
    ) -> SharedGpuInstance:
        return self._new_instance(
            model,
            gpus,
            model.weight_pages,
            kv_manager,
            self._policy.engine,
            model.step_time,
            ready_s=ready_s,
            sample_s=self._sample_s,
        )

    def _new_instance(
        self, model: ServedModel, gpus: Gpus, *args: Any, **kwargs: Any
    ) -> SharedGpuInstance:
        return SharedGpuInstance(model.index, gpus, *args, **kwargs)

    def _removed(self, model_instance: SharedGpuInstance) -> None:
        model_instance.instance.free_finished()
        self.retired.append(model_instance)

    def _links(self, gpus: Gpus) -> list[int]:
        """GPUs over whose host links a load is copied: its own, then others of the node."""
        begin = gpus[0] // self.node_gpus * self.node_gpus
        node = range(begin, min(begin + self.node_gpus, self.gpus))
        others = sorted(set(node) - set(gpus), key=lambda gpu: (self._loading_until_s[gpu], gpu))
        links = self._policy.starts.links_used(len(gpus), self.node_gpus)
        return [*gpus, *others][: max(links, len(gpus))]

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
            self._review(policy.control_interval_s)
            progress = recorder.ended, sum(t.instance.measures.steps for t in self.model_instances)
            waiting = arrival_s < INF or max(self._loading_until_s) > self.now_s
            fruitless = 0 if waiting or progress != before else fruitless + 1
            before = progress
            if self._progress is not None:
                self._progress(recorder.ended, self.now_s)

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
