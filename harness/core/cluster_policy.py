"""What a system decides across instances: a handful of small questions, as for one instance.

A router answers only the first of them (`Routed`). Whatever a policy reads of an instance through
its `Site` is brought up to the present first; what it does not read costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from ...predictors.placement import Placement
from ...predictors.step_time import StepTime
from ...workloads.errors import SloBenchError
from .instance import Site
from .kv_cache_manager import BlockLedger
from .links import Links, NoDelay
from .policy import AnyPolicy, Knobs
from .predictions import Learner
from .records import Told
from .release import Release
from .routing import Router
from .state import RequestState

INF = float("inf")
EMBEDS = "embedder"  # the role of who computes embeddings


class Instead(Enum):
    """What becomes of a request that is sent to no instance."""

    HOLD = "hold"  # it waits in the controller's own queue
    REJECT = "reject"
    DROP = "drop"


HOLD, REJECT, DROP = Instead.HOLD, Instead.REJECT, Instead.DROP


@dataclass(frozen=True)
class Role:
    """Instances that are alike. What is None is as for the whole run.

    `hands_over`: a request that has been prefilled here decodes elsewhere. `start_s`: seconds from
    the start of the run until the instances accept requests. `learner` makes, for each instance,
    what its policy predicts step times by; the true ones by default. `devices`: the device that
    each instance computes on, by name; instances that name the same one take turns. Each has one of
    its own by default. `ledger` makes that of each instance, as `BlockLedger` does.
    """

    name: str
    policy: AnyPolicy
    instances: int
    placement: Placement | None = None
    step_time: StepTime | None = None
    prefix_cache: bool | None = None
    hands_over: bool = False
    start_s: float = 0.0
    learner: Callable[[Placement], Learner] | None = None
    devices: tuple[str, ...] = ()
    ledger: Callable[[int, int, int, int], BlockLedger] = BlockLedger

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
    simulator. `counts` names the parameters that set the numbers of servers. `refusals` maps a
    backend to the reason why the system cannot run there; "" stands for every backend.
    """

    roles: tuple[ServerRole, ...]
    counts: tuple[str, str]
    splits: bool = False
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """An instance (by its number) fails at `at_s`, between two iterations, and is up again at
    `back_s`, empty; by default never.
    """

    instance: int
    at_s: float
    back_s: float = INF


class View(Protocol):
    """What a cluster policy sees. In the simulator it is the cluster itself."""

    @property
    def now_s(self) -> float:
        """The clock."""
        ...

    @property
    def state(self) -> Any:
        """What the policy's `new_state()` returned."""
        ...

    @property
    def sites(self) -> Sequence[Site]:
        """All instances, also those that are down; with pipeline parallelism every lane."""
        ...

    @property
    def up(self) -> Sequence[Site]:
        """Those that accept requests to generate."""
        ...

    def role(self, name: str) -> Sequence[Site]:
        """Those of one role that accept requests."""
        ...

    @property
    def held(self) -> Sequence[RequestState]:
        """Requests in the controller's own queue, the longest there first."""
        ...

    @property
    def links(self) -> Links:
        """What KV moves over."""
        ...


class ClusterControl(View, Protocol):
    """What an action can do with the instances."""

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Call `act` at that time, or now if it is past."""
        ...

    def migrate(
        self, r: RequestState, source: Site, target: Site, *, copied_tokens: int = 0
    ) -> None:
        """Move `r` between two iterations, its KV over a link; `copied_tokens` are there already.

        A request without KV at `source` is at `target` at once. Its blocks at `source` are held
        until the transfer ends.
        """
        ...

    def unite(self, one: Site, other: Site) -> None:
        """They compute for each other from now on: neither may run ahead of the other."""
        ...

    def separate(self, one: Site, other: Site) -> None:
        """They were united, and compute for each other no longer."""
        ...

    def bring(self, site: Site) -> None:
        """Let it run up to the present."""
        ...

    def reconsider(self, site: Site) -> None:
        """What `site` can hold has changed: ask its policy again."""
        ...


class Action(Protocol):
    """Something that a controller does at its own times: a migration, for example."""

    def carry_out(self, cluster: ClusterControl) -> None:
        """Do it now; what takes time is scheduled with `cluster.at`."""
        ...


@dataclass(frozen=True)
class ClusterPolicy(Knobs):
    """Decides across instances. Override what a system changes; the rest costs nothing.

    Knobs are frozen dataclass fields with bounds, as for instances. Where times or loads tie, let
    the smaller `index` decide: the same seed gives the same bytes.
    """

    def layout(self, policy: AnyPolicy, placement: Placement, instances: int) -> Sequence[Role]:
        """Which instances there are; `policy` and `placement` are those of the system.

        Raises:
            SloBenchError: so many instances make no such system.
        """
        return (Role("", policy, instances),)

    @property
    def least_instances(self) -> int:
        """With how many instances it runs where nobody says how many."""
        return 1

    def on_servers(self, policy: AnyPolicy) -> OnServers | None:
        """How it runs on real servers; None: it runs in the simulator alone."""
        return None

    def links(self, sites: Sequence[Site]) -> Links:
        """What KV moves over."""
        return NoDelay()

    def new_state(self) -> Any:
        """What this policy learns in one run, empty."""
        return None

    def told(self, state: Any, sites: Sequence[Site]) -> Sequence[Told]:
        """What is worth telling when a run is over, beside the requests on every instance."""
        return ()

    def dispatch(self, r: RequestState, cluster: View) -> Site | Instead:
        """Where `r` goes on arrival. Who is held is asked for again when an instance starts."""
        raise NotImplementedError(f"{type(self).__name__} dispatches nobody")

    def returned(self, release: Release, cluster: View) -> Site | Instead:
        """Where a request goes that an instance gave back (`Why.OFFLOAD`) or lost (`Why.FAIL`).

        What fails and is dropped is reported as failed.
        """
        return DROP

    def hand_over(self, r: RequestState, source: Site, cluster: View) -> Site | Instead:
        """Where `r`, prefilled at `source`, decodes. Its KV moves over a link; to `source` itself
        it need not. HOLD: it stays parked, and nobody who is prefilled later overtakes it; it is
        asked for again whenever a request has ended, or an instance has started or failed.
        """
        return source

    def emptied(self, site: Site, cluster: View) -> RequestState | None:
        """A held request for an instance, which a request has left or whose last waiting one has
        begun; asked again until it is None.
        """
        return None

    @property
    def review_s(self) -> float:
        """Seconds between two calls of `review`."""
        return INF

    def review(self, cluster: View) -> Sequence[Action]:
        """What the controller does at its own times."""
        return ()


@dataclass(frozen=True)
class Routed(ClusterPolicy):
    """A router: it decides on arrival, among the instances that are up, and no more."""

    router: Router = dataclasses.field(kw_only=True)

    def dispatch(self, r: RequestState, cluster: View) -> Site | Instead:
        return self.router.dispatch(r, cluster.up) if cluster.up else HOLD


def overrides(policy: ClusterPolicy, hook: str) -> bool:
    """Does this policy answer the hook itself?"""
    base: Callable[..., Any] = getattr(ClusterPolicy, hook)
    return getattr(type(policy), hook) is not base
