"""The cluster policy interface: routing, hand-over and control decisions across instances.

A router overrides `route` alone (`Routed`). The engine brings an instance up to the present when a
policy reads its state; instances that are not read advance lazily.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, Self, TypeVar

from ...predictors.placement import Placement
from ...predictors.step_time import StepTime
from ...workloads.arrays import Floats
from ...workloads.errors import SloBenchError
from .counters import Counters
from .instance import Instance, Links, NoDelay
from .kv.kv_cache_manager import KVCacheManager
from .phase_capacity import PhaseCapacity
from .policy import AnyPolicy, Parameters
from .predictions import Learner
from .records.request_records import TimeseriesRow
from .state import Release, RequestState

INF = float("inf")
MANY = 16  # instances from which on `ClusterView.kept` costs less than to read each
EMBEDS = "embedder"  # the role of instances that compute embeddings


class RouteOutcome(Enum):
    """What becomes of a request that is sent to no instance."""

    HOLD = "hold"  # it waits in the controller's own queue
    REJECT = "reject"
    DROP = "drop"


HOLD, REJECT, DROP = RouteOutcome.HOLD, RouteOutcome.REJECT, RouteOutcome.DROP


@dataclass(frozen=True)
class Role:
    """Instances with the same policy and placement. None means the value of the whole run.

    `prefill_only`: requests that are prefilled here decode on another instance. `start_s`: seconds
    from the start of the run until the instances accept requests. `spare`: they are off until the
    policy starts them. `learner` makes the step-time
    predictions of each instance; by default the true step times. `devices`: the device of each
    instance, by name; instances with the same device take turns. By default each has its own.
    `kv_manager` makes the KV cache manager of each instance, with the arguments of
    `KVCacheManager`.
    """

    name: str
    policy: AnyPolicy
    instances: int
    placement: Placement | None = None
    step_time: StepTime | None = None
    prefix_cache: bool | None = None
    prefill_only: bool = False
    start_s: float = 0.0
    spare: bool = False
    learner: Callable[[Placement], Learner] | None = None
    devices: tuple[str, ...] = ()
    kv_manager: Callable[[int, int, int, int], KVCacheManager] = KVCacheManager

    def __post_init__(self) -> None:
        if self.devices and len(self.devices) != self.instances:
            raise SloBenchError(
                f"role {self.name} has {self.instances} instances but names "
                f"{len(self.devices)} devices"
            )


@dataclass(frozen=True)
class ServerRole:
    """Real servers that are alike. `policy` decides inside each; None: the server unpatched."""

    name: str
    servers: int
    policy: AnyPolicy | None = None


@dataclass(frozen=True)
class OnServers:
    """How a system across instances runs on real servers.

    `splits`: servers of the first role compute prompts, those of the second answers, and KV goes
    between them. Otherwise the cluster policy itself decides before the servers, as it does in the
    simulator. `counts` names the parameters that set the numbers of servers, `settled` those of a
    split whose values its `refusals` have checked. `refusals` maps a backend to the reason why the
    system cannot run there; "" stands for every backend.
    """

    roles: tuple[ServerRole, ...]
    counts: tuple[str, str]
    splits: bool = False
    settled: tuple[str, ...] = ()
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """An instance (by its number) fails at `at_s`, between two iterations, and is up again at
    `back_s`, empty; by default never.
    """

    instance: int
    at_s: float
    back_s: float = INF


class ClusterView(Protocol):
    """What a cluster policy may read. In the simulator the cluster itself implements it."""

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
    def instances(self) -> Sequence[Instance]:
        """All instances, also those that are down; with pipeline parallelism every lane."""

    @property
    def up(self) -> Sequence[Instance]:
        """Instances that accept requests for generation."""

    def role(self, name: str) -> Sequence[Instance]:
        """Instances of one role that accept requests."""

    def kept(self, value: Callable[[Instance], float], role: str | None = None) -> Floats:
        """`value` of each of `up`, or of `role(role)`, in order. It is called again only for
        instances of which snapshot, inbox, number of requests or KV cache manager may have changed,
        and may read no more than these and constants: so a router can read hundreds of instances.
        """

    @property
    def held(self) -> Sequence[RequestState]:
        """Requests in the controller's own queue, the longest there first."""

    @property
    def links(self) -> Links:
        """Links that KV is transferred over."""


