"""The policy interface for several models on shared GPUs, and what such a policy sees of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ...predictors.activation import Loader, NaiveStart
from ...predictors.placement import OVERHEAD_BYTES
from ...predictors.step_time import StepTime
from .cluster_policy import INF
from .counters import Counters
from .idle_gaps import IdleGaps
from .kv.pages import PagePool, PooledKVCacheManager, pages_of
from .policy import Parameters, Policy, parameter
from .state import RequestState

Gpus = tuple[int, ...]


class Backlog(Protocol):
    """Requests that wait in front of the engines of several models."""

    def waits(self, gpus: Iterable[int]) -> bool:
        """Whether a request waits for one of these GPUs."""

    def admit(self, gpus: Iterable[int], now_s: float) -> None:
        """Send on the requests that have room on these GPUs."""

    def next_s(self, gpus: Iterable[int], now_s: float) -> float:
        """Next time at which `admit` could change something without another event; infinite if
        none.
        """

    def forget(self, r: RequestState) -> None:
        """Remove `r` from wherever it waits: its client has gone."""


class ModelMemory(Protocol):
    """Memory of a model on each of its GPUs; a `Placement` has it."""

    @property
    def tp(self) -> int: ...
    @property
    def stage_layers(self) -> int: ...
    @property
    def weight_bytes_per_gpu(self) -> int: ...
    @property
    def reserve_bytes_per_gpu(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def block_bytes_per_gpu(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int: ...


@dataclass(frozen=True)
class ServedModel:
    """A model that is served: its number in the workload, its shape on `placement.tp` GPUs, its
    step times, and what is known of its requests beforehand.

    `slo_s` is the mean of its finite TTFT SLOs, or infinite.
    """

    index: int
    name: str
    placement: ModelMemory
    step_time: StepTime
    rate_rps: float
    prompt_tokens: float  # mean
    output_tokens: float  # mean
    slo_s: float = INF

    @property
    def tp(self) -> int:
        """Number of GPUs of the model."""
        return self.placement.tp

    @property
    def weight_pages(self) -> int:
        """Pages of weights, and of what its engine works in, on each GPU."""
        place = self.placement
        return pages_of(place.weight_bytes_per_gpu + place.reserve_bytes_per_gpu - OVERHEAD_BYTES)

    @property
    def weighed_slo_s(self) -> float:
        """The SLO that placements weigh by; the same for all models without one."""
        return self.slo_s if self.slo_s < INF else 1.0

    def prefill_s(self, prompt_tokens: int, chunk_tokens: int) -> float:
        """Seconds of a prompt at the speed of prefill by chunks of that size."""
        chunk_s = self.step_time.step_s(0, 0, ((0, chunk_tokens),))
        return prompt_tokens * chunk_s / chunk_tokens

    @property
    def work_s(self) -> float:
        """Seconds of its GPUs that a request takes: prefill, and its part of a batch of eight."""
        step_s = self.step_time.step_s
        kv_tokens = int(self.prompt_tokens + self.output_tokens / 2)
        prefill_s = step_s(0, 0, ((0, max(1, int(self.prompt_tokens))),))
        return prefill_s + self.output_tokens * step_s(8, 8 * kv_tokens, ()) / 8

    @property
    def kv_demand(self) -> float:
        """Bytes of KV on one GPU that its requests need at a time (Little's law), roughly."""
        tokens = self.prompt_tokens + self.output_tokens / 2
        place = self.placement
        held_s = self.work_s * 2
        return self.rate_rps * held_s * tokens * place.kv_bytes_per_token / place.tp


class ModelInstance(Protocol):
    """A model on its GPUs, with its weights, its engine and its KV pages."""

    @property
    def model(self) -> int:
        """Index of the model in the workload."""

    @property
    def gpus(self) -> Gpus: ...
    @property
    def weight_pages(self) -> int:
        """Pages of weights on each GPU."""

    @property
    def kv_manager(self) -> PooledKVCacheManager: ...
    @property
    def ready_s(self) -> float:
        """Time from which it can serve."""

    @property
    def busy(self) -> bool:
        """Whether it has requests, including those in transit."""

    @property
    def idle(self) -> bool:
        """Whether its engine is empty, not counting requests in transit."""

    @property
    def n_waiting(self) -> int:
        """Requests that wait in its engine."""

    @property
    def n_admitted(self) -> int:
        """Requests in its batch or on their way to it."""

    @property
    def unbegun_tokens(self) -> int:
        """Prompt tokens of its requests that are not computed yet."""

    @property
    def coming_pages(self) -> int:
        """Pages that the requests in transit will take."""

    def receive(self, r: RequestState, now_s: float) -> None:
        """Accept `r`; its engine schedules it as soon as the model is ready."""


class MultiModelCluster(Protocol):
    """What a `SharingPolicy` may read of GPUs and models, and the actions it may take."""

    @property
    def now_s(self) -> float:
        """Current time, in seconds from the start of the run."""

    @property
    def state(self) -> Any:
        """The object that the policy's `new_state()` returned."""

    @property
    def counters(self) -> Counters:
        """Counters of the policy's `mechanisms()`."""

    @property
    def models(self) -> Sequence[ServedModel]:
        """All served models, by index."""

    @property
    def gpus(self) -> int:
        """Number of GPUs in the cluster."""

    @property
    def node_gpus(self) -> int:
        """Number of GPUs in one node."""

    @property
    def pools(self) -> Sequence[PagePool]:
        """The page pool of each GPU."""

    @property
    def model_instances(self) -> Sequence[ModelInstance]:
        """All model instances on the GPUs."""

    @property
    def serving(self) -> Sequence[ModelInstance | None]:
        """The model instance that receives a model's requests, by model; None: it is on no GPU."""

    @property
    def rate_rps(self) -> Sequence[float]:
        """Arrival rate of each model in about the last minute."""

    @property
    def gaps(self) -> Sequence[IdleGaps]:
        """Past idle gaps of each model."""

    @property
    def requests(self) -> Backlog | None:
        """The object that `SharingPolicy.backlog` returned."""

    def model_of(self, r: RequestState) -> int:
        """Index of the model that `r` asks for."""

    def on(self, gpu: int) -> Sequence[ModelInstance]:
        """Model instances on one GPU."""

    def bring(self, gpus: Sequence[int]) -> None:
        """Run these GPUs up to the present."""

    def moves(self, model: int) -> bool:
        """Whether the model is being loaded on other GPUs or has not yet left its former ones."""

    def idle_s(self, model_instance: ModelInstance) -> float:
        """Seconds for which it has been idle; below 0 while it is busy or not ready."""

    def could_hold(self, r: RequestState, model_instance: ModelInstance) -> bool:
        """Whether its engine would have the memory for `r` if it were empty."""

    def activate(
        self,
        model: ServedModel,
        gpus: Gpus,
        *,
        quota_pages: int | None = None,
        loaded: bool = False,
    ) -> ModelInstance:
        """Place `model` on these GPUs and load its weights, unless they are `loaded` already."""

    def evict(self, model_instance: ModelInstance) -> None:
        """Remove a model without requests from its GPUs at once."""

    def send(self, r: RequestState, model_instance: ModelInstance) -> None:
        """Send `r` to the engine of a model instance."""

    def reject(self, r: RequestState) -> None:
        """End `r` as rejected."""


@dataclass(frozen=True)
class SharingPolicy(Parameters):
    """Decides which model is on which GPUs and where requests wait. The first two parameters limit
    each model's engine; `pages_by_layer` and `page_fill` say what pages hold (`pages`), `start_s`
    how long a model takes to start, where that was measured (0: as `starts` says).
    """

    on_servers: ClassVar[bool] = False  # it can decide before real servers, too
    # Its parameters where only the number of models on a GPU is known; None: it must know bytes.
    in_places: ClassVar[Mapping[str, Any] | None] = None

    max_num_batched_tokens: int = parameter(2048, 16, 131072, log=True)
    max_num_seqs: int = parameter(256, 1, 8192, log=True)
    pages_by_layer: bool = parameter(False, environment=True)
    page_fill: float = parameter(1.0, 0.1, 1.0, environment=True)
    start_s: float = parameter(0.0, 0.0, 3600.0, environment=True)

    @property
    def engine(self) -> Policy:
        """Read once for each model instance. It reads the parameters alone.

        Returns:
            The scheduling policy inside the engine of every model.

        Example::

            @property
            def engine(self) -> Policy:
                return Vllm(max_num_seqs=self.max_num_seqs)
        """
        raise NotImplementedError

    @property
    def starts(self) -> Loader | NaiveStart:
        """Read once before a run. It reads the parameters alone.

        Returns:
            The model of how long it takes to load and start a model.

        Example::

            @property
            def starts(self) -> Loader | NaiveStart:
                return Loader(parallel=True)
        """
        return NaiveStart()

    @property
    def control_interval_s(self) -> float:
        """Read once before a run. It reads the parameters alone.

        Returns:
            Seconds between two calls of `control_step`.

        Example::

            @property
            def control_interval_s(self) -> float:
                return 1.0
        """
        return 5.0

    def new_state(self) -> Any:
        """Called once for each run, before `begin`. It reads the parameters alone.

        Returns:
            An empty, mutable object for what the policy learns (`MultiModelCluster.state`).

        Example::

            def new_state(self) -> dict[int, float]:
                return {}  # model to the time of its last activation
        """
        return None

    def begin(self, cluster: MultiModelCluster) -> None:
        """Called once before the first request. It may read all of `cluster`, which is empty, and
        places models that are loaded at the start. Returns nothing.

        Example::

            def begin(self, cluster: MultiModelCluster) -> None:
                for gpu, model in zip(range(cluster.gpus), cluster.models):
                    cluster.activate(model, (gpu,), loaded=True)
        """
        raise NotImplementedError

    def backlog(self, cluster: MultiModelCluster) -> Backlog | None:
        """Called once before `begin`. It may keep `cluster`.

        Returns:
            Where requests wait in front of the engines; None: requests go to an engine on arrival.

        Example::

            def backlog(self, cluster: MultiModelCluster) -> Backlog:
                return MyBacklog(cluster)
        """
        return None

    def arrived(self, r: RequestState, model: int, cluster: MultiModelCluster) -> None:
        """Called when `r`, a request for model number `model`, arrives. It may read all of
        `cluster` and all of `r` but its true output length; it must send, hold or reject `r`.
        Returns nothing.

        Example::

            def arrived(self, r: RequestState, model: int, cluster: MultiModelCluster) -> None:
                instance = cluster.serving[model]
                cluster.send(r, instance) if instance else cluster.reject(r)
        """
        raise NotImplementedError

    def moved(self, old: ModelInstance, new: ModelInstance, cluster: MultiModelCluster) -> None:
        """Called when `new` has been loaded and receives the requests of its model in place of
        `old`. It may read all of `cluster`. Returns nothing.

        Example::

            def moved(self, old, new, cluster) -> None:
                cluster.state[new.model] = cluster.now_s
        """

    def control_step(self, cluster: MultiModelCluster) -> None:
        """Called every `control_interval_s` seconds. It may read all of `cluster`, activate and
        evict models. Returns nothing.

        Example::

            def control_step(self, cluster: MultiModelCluster) -> None:
                for instance in list(cluster.model_instances):
                    if cluster.idle_s(instance) > self.idle_limit_s:
                        cluster.evict(instance)
        """

    @property
    def keeps_engines(self) -> bool:
        """Read once before a run on real servers. It reads the parameters alone.

        Returns:
            Whether the engine of an evicted model sleeps instead of stopping.

        Example::

            @property
            def keeps_engines(self) -> bool:
                return True
        """
        return False
