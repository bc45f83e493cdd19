"""What a system decides that serves several models on shared GPUs, and what it sees of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ...predictors.activation import Loader, NaiveStart
from ...predictors.placement import OVERHEAD_BYTES, Placement
from ...predictors.step_time import StepTime
from .cluster_policy import INF
from .idle_gaps import IdleGaps
from .pages import PagedLedger, PagePool, pages_of
from .policy import Knobs, Policy, knob
from .state import RequestState

Gpus = tuple[int, ...]


class Backlog(Protocol):
    """Requests that wait before they get to any model's engine."""

    def waits(self, gpus: Iterable[int]) -> bool:
        """Does anybody wait for these GPUs?"""
        ...

    def admit(self, gpus: Iterable[int], now_s: float) -> None:
        """Let in whom there is room for."""
        ...

    def next_s(self, gpus: Iterable[int], now_s: float) -> float:
        """When to ask again though nothing has changed; infinite if never."""
        ...


@dataclass(frozen=True)
class Hosted:
    """A model that is served: its number in the workload, its shape on `placement.tp` GPUs, its
    step times, and what is known of its requests beforehand.

    `slo_s` is the mean of its finite TTFT SLOs, or infinite.
    """

    index: int
    name: str
    placement: Placement
    step_time: StepTime
    rate_rps: float
    prompt_tokens: float  # mean
    output_tokens: float  # mean
    slo_s: float = INF

    @property
    def tp(self) -> int:
        """GPUs that it stands on."""
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


class Tenant(Protocol):
    """A model on its GPUs, with its weights, its engine and its KV pages."""

    @property
    def model(self) -> int:
        """Its number."""
        ...

    @property
    def gpus(self) -> Gpus: ...
    @property
    def weight_pages(self) -> int:
        """Pages of weights on each GPU."""
        ...

    @property
    def ledger(self) -> PagedLedger: ...
    @property
    def ready_s(self) -> float:
        """It can serve from then on."""
        ...

    @property
    def busy(self) -> bool:
        """Does it have requests (those on their way included)?"""
        ...

    @property
    def idle(self) -> bool:
        """Is its engine empty (requests on their way to it aside)?"""
        ...

    @property
    def n_waiting(self) -> int:
        """Requests that wait in its engine."""
        ...

    @property
    def n_admitted(self) -> int:
        """Requests in its batch or on their way to it."""
        ...

    @property
    def unbegun_tokens(self) -> int:
        """Prompt tokens that are here and not computed."""
        ...

    @property
    def coming_pages(self) -> int:
        """Pages that requests on their way here will take."""
        ...

    def receive(self, r: RequestState, now_s: float) -> None:
        """`r` is here; its engine looks at it as soon as the model is ready."""
        ...


class Fleet(Protocol):
    """What a `SharingPolicy` sees of the GPUs and models, and what it can do with them."""

    @property
    def now_s(self) -> float:
        """The clock."""
        ...

    @property
    def state(self) -> Any:
        """What the policy's `new_state()` returned."""
        ...

    @property
    def models(self) -> Sequence[Hosted]:
        """All models that are served."""
        ...

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        ...

    @property
    def node_gpus(self) -> int:
        """GPUs of one node."""
        ...

    @property
    def pools(self) -> Sequence[PagePool]:
        """Memory of each GPU."""
        ...

    @property
    def tenants(self) -> Sequence[Tenant]:
        """All that stand on a GPU."""
        ...

    @property
    def serving(self) -> Sequence[Tenant | None]:
        """Which tenant gets a model's requests, by model."""
        ...

    @property
    def rate_rps(self) -> Sequence[float]:
        """Arrival rate of each model in the last minute or so."""
        ...

    @property
    def gaps(self) -> Sequence[IdleGaps]:
        """Idle gaps of each model."""
        ...

    @property
    def requests(self) -> Backlog | None:
        """What the policy's `backlog` returned."""
        ...

    def model_of(self, r: RequestState) -> int:
        """The number of the model that `r` asks for."""
        ...

    def on(self, gpu: int) -> Sequence[Tenant]:
        """Tenants of a GPU."""
        ...

    def bring(self, gpus: Sequence[int]) -> None:
        """Bring these GPUs up to the present."""
        ...

    def moves(self, model: int) -> bool:
        """Is it being loaded elsewhere, or has it not yet left the place that it came from?"""
        ...

    def idle_s(self, tenant: Tenant) -> float:
        """Seconds for which it has been idle; below 0 while it is busy or not ready."""
        ...

    def could_hold(self, r: RequestState, tenant: Tenant) -> bool:
        """Would its engine have the memory for `r` if it were empty?"""
        ...

    def activate(
        self, model: Hosted, gpus: Gpus, *, quota_pages: int | None = None, loaded: bool = False
    ) -> Tenant:
        """Place `model` on these GPUs and load its weights, unless they are `loaded` already."""
        ...

    def evict(self, tenant: Tenant) -> None:
        """A model without requests leaves its GPUs at once."""
        ...

    def send(self, r: RequestState, tenant: Tenant) -> None:
        """`r` goes to an engine."""
        ...

    def reject(self, r: RequestState) -> None:
        """`r` is not served."""
        ...