class ClusterControl(ClusterView, Protocol):
    """What an `Action` may change in the cluster."""

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Call `act` at that time, or now if it is past."""

    def migrate(
        self, r: RequestState, source: Instance, target: Instance, *, copied_tokens: int = 0
    ) -> None:
        """Move `r` between two iterations, its KV over a link; `copied_tokens` are there already.

        A request without KV at `source` is at `target` at once. Its blocks at `source` are held
        until the transfer ends.
        """

    def duplicate(self, r: RequestState, instance: Instance) -> RequestState:
        """Send a copy of `r`, from its prompt on, to `instance`; the copy. The answer that ends
        first is that of the request; the policy ends the other one with `cancel`.
        """

    def cancel(self, r: RequestState, instance: Instance) -> None:
        """End one of two copies, which is at `instance`, between two iterations; none is left to
        end where it has all its tokens.
        """

    def unite(self, first: Instance, second: Instance) -> None:
        """Couple two instances that compute for each other: from now on neither runs ahead of the
        other.
        """

    def separate(self, first: Instance, second: Instance) -> None:
        """End the coupling that `unite` began."""

    def start(self, instance: Instance, startup_s: float = 0.0) -> None:
        """Let an instance that is off accept requests after `startup_s`; one that still serves its
        last requests does at once. Its GPUs are paid for from now on.
        """

    def stop(self, instance: Instance) -> None:
        """Let `instance` accept no more requests. Its GPUs are paid for until it has served those
        that it has.
        """

    def bring(self, instance: Instance) -> None:
        """Run `instance` up to the present."""

    def reconsider(self, instance: Instance) -> None:
        """Make the policy of `instance` decide again, because its capacity has changed."""


class Action(Protocol):
    """What a controller does in a control step, for example a migration."""

    def apply(self, cluster: ClusterControl) -> None:
        """Begin the action now; schedule its later parts with `cluster.at`."""


@dataclass(frozen=True)
class ClusterPolicy(Parameters):
    """Decides across instances. A subclass overrides the hooks that differ; others cost nothing.

    Parameters are frozen dataclass fields with bounds, as in `Policy`. Break ties by the smaller
    `index`, so that the same seed gives the same bytes.

    `executed`: the torch engine carries out everything that the policy decides: routing, the
    hand-over of prefilled requests and moves of modules (`Instance.offload`).
    """

    executed: ClassVar[bool] = False

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        """Called once before a run. `policy` and `placement` are those of the system, `instances`
        their number; nothing else may be read.

        Returns:
            The roles of the cluster with the number of instances of each.

        Raises:
            SloBenchError: the system cannot run with this number of instances.

        Example::

            def layout(self, policy, placement, instances) -> Sequence[Role]:
                prefill = Role("prefill", policy, self.n_prefill, prefill_only=True)
                return (prefill, Role("decode", policy, instances - self.n_prefill))
        """
        return (Role("", policy, instances),)

    def for_load(self, capacity: PhaseCapacity, instances: int) -> Self:
        """Called once before `layout`, with what one instance is estimated to carry of the workload
        in each phase.

        Returns:
            The policy with the parameters that it chooses by the load; itself if it chooses none.

        Example::

            def for_load(self, capacity, instances) -> Self:
                return replace(self, n_prefill=capacity.prefill_instances(instances))
        """
        return self

    @property
    def least_instances(self) -> int:
        """Read once, when an experiment sets no number of instances. It reads the parameters alone.

        Returns:
            The smallest number of instances that `layout` accepts.

        Example::

            @property
            def least_instances(self) -> int:
                return self.n_prefill + self.n_decode
        """
        return 1

    def on_servers(self, policy: AnyPolicy) -> OnServers | None:
        """Called once before a run on real servers, with the policy of the system.

        Returns:
            The server roles and the backends that are refused; None: the system is simulated only.

        Example::

            def on_servers(self, policy: AnyPolicy) -> OnServers | None:
                roles = (ServerRole("prefill", self.n_prefill), ServerRole("decode", self.n_decode))
                return OnServers(roles, ("n_prefill", "n_decode"), splits=True)
        """
        return None

    def links(self, instances: Sequence[Instance]) -> Links:
        """Called once when the instances exist. It may read constants of `instances` (placement,
        devices).

        Returns:
            The links that KV transfers between instances take.

        Example::

            def links(self, instances: Sequence[Instance]) -> Links:
                return KvNetwork(links_by_name(self.link))
        """
        return NoDelay()

    def new_state(self) -> Any:
        """Called once for each run, before the first request. It reads the parameters alone.

        Returns:
            An empty, mutable object for what the policy learns (`cluster.state`); None if it learns
            nothing.

        Example::

            def new_state(self) -> dict[int, int]:
                return {}  # request id to the instance that holds its prefix
        """
        return None

    def extra_records(self, state: Any, instances: Sequence[Instance]) -> Sequence[TimeseriesRow]:
        """Called once at the end of a run, with the object that `new_state` returned.

        Returns:
            Additional records for the run folder; the requests of every instance are recorded
            anyway.

        Example::

            def extra_records(self, state, instances) -> Sequence[TimeseriesRow]:
                name = instances[0].name
                return [TimeseriesRow(s.time_s, "load", name, s.load) for s in state.samples]
        """
        return ()

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        """Called when `r` arrives, and for held requests when an instance starts. It may read all
        of `cluster` and all of `r` but its true output length.

        Returns:
            The instance that gets `r`, or HOLD (the controller's queue), REJECT or DROP.

        Example::

            def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
                return min(cluster.up, key=lambda i: (i.queue, i.index), default=HOLD)
        """
        raise NotImplementedError(f"{type(self).__name__} must override route")

    def travel_s(self, r: RequestState, instance: Instance, cluster: ClusterView) -> float:
        """Called when `r` is sent to `instance`. It reads the parameters, and constants of both.

        Returns:
            Seconds that the request takes to get there and its answer to get back, which it spends
            on its way there; 0 where the router stands beside the instances.

        Example::

            def travel_s(self, r: RequestState, instance: Instance, cluster: ClusterView) -> float:
                return 0.0 if instance.role == "near" else self.round_trip_s
        """
        return 0.0

    def on_returned(self, release: Release, cluster: ClusterView) -> Instance | RouteOutcome:
        """Called when an instance returns a request (`ReleaseReason.OFFLOAD`) or loses it by a
        failure (`ReleaseReason.FAIL`). It may read all of `cluster` and `release`.

        Returns:
            The instance that gets the request, or HOLD, REJECT or DROP. A request that fails and is
            dropped is reported as failed.

        Example::

            def on_returned(self, release, cluster) -> Instance | RouteOutcome:
                return self.route(release.request, cluster)
        """
        return DROP

    def decode_instance(
        self, r: RequestState, source: Instance, cluster: ClusterView
    ) -> Instance | RouteOutcome:
        """Called when `source`, an instance of a `prefill_only` role, has prefilled `r`; after HOLD
        again whenever a request has ended or an instance has started or failed. It may read all of
        `cluster`.

        Returns:
            The instance that decodes `r`; its KV moves over a link unless that is `source`. HOLD:
            `r` keeps its blocks at `source`, and requests prefilled later wait behind it.

        Example::

            def decode_instance(self, r, source, cluster) -> Instance | RouteOutcome:
                decoding = cluster.role("decode")
                return min(decoding, key=lambda i: (i.n_requests, i.index), default=HOLD)
        """
        return source

    def on_capacity(self, instance: Instance, cluster: ClusterView) -> RequestState | None:
        """Called when a request leaves `instance` or its last waiting request has begun; called
        again until it returns None. It may read all of `cluster`.

        Returns:
            A request of `cluster.held` to send to `instance`, or None.

        Example::

            def on_capacity(self, instance: Instance, cluster: ClusterView) -> RequestState | None:
                return cluster.held[0] if cluster.held and not instance.queue else None
        """
        return None

    @property
    def control_interval_s(self) -> float:
        """Read once before a run. It reads the parameters alone.

        Returns:
            Seconds between two calls of `control_step`; infinite: it is never called.

        Example::

            @property
            def control_interval_s(self) -> float:
                return 0.5
        """
        return INF

    def control_step(self, cluster: ClusterView) -> Sequence[Action]:
        """Called every `control_interval_s` seconds while requests are in the cluster or to come.
        It may read all of `cluster`.

        Returns:
            The actions to apply now, in order.

        Example::

            def control_step(self, cluster: ClusterView) -> Sequence[Action]:
                busiest = max(cluster.up, key=lambda i: i.n_requests)
                return [DrainOne(busiest)] if busiest.queue > self.high else ()
        """
        return ()


@dataclass(frozen=True)
class Routed(ClusterPolicy):
    """Cluster policy of a router: it chooses an instance on arrival, among those that accept
    requests.
    """

    executed = True

    router: Router = dataclasses.field(kw_only=True)

    def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
        return self.router.route(r, cluster.up) if cluster.up else HOLD


def overrides(policy: ClusterPolicy, hook: str) -> bool:
    """Whether this policy overrides `hook`."""
    base: Callable[..., Any] = getattr(ClusterPolicy, hook)
    return getattr(type(policy), hook) is not base


class Target(Protocol):
    """Where a router can send a request: a simulated instance, or a real server."""

    @property
    def index(self) -> int:
        """Position among the instances of the router."""

    @property
    def n_requests(self) -> int:
        """Requests on their way to it, waiting at it, or running on it."""


T = TypeVar("T", bound=Target)


class Router(Protocol):
    """Decides on arrival. `watches`: does it look at the instances' state? `measures`: also at
    loads that only they know (`load_aware.Loaded`)?
    """

    watches: bool
    measures: bool

    def route(self, r: RequestState, instances: Sequence[T]) -> T:
        """Choose the instance that receives `r`."""


def fewest_requests(cluster: ClusterView, role: str) -> Instance | None:
    """`least_loaded` of the instances of a role; None if there are none."""
    instances = cluster.role(role)
    if len(instances) < MANY:
        return least_loaded(instances) if instances else None
    return instances[int(cluster.kept(_n_requests, role).argmin())]


def _n_requests(instance: Instance) -> int:
    return instance.n_requests


def least_loaded(instances: Sequence[T]) -> T:
    """The one with the fewest requests, of equals the first; there must be one."""
    best, fewest = instances[0], instances[0].n_requests
    for other in instances[1:]:
        n = other.n_requests
        if n < fewest or (n == fewest and other.index < best.index):
            best, fewest = other, n
    return best
