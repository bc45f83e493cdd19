"""Several models on shared GPUs, with a log of where every request is, for explanations."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...core.multi_model_policy import Gpus, ServedModel
from ...core.state import RequestState
from ..loop.traced_instance import EngineTrace, Place, Stop, TracedCounters, TracedInstance
from ..simulator.shared_gpu import SharedGpuInstance, SharedStepTime
from .multi_model import SharedGpuCluster


class _TracedEngine(TracedInstance):
    """The engine of a model that shares its GPUs."""

    def _shared_share(self) -> float:
        times = self.step_time
        return 1 - 1 / times.slowdown if isinstance(times, SharedStepTime) else 0.0


class TracedSharedGpuInstance(SharedGpuInstance):
    """A `SharedGpuInstance` that logs what it does and when requests come."""

    def __init__(self, trace: EngineTrace, name: str, *args: Any, **kwargs: Any) -> None:
        self._trace, self._name, self._index = trace, name, len(trace.instances)
        trace.names[self._index] = name
        kind = partial(_TracedEngine, trace.log(self._index))
        super().__init__(*args, kind=kind, **kwargs)

    def receive(self, r: RequestState, now_s: float) -> None:
        if self.ready_s > now_s:
            why = "its model is being loaded"
            self._trace.stop(r.id, Stop(now_s, Place.LOADING, self._name, why))
        why = "the model is ready" if self.ready_s > now_s else "sent to its engine"
        stop = Stop(max(now_s, self.ready_s), Place.INSTANCE, self._name, why, self._index)
        self._trace.stop(r.id, stop)
        super().receive(r, now_s)


class TracedSharedGpuCluster(SharedGpuCluster):
    """A `SharedGpuCluster` that keeps the stops of requests in a trace."""

    def __init__(self, *args: Any, trace: EngineTrace, **kwargs: Any) -> None:
        self._trace = trace
        super().__init__(*args, **kwargs)
        self.counters = TracedCounters(self.counters, lambda: self.now_s, trace.acts)

    def _new_instance(
        self, model: ServedModel, gpus: Gpus, *args: Any, **kwargs: Any
    ) -> SharedGpuInstance:
        name = f"{model.name} on GPU {', '.join(map(str, gpus))}"
        return TracedSharedGpuInstance(self._trace, name, model.index, gpus, *args, **kwargs)

    def _arrive(self, r: RequestState) -> None:
        stop = Stop(self.now_s, Place.HELD, "queue before the engines", "on arrival")
        self._trace.stop(r.id, stop)
        super()._arrive(r)
