"""Equal servers: who gets a request, what is under way, who is down and whether it came back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...workloads.request import Slo
from ..clusters.balance import Balanced
from ..clusters.routers import PrefixAware
from ..clusters.routers import router as router_by_name
from ..core.state import RequestState
from ..engines.over_http.endpoint import Endpoint
from .messages import Asked, Kept, Reply, refuse
from .upstream import LostError, UnreachableError, Upstream

_LOOK_EVERY_S = 1.0
_LOOK_LIMIT_S = 10.0
_NO_SLO = Slo()

Say = Callable[[str], None]


class Instances:
    """Servers behind a router.

    One that refuses a connection, or loses one in the middle of an answer, is down until it says
    again that it is well; meanwhile the others are chosen.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        router: str,
        *,
        role: str = "serve",
        health_path: str = "/health",
        say: Say = lambda line: None,
    ) -> None:
        """See `routers.router` for the names of routers.

        Raises:
            UnknownNameError: no such router.
        """
        self.role = role
        self._upstreams = [Upstream(endpoint) for endpoint in endpoints]
        self._router = router_by_name(router)
        self._balanced = Balanced(len(endpoints), self._router)
        self._health_path = health_path
        self._say = say
        self._answers = [0] * len(endpoints)
        self._losses = [0] * len(endpoints)
        self._number = 0
        self._watches: set[asyncio.Task[None]] = set()

    @property
    def looks_at_prompts(self) -> bool:
        """Whether the router compares prompts."""
        return isinstance(self._router, PrefixAware)

    @property
    def any_up(self) -> bool:
        """Whether somebody can answer."""
        return bool(self._balanced.up)

    async def forward(
        self, asked: Asked, reply: Reply, prefix_blocks: tuple[int, ...] | None = None
    ) -> None:
        """Put a request to one of the servers, and pass its answer on.

        With `prefix_blocks` (perhaps empty) it is work, which the router places and counts;
        without, whoever is up answers. Where nobody could be reached the answer is a 503, and
        where a server was lost before its answer began a 502. One that was lost later leaves
        `reply` without its end.
        """
        for _ in range(2 * len(self._upstreams)):
            if not self.any_up:
                break
            with self._chosen(prefix_blocks) as index:
                upstream = self._upstreams[index]
                try:
                    await upstream.exchange(asked.wire(upstream.endpoint), reply)
                except UnreachableError as error:
                    self._down(index, str(error))
                    continue
                except LostError as error:
                    self._losses[index] += 1
                    self._down(index, str(error))
                    if not reply.begun:
                        url = upstream.endpoint.url
                        refuse(reply, 502, f"the instance at {url} was lost: {error}")
                    return
                self._answers[index] += prefix_blocks is not None
                return
        refuse(reply, 503, f"no instance is up (role: {self.role})")

    @contextmanager
    def _chosen(self, prefix_blocks: tuple[int, ...] | None) -> Iterator[int]:
        balanced = self._balanced
        if prefix_blocks is None:
            yield balanced.up[0]
            return
        self._number += 1
        index = balanced.choose(
            RequestState(self._number, 0.0, 0, 0, 0, _NO_SLO, prefix_blocks=prefix_blocks)
        )
        try:
            yield index
        finally:
            balanced.ended(index)

    def _down(self, index: int, why: str) -> None:
        if index not in self._balanced.up:
            return
        self._balanced.leave(index)
        self._say(f"{self._upstreams[index].endpoint.url} is down: {why}")
        watch = asyncio.get_running_loop().create_task(self._until_well(index))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _until_well(self, index: int) -> None:
        upstream = self._upstreams[index]
        look = Asked("GET", self._health_path, []).wire(upstream.endpoint)
        while True:
            found = Kept()
            try:
                async with asyncio.timeout(_LOOK_LIMIT_S):
                    await upstream.exchange(look, found)
            except (UnreachableError, LostError, TimeoutError):
                pass
            if found.status == 200:
                self._balanced.join(index)
                self._say(f"{upstream.endpoint.url} is up again")
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def metrics(self) -> Iterator[tuple[str, str, int]]:
        """Name, labels and value, as Prometheus has them."""
        up = set(self._balanced.up)
        for index, upstream in enumerate(self._upstreams):
            labels = f'{{instance="{upstream.endpoint.url}",role="{self.role}"}}'
            yield "slo_bench_gateway_up", labels, int(index in up)
            yield "slo_bench_gateway_in_flight", labels, self._balanced.in_flight(index)
            yield "slo_bench_gateway_answers_total", labels, self._answers[index]
            yield "slo_bench_gateway_losses_total", labels, self._losses[index]

    def close(self) -> None:
        """Close all connections."""
        for watch in self._watches:
            watch.cancel()
        for upstream in self._upstreams:
            upstream.close()
