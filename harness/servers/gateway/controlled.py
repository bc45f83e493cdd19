"""Servers with roles behind a controller: the simulator's own cluster policy decides.

A server whose policy releases a request before its prefill has begun (`Timeout` with
`ReleaseReason.OFFLOAD`) ends it with an error that names the reason. Only the server's scheduler
knows which requests have begun, so no request is taken out of a batch. The client sees nothing of
that answer: the request goes to the server that the controller names.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Unpack

from ...core.cluster_policy import REJECT, ClusterPolicy
from ...core.decisions import ReleaseReason
from ...core.state import Release, RequestState
from ...core.wire import DROPPED, REJECTED, VLLM_FIELD, WAITED_FIELD
from ...load_generator.http.endpoint import Endpoint
from ...load_generator.real_cluster import RealCluster, ServerInstance
from ..http.http_server import HttpRequest, Reply, refuse
from ..http.prometheus import Sample
from ..server_kinds import metrics_by_server
from .health_checks import MECHANISMS, CheckedServers, CheckOptions
from .replies import BufferedReply, CollectedReply
from .states import state_of, wire_of
from .upstream import ConnectionLostError, UnreachableError

_LOOK_EVERY_S = 0.25
_LOOK_LIMIT_S = 5.0
_SHOWN_WINDOW_S = 1.0
_METRICS = HttpRequest("GET", "/metrics", [])


class ControlledServing(CheckedServers):
    """One group of servers; a request that a server could not be sent goes to another one.

    Of a split it is one stage (`role`); a prompt counts until its answer begins, also at a server
    for which another has computed it.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        roles: Sequence[str],
        policy: ClusterPolicy,
        role: str = "serve",
        **options: Unpack[CheckOptions],
    ) -> None:
        """`roles`: of each server, as `ClusterPolicy.layout` names them, in its order."""
        self._cluster = RealCluster(policy, roles, time.monotonic)
        super().__init__(endpoints, self._cluster, role, **options)
        self._dispatched = [0] * len(endpoints)
        self._offloaded = [0] * len(endpoints)
        self._taken = [0] * len(endpoints)
        self._number = 0
        self._looks: asyncio.Task[None] | None = None

    async def work(self, request: HttpRequest, reply: Reply) -> None:
        """Route a request and let that server answer; a request that the controller rejects or
        drops ends with status 503.
        """
        body = request.json()
        if body is None:
            await self.forward(request, reply)
            return
        if self._cluster.measures and self._looks is None:
            self._looks = asyncio.get_running_loop().create_task(self._look())
        self._number += 1
        r = state_of(body, self._number, self._cluster.now_s)
        to = self._cluster.route(r)
        if isinstance(to, ServerInstance):
            self._dispatched[to.index] += 1
        attempts = 2 * len(self.upstreams)
        while isinstance(to, ServerInstance) and attempts:
            attempts -= 1
            release = await self._at(to, r, request, reply)
            if release is None:
                return
            to = self._cluster.on_returned(release)
            if isinstance(to, ServerInstance):
                self._taken[to.index] += 1
                waited_s = self._cluster.now_s - r.arrival_s
                body = {**body, VLLM_FIELD: {**wire_of(body), WAITED_FIELD: round(waited_s, 6)}}
                request = request.with_json(body)
        refuse(reply, 503, f"{REJECTED if to is REJECT else DROPPED} by the controller")

    async def _at(
        self, instance: ServerInstance, r: RequestState, request: HttpRequest, reply: Reply
    ) -> Release | None:
        """Let a server answer. Returns None, or the release if the server gave the request back or
        could not be reached.
        """
        index = instance.index
        held = BufferedReply(reply, lambda: instance.begun(r))
        instance.sent(r)
        try:
            error = await self.exchange(index, request, held)
        finally:
            instance.ended(r)
        if isinstance(error, UnreachableError):
            return Release(r, ReleaseReason.FAIL, self._cluster.now_s)
        if error is not None:
            return None
        if held.given_back:
            self._offloaded[index] += 1
            return Release(r, ReleaseReason.OFFLOAD, self._cluster.now_s)
        self.answers[index] += 1
        return None

    async def _look(self) -> None:
        """Read every server's metrics at a fixed interval."""
        while True:
            await asyncio.gather(*(self._look_at(instance) for instance in self._cluster.up))
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look_at(self, instance: ServerInstance) -> None:
        upstream, reply = self.upstreams[instance.index], CollectedReply()
        with contextlib.suppress(UnreachableError, ConnectionLostError, TimeoutError):
            async with asyncio.timeout(_LOOK_LIMIT_S):
                await upstream.exchange(_METRICS, reply)
        if reply.status == 200:
            text = reply.body.decode(errors="replace")
            instance.meter.look(text, self._cluster.now_s, metrics_by_server())

    async def forward(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request that generates nothing, at the first server that is up."""
        while self._cluster.up:
            error = await self.exchange(self._cluster.up[0].index, request, reply)
            if not isinstance(error, UnreachableError):
                return
        refuse(reply, 503, "no instance is up")

    def metrics(self) -> Iterator[Sample]:
        """Prometheus samples: name, labels and value."""
        for instance in self._cluster.instances:
            index = instance.index
            labels = self.labels(index, instance.role)
            yield from self.samples(index, labels, instance.n_waiting + instance.n_running)
            yield "slo_bench_gateway_dispatched_total", labels, self._dispatched[index]
            yield "slo_bench_gateway_offloaded_total", labels, self._offloaded[index]
            yield "slo_bench_gateway_taken_over_total", labels, self._taken[index]
            if self._cluster.measures:
                yield "slo_bench_gateway_load", labels, round(instance.use(_SHOWN_WINDOW_S), 6)
        for name, count in self._cluster.counters.of_policy().items():
            yield MECHANISMS, f'{{mechanism="{name}"}}', count

    def close(self) -> None:
        """Close the connections to all servers."""
        if self._looks is not None:
            self._looks.cancel()
        super().close()
