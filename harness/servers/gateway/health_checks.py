"""Equal servers behind a gateway: which are down, when they come back, and counts of answers and
losses.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict, Unpack

from ...load_generator.http.endpoint import Endpoint
from ...load_generator.real_cluster import RealCluster, RoutedServers
from ..http import prometheus
from ..http.http_server import HttpRequest, Reply
from ..http.prometheus import Sample
from .replies import CollectedReply
from .upstream import ConnectionLostError, UnreachableError, Upstream

_LOOK_EVERY_S = 1.0
_LOOK_LIMIT_S = 10.0

Say = Callable[[str], None]
MECHANISMS = "slo_bench_gateway_mechanism_total"


class CheckOptions(TypedDict, total=False):
    """Path of the health check, by default `/health`, and what is told of servers that go."""

    health_path: str
    say: Say


class CheckedServers(ABC):
    """Servers that can replace each other; one that is down is checked until it is healthy again.

    A group that serves alone is a `Serving` itself.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        placement: RoutedServers | RealCluster,
        role: str,
        **options: Unpack[CheckOptions],
    ) -> None:
        self.role = role
        self.groups = (self,)
        self.upstreams = [Upstream(endpoint) for endpoint in endpoints]
        self.answers = [0] * len(endpoints)
        self.losses = [0] * len(endpoints)
        self._up = set(range(len(endpoints)))
        self._placement = placement
        self._health_path = options.get("health_path", "/health")
        self._say: Say = options.get("say") or (lambda line: None)
        self._watches: set[asyncio.Task[None]] = set()

    @property
    def any_up(self) -> bool:
        """Whether at least one server is up."""
        return bool(self._up)

    @abstractmethod
    async def work(self, request: HttpRequest, reply: Reply) -> None:
        """Send a request to the server that is chosen for it, and pass its answer on."""

    @abstractmethod
    async def forward(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request that generates nothing, at a server that is up."""

    @abstractmethod
    def metrics(self) -> Iterator[Sample]:
        """Prometheus samples: name, labels and value."""

    def url(self, index: int) -> str:
        """URL of a server."""
        return self.upstreams[index].endpoint.url

    def down(self, index: int, why: Exception) -> None:
        """Mark a server as down that refused or lost a connection."""
        if isinstance(why, ConnectionLostError):
            self.losses[index] += 1
        if index not in self._up:
            return
        self._up.discard(index)
        self._placement.leave(index)
        self._say(f"{self.url(index)} is down: {why}")
        watch = asyncio.get_running_loop().create_task(self._until_well(index))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _until_well(self, index: int) -> None:
        upstream = self.upstreams[index]
        look = HttpRequest("GET", self._health_path, [])
        while True:
            reply = CollectedReply()
            try:
                async with asyncio.timeout(_LOOK_LIMIT_S):
                    await upstream.exchange(look, reply)
            except (UnreachableError, ConnectionLostError, TimeoutError):
                pass
            if reply.status == 200:
                self._up.add(index)
                self._placement.join(index)
                self._say(f"{self.url(index)} is up again")
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def samples(self, index: int, labels: str, in_flight: int) -> Iterator[Sample]:
        """Prometheus samples of one server: name, labels and value."""
        yield "slo_bench_gateway_up", labels, int(index in self._up)
        yield "slo_bench_gateway_in_flight", labels, in_flight
        yield "slo_bench_gateway_answers_total", labels, self.answers[index]
        yield "slo_bench_gateway_losses_total", labels, self.losses[index]

    def labels(self, index: int, role: str) -> str:
        """Prometheus labels of a server's samples."""
        return prometheus.labels(instance=self.url(index), role=role)

    def close(self) -> None:
        """Stop the health checks and close the connections to all servers."""
        for watch in self._watches:
            watch.cancel()
        for upstream in self.upstreams:
            upstream.close()