class RequestQueue(Protocol):
    """Requests of several models that wait for one device."""

    def push(self, r: RequestState, prefill_s: float) -> None:
        """`r` enters; its prompt takes `prefill_s` of the device."""
        ...

    def remove(self, r: RequestState) -> None:
        """`r` leaves from wherever it stands."""
        ...

    def ordered(self, now_s: float) -> Sequence[RequestState]:
        """All, the next one first."""
        ...


@dataclass(frozen=True)
class IdleModel:
    """A model without requests: its number, its TTFT SLO, for how long it has been idle, and the
    idle gaps it had before.
    """

    model: int
    slo_s: float
    idle_s: float
    gaps: IdleGaps


@dataclass(frozen=True)
class SharingPolicy(Knobs):
    """Decides for a `Fleet`: which model stands where, and where requests wait.

    The two parameters are limits of each model's engine.
    """

    # Parameters that decide before real servers, too; none: the system is simulated alone.
    on_servers: ClassVar[tuple[str, ...]] = ()

    max_num_batched_tokens: int = knob(2048, 16, 131072, log=True)
    max_num_seqs: int = knob(256, 1, 8192, log=True)

    @property
    def engine(self) -> Policy:
        """The policy of every model's engine."""
        raise NotImplementedError

    @property
    def starts(self) -> Loader | NaiveStart:
        """How long a model takes to come."""
        return NaiveStart()

    @property
    def review_s(self) -> float:
        """Seconds between two calls of `review`."""
        return 5.0

    def new_state(self) -> Any:
        """What it keeps in one run, empty (`Fleet.state`)."""
        return None

    def begin(self, fleet: Fleet) -> None:
        """Before the first request: who stands where at the start, already loaded."""
        raise NotImplementedError

    def backlog(self, fleet: Fleet) -> Backlog | None:
        """Where requests wait before they get to an engine; None: they do not."""
        return None

    def arrived(self, r: RequestState, model: int, fleet: Fleet) -> None:
        """Send `r` on, hold it, or reject it."""
        raise NotImplementedError

    def moved(self, old: Tenant, new: Tenant, fleet: Fleet) -> None:
        """A model has been loaded elsewhere and gets its requests there from now on."""

    def review(self, fleet: Fleet) -> None:
        """At regular times."""

    # ---------------------------------------------------------------- before real servers

    @property
    def keeps_engines(self) -> bool:
        """Does the engine of an evicted model stay, asleep, rather than stop?"""
        return False

    def server_queue(self) -> RequestQueue:
        """The queue before the servers, empty."""
        raise NotImplementedError

    def begins_at_once(self, requests: int, unbegun_tokens: int) -> bool:
        """May a request go to a server which has so many, with so many prompt tokens unbegun?"""
        return True

    def leaving_order(self, idle: Iterable[IdleModel]) -> Sequence[int]:
        """Which idle models give their room to others, the first one first."""
        raise NotImplementedError
