"""Real servers as routers and cluster policies see them: requests in progress and load.

A cluster policy before real servers may read of an `Instance` only what `ServerInstance` has, and
of a `ClusterView` only what `RealCluster` has. A prompt counts as computed when the first byte of
the answer has arrived.

The load of a server follows from its metrics at two times. In the terms of U = C/Cmax + M/Mmax
(`policies.load_aware`), Cmax is the highest number of tokens per second that any of the equal
servers has computed between two readings; M/Mmax is the share of KV blocks in use, without the
weights, which are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..core.cluster_policy import ClusterPolicy, ClusterView, Routed, RouteOutcome, Router
from ..core.counters import Counters
from ..core.instance import Links, NoDelay
from ..core.state import Release, RequestState
from .server_metrics import MetricsByServer, kv_size, labels_of, names_in


@dataclass
class Fastest:
    """The highest rate so far, in tokens per second, of servers that are alike."""

    tokens_per_s: float = 0.0

    @property
    def s_per_token(self) -> float:
        """Compute time of a token at that speed; 0 as long as nothing was seen."""
        return 1 / self.tokens_per_s if self.tokens_per_s else 0.0


class ServerLoadMeter:
    """Load of one server from its metrics; 0 before the second reading."""

    def __init__(self, fastest: Fastest) -> None:
        self.kv_cache_usage = 0.0
        self.answer_tokens_per_s = 0.0
        self.kv_tokens = 0  # that its KV cache holds; 0: unknown
        self._fastest = fastest
        self._seen: tuple[float, float, float] | None = None  # when, prompt and answer tokens

    def look(self, text: str, now_s: float, by_server: MetricsByServer) -> None:
        """Read the server's metrics in the Prometheus format, taken at `now_s`."""
        names = names_in(text, by_server)
        if names is None:
            return
        sums: dict[str, float] = {}
        # Without the metric of tokens that were not found in a cache all tokens are counted.
        computed: float | None = None
        computed_name, computed_label = names.computed_tokens
        for name, labels, value in names.samples(text):
            sums[name] = sums.get(name, 0.0) + float(value)
            if name == computed_name and computed_label in labels:
                computed = (computed or 0.0) + float(value)
            elif name == names.kv_cache:
                size = kv_size(labels_of(labels))
                self.kv_tokens = size[0] if size else self.kv_tokens
        self.kv_tokens = int(names.first("kv_tokens", sums) or self.kv_tokens)
        self.kv_cache_usage = names.first("kv_usage", sums) or 0.0
        prompts = names.first("prompt_tokens", sums) if computed is None else computed
        self._moved(now_s, prompts or 0.0, names.first("output_tokens", sums) or 0.0)

    def _moved(self, now_s: float, prompts: float, answers: float) -> None:
        previous, self._seen = self._seen, (now_s, prompts, answers)
        if previous is None:
            return
        span_s, prompts, answers = (
            now - then for now, then in zip(self._seen, previous, strict=True)
        )
        if span_s <= 0 or prompts < 0 or answers < 0:
            return  # the server has begun anew
        self.answer_tokens_per_s = answers / span_s
        speed = prompts / span_s + self.answer_tokens_per_s
        self._fastest.tokens_per_s = max(self._fastest.tokens_per_s, speed)


class ServerInstance:
    """One real server.

    Requests count as waiting until the first byte of their answer, then as running. An answer that
    is not streamed has its first byte at its end.
    """

    def __init__(self, index: int, role: str, fastest: Fastest) -> None:
        self.index = self.number = index
        self.meter = ServerLoadMeter(fastest)
        self._fastest = fastest
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
        compute = (tokens + meter.answer_tokens_per_s) * self._fastest.s_per_token
        return min(1.0, compute) + meter.kv_cache_usage

    def adds(self, r: RequestState, window_s: float) -> float:
        """Return the load that a request would add to the instance."""
        meter = self.meter
        memory = r.prompt_tokens / meter.kv_tokens if meter.kv_tokens else 0.0
        return r.prompt_tokens * self._fastest.s_per_token / window_s + memory

    def prefills(self, now_s: float) -> bool:
        """Whether a request waits for its first byte."""
        return bool(self._waiting)

    def sent(self, r: RequestState) -> None:
        """Count `r`, which was sent to this server, as waiting."""
        r.instance = self.index
        self._waiting.add(r)

    def begun(self, r: RequestState) -> None:
        """Count `r` as running: the first byte of its answer has arrived."""
        self._waiting.discard(r)
        self._running.add(r)

    def ended(self, r: RequestState) -> None:
        """Stop counting `r`, which has ended in any way."""
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
        self.counters = Counters(policy.mechanisms())
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
        """Whether the policy reads load metrics of the servers."""
        return isinstance(self._policy, Routed) and self._policy.router.measures

    def role(self, name: str) -> Sequence[ServerInstance]:
        """Instances of one role that accept requests."""
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


class _Server:
    """State of one server that a router reads."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.n_requests = 0


class RoutedServers:
    """Selects a server that is up with a router; `first` is the first server of round-robin."""

    def __init__(self, n: int, router: Router, first: int = 0) -> None:
        self._servers = [_Server(index) for index in range(n)]
        turn = first % n
        self._in_turn = self._servers[turn:] + self._servers[:turn]
        self._up = self._in_turn
        self._router: Callable[[RequestState, Sequence[_Server]], _Server]
        self._router = router.route

    @property
    def up(self) -> list[int]:
        """Indices of the servers that are up."""
        return [server.index for server in self._up]

    def choose(self, r: RequestState) -> int:
        """The index of the server that gets the request; one must be up."""
        server = self._router(r, self._up)
        server.n_requests += 1
        return server.index

    def ended(self, endpoint: int) -> None:
        """Count one request less at a server."""
        self._servers[endpoint].n_requests -= 1

    def in_flight(self, endpoint: int) -> int:
        """Number of requests at a server that have not ended."""
        return self._servers[endpoint].n_requests

    def leave(self, index: int) -> None:
        """Mark a server as down, so that it gets no requests."""
        self._up = [server for server in self._up if server.index != index]

    def join(self, index: int) -> None:
        """Mark a server as up again."""
        up = {index, *self.up}
        self._up = [server for server in self._in_turn if server.index in up]
