"""Equal servers behind a gateway: which are down, when they come back, and counts of answers and
losses.

A server is down that refuses or loses a connection, or hangs: that sends nothing at all for a time
in which it was asked for its health again and again. A request is sent to a server once; to another
one only where no byte of it was sent.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import TypedDict, Unpack

from ...load_generator.http.endpoint import Endpoint
from ...load_generator.real_cluster import RealCluster, RoutedServers
from ..http import prometheus
from ..http.http_server import HttpRequest, Reply, refuse
from ..http.prometheus import Sample
from .replies import CollectedReply
from .suspects import Suspects
from .upstream import ConnectionLostError, UnreachableError, Upstream

_LOOK_EVERY_S = 1.0
_LOOK_LIMIT_S = 10.0
HUNG_AFTER_S = 10.0

Say = Callable[[str], None]
MECHANISMS = "slo_bench_gateway_mechanism_total"
FAILURES = "slo_bench_gateway_failures_total"
_UNREACHABLE, _LOST, _HUNG = "no connection", "lost", "hung"  # reasons of failures
_GUILTY = "took a server down"


class CheckOptions(TypedDict, total=False):
    """Path of the health check, by default `/health`, what is told of servers that go, and the
    silence after which a server hangs, by default `HUNG_AFTER_S`.
    """

    health_path: str
    say: Say
    hung_after_s: float


class HungError(ConnectionLostError):
    """The server sends nothing, not even its health."""


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
        self._up = set(range(len(endpoints)))
        self._placement = placement
        self._health = HttpRequest("GET", options.get("health_path", "/health"), [])
        self._say: Say = options.get("say") or (lambda line: None)
        self._hung_after_s = options.get("hung_after_s", HUNG_AFTER_S)
        self._watches: dict[int, asyncio.Task[None]] = {}  # of each server, one at a time
        self._suspects = Suspects(len(endpoints))
        self.failures: Counter[tuple[int, str]] = Counter()  # by server and reason

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

    async def exchange(
        self, index: int, request: HttpRequest, reply: Reply
    ) -> UnreachableError | ConnectionLostError | None:
        """Send a request to a server and pass its answer on.

        `UnreachableError`: nothing was sent, so that another server may take the request.
        `ConnectionLostError`: the server may have begun it; it was answered with a 502, or has no
        end.
        """
        if not self._watches:
            for server in self._up:
                self._watch(server, self._while_well(server))
        if self._suspects.guilty(request) and len(self.upstreams) > 1:
            self.failures[index, _GUILTY] += 1
            refuse(reply, 502, "servers went down with this request; it is sent to no other")
            return ConnectionLostError(_GUILTY)
        try:
            with self._suspects.at(index, request):
                await self.upstreams[index].exchange(request, reply)
        except (UnreachableError, ConnectionLostError) as error:
            present = self._suspects.present(index)
            if isinstance(error, UnreachableError):
                self.down(index, error, present)
                return error
            self.down(index, error, (request, *present))
            if not reply.begun:
                refuse(reply, 502, f"the instance at {self.url(index)} was lost: {error}")
            return error
        return None

    def url(self, index: int) -> str:
        """URL of a server."""
        return self.upstreams[index].endpoint.url

    def down(
        self,
        index: int,
        why: UnreachableError | ConnectionLostError,
        present: Sequence[HttpRequest] = (),
    ) -> None:
        """Mark a server as down that refused or lost a connection, or hangs. If it is dead, one of
        the requests that were `present` may have been its end.
        """
        reason = _UNREACHABLE if isinstance(why, UnreachableError) else _LOST
        self.failures[index, _HUNG if isinstance(why, HungError) else reason] += 1
        if index not in self._up:
            return
        self._up.discard(index)
        self._placement.leave(index)
        self._say(f"{self.url(index)} is down: {why}")
        self._watch(index, self._until_well(index, present))

    def _watch(self, index: int, watch: Coroutine[None, None, None]) -> None:
        """Begin a watch of a server, in place of the one before, which may begin this one."""
        before = self._watches.get(index)
        self._watches[index] = asyncio.get_running_loop().create_task(watch)
        if before is not None and before is not asyncio.current_task():
            before.cancel()

    async def _while_well(self, index: int) -> None:
        """Ask for the health of a server that is up, until it is down or hangs."""
        upstream = self.upstreams[index]
        upstream.heard_s = monotonic()
        while index in self._up:
            await asyncio.sleep(_LOOK_EVERY_S)
            silent_s = monotonic() - upstream.heard_s
            if silent_s < _LOOK_EVERY_S:
                continue
            if silent_s >= self._hung_after_s:
                self.down(index, HungError(f"nothing came for {silent_s:.0f} s"))
                upstream.close()
                return
            with suppress(UnreachableError, ConnectionLostError, TimeoutError):
                async with asyncio.timeout(self._hung_after_s - silent_s):
                    await upstream.exchange(self._health, CollectedReply())

    async def _until_well(self, index: int, present: Sequence[HttpRequest]) -> None:
        upstream = self.upstreams[index]
        upstream.close_idle()  # they may end as the server does; a connection of its own tells
        while True:
            reply = CollectedReply()
            try:
                async with asyncio.timeout(_LOOK_LIMIT_S):
                    await upstream.exchange(self._health, reply)
            except UnreachableError:
                self._suspects.blame(present)
                present = ()
            except (ConnectionLostError, TimeoutError):
                pass
            if reply.status == 200:
                self._up.add(index)
                self._placement.join(index)
                self._say(f"{self.url(index)} is up again")
                self._watch(index, self._while_well(index))
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def samples(self, index: int, labels: str, in_flight: int) -> Iterator[Sample]:
        """Prometheus samples of one server: name, labels and value."""
        yield "slo_bench_gateway_up", labels, int(index in self._up)
        yield "slo_bench_gateway_in_flight", labels, in_flight
        yield "slo_bench_gateway_answers_total", labels, self.answers[index]
        losses = sum(self.failures[index, reason] for reason in (_LOST, _HUNG))
        yield "slo_bench_gateway_losses_total", labels, losses
        for (server, reason), count in sorted(self.failures.items()):
            if server == index:
                names = {"instance": self.url(index), "role": self.role, "reason": reason}
                yield FAILURES, prometheus.labels(**names), count

    def labels(self, index: int, role: str) -> str:
        """Prometheus labels of a server's samples."""
        return prometheus.labels(instance=self.url(index), role=role)

    def close(self) -> None:
        """Stop the health checks and close the connections to all servers."""
        for watch in self._watches.values():
            watch.cancel()
        for upstream in self.upstreams:
            upstream.close()
