"""Equal servers behind a router, with counts of their requests in progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Unpack

from ....workloads.request import Slo
from ...core.state import RequestState
from ...load_generator.http.endpoint import Endpoint
from ...load_generator.real_cluster import RoutedServers
from ...policies.routers import PrefixAware
from ...policies.routers import router as router_by_name
from ..http.http_server import HttpRequest, Reply, refuse
from ..http.prometheus import Sample
from .health_checks import CheckedServers, CheckOptions
from .states import prefix_blocks
from .upstream import UnreachableError

_NO_SLO = Slo()


class RoutedServerGroup(CheckedServers):
    """Servers behind a router.

    One that refuses a connection, or loses one in the middle of an answer, is down until it says
    again that it is well; meanwhile the others are chosen.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        router: str,
        role: str = "serve",
        **options: Unpack[CheckOptions],
    ) -> None:
        """`router` is a name of `slo-bench list routers`.

        Raises:
            UnknownNameError: no such router.
        """
        routing_policy = router_by_name(router)
        self._looks_at_prompts = isinstance(routing_policy, PrefixAware)
        self._balanced = RoutedServers(len(endpoints), routing_policy)
        super().__init__(endpoints, self._balanced, role, **options)
        self._number = 0

    async def work(self, request: HttpRequest, reply: Reply) -> None:
        """Send a request to the server that the router selects."""
        body = request.json() if self._looks_at_prompts else None
        await self.forward(request, reply, () if body is None else prefix_blocks(body))

    async def forward(
        self, request: HttpRequest, reply: Reply, blocks: tuple[int, ...] | None = None
    ) -> None:
        """Send a request to one of the servers and pass its answer on.

        With `blocks` of the prompt (possibly none) the router selects and counts the server;
        without, the first server that is up answers. The answer is a 503 if no server could be
        reached, and a 502 if the server was lost before its answer began. If it is lost later,
        `reply` has no end.
        """
        for _ in range(2 * len(self.upstreams)):
            if not self.any_up:
                break
            with self._chosen(blocks) as index:
                error = await self.exchange(index, request, reply)
                if isinstance(error, UnreachableError):
                    continue
                self.answers[index] += error is None and blocks is not None
                return
        refuse(reply, 503, f"no instance is up (role: {self.role})")

    @contextmanager
    def _chosen(self, blocks: tuple[int, ...] | None) -> Iterator[int]:
        balanced = self._balanced
        if blocks is None:
            yield balanced.up[0]
            return
        self._number += 1
        index = balanced.choose(
            RequestState(self._number, 0.0, 0, 0, 0, _NO_SLO, prefix_blocks=blocks)
        )
        try:
            yield index
        finally:
            balanced.ended(index)

    def metrics(self) -> Iterator[Sample]:
        """Prometheus samples: name, labels and value."""
        for index in range(len(self.upstreams)):
            labels = self.labels(index, self.role)
            yield from self.samples(index, labels, self._balanced.in_flight(index))
