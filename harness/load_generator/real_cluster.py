"""Real servers as a cluster policy sees them: what was sent to each, and what came back.

A policy that decides before real servers reads no more of a `Site` than `ServerInstance` has, and
of a `ClusterView` no more than `RealCluster`. Whether a request's prompt has been computed is known
by its first byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from ..core.cluster_policy import ClusterPolicy, ClusterView, Routed, RouteOutcome
from ..core.instance import Links, NoDelay
from ..core.state import Release, RequestState
from .server_load import Fastest, ServerLoadMeter


class ServerInstance:
    """A server. Requests count as waiting until the first byte of their answer, then as running.

    An answer that is not streamed has its first byte at its end.
    """

    def __init__(self, index: int, role: str, fastest: Fastest) -> None:
        self.index = self.number = index
        self.meter = ServerLoadMeter(fastest)
        self.role = role
        self.up = True
        self._waiting: set[RequestState] = set()
        self._running: set[RequestState] = set()

    def __repr__(self) -> str:
        return f"<{self.role} server {self.index}>"

    @property
    def n_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._waiting) + len(self._running)

    @property
    def n_waiting(self) -> int:
        """Number of requests without a first token."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Number of requests with a first token."""
        return len(self._running)

    @property
    def queue(self) -> int:
        """Requests waiting at the instance."""
        return self.n_waiting

    def use(self, window_s: float) -> float:
        """Return the load from the server's last metrics and the prompts sent to it."""
        meter = self.meter
        tokens = sum(r.prompt_tokens for r in self._waiting) / window_s
        compute = (tokens + meter.answer_tokens_per_s) * meter.s_per_token
        return min(1.0, compute) + meter.kv_cache_usage

    def adds(self, r: RequestState, window_s: float) -> float:
        """Return the load that a request would add to the instance."""
        meter = self.meter
        memory = r.prompt_tokens / meter.kv_tokens if meter.kv_tokens else 0.0
        return r.prompt_tokens * meter.s_per_token / window_s + memory

    def prefills(self, now_s: float) -> bool:
        """Has it any prompt to compute?"""
        return bool(self._waiting)

    def sent(self, r: RequestState) -> None:
        """`r` is on its way there."""
        r.instance = self.index
        self._waiting.add(r)

    def begun(self, r: RequestState) -> None:
        """The first byte of its answer has come."""
        self._waiting.discard(r)
        self._running.add(r)

    def ended(self, r: RequestState) -> None:
        """It is no longer there, however it went."""
        self._waiting.discard(r)
        self._running.discard(r)


class RealCluster:
    """Servers under a cluster policy; `clock` gives seconds. Each server is an instance of one
    role.
    """

    def __init__(
        self, policy: ClusterPolicy, roles: Sequence[str], clock: Callable[[], float]
    ) -> None:
        fastest = Fastest()
        self.instances = [ServerInstance(index, role, fastest) for index, role in enumerate(roles)]
        self.up = list(self.instances)
        self.state: Any = policy.new_state()
        self.held: tuple[RequestState, ...] = ()
        self.links: Links = NoDelay()
        self._policy = policy
        self._clock = clock
        self._roles: dict[str, list[ServerInstance]] = {}

    @property
    def now_s(self) -> float:
        """Current time of the clock, in seconds."""
        return self._clock()

    @property
    def measures(self) -> bool:
        """Does the policy look at what only the servers know of their load?"""
        return isinstance(self._policy, Routed) and self._policy.router.measures

    def role(self, name: str) -> Sequence[ServerInstance]:
        """Those of one role that accept requests."""
        if name not in self._roles:
            self._roles[name] = [instance for instance in self.up if instance.role == name]
        return self._roles[name]

    def route(self, r: RequestState) -> ServerInstance | RouteOutcome:
        """Return the instance that the policy selects for `r` on arrival."""
        return cast("ServerInstance | RouteOutcome", self._policy.route(r, self._seen()))

    def on_returned(self, release: Release) -> ServerInstance | RouteOutcome:
        """Return the instance for a request that a server returned, or that was lost with its
        server.

        A router is asked again.
        """
        if isinstance(self._policy, Routed):
            return self.route(release.request)
        return cast(
            "ServerInstance | RouteOutcome", self._policy.on_returned(release, self._seen())
        )

    def leave(self, index: int) -> None:
        """Mark a server as down."""
        self.instances[index].up = False
        self._changed()

    def join(self, index: int) -> None:
        """Mark a server as up again."""
        self.instances[index].up = True
        self._changed()

    def _changed(self) -> None:
        self.up = [instance for instance in self.instances if instance.up]
        self._roles.clear()

    def _seen(self) -> ClusterView:
        return cast("ClusterView", self)  # what of it policies read here, it has
