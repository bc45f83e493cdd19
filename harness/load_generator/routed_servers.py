"""A router over real servers: we know what we sent to each and what has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.cluster_policy import Router
from ..core.state import RequestState


class _Server:
    """A server as a router sees it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.n_requests = 0


class RoutedServers:
    """Selects among the servers that are up. `first`: the server whose turn it is at the start."""

    def __init__(self, n: int, router: Router, first: int = 0) -> None:
        self._servers = [_Server(index) for index in range(n)]
        turn = first % n
        self._in_turn = self._servers[turn:] + self._servers[:turn]
        self._up = self._in_turn
        self._router: Callable[[RequestState, Sequence[_Server]], _Server]
        self._router = router.route

    @property
    def up(self) -> list[int]:
        """Servers that are up."""
        return [server.index for server in self._up]

    def choose(self, r: RequestState) -> int:
        """The index of the server that gets the request; one must be up."""
        server = self._router(r, self._up)
        server.n_requests += 1
        return server.index

    def ended(self, endpoint: int) -> None:
        """One of its requests has ended."""
        self._servers[endpoint].n_requests -= 1

    def in_flight(self, endpoint: int) -> int:
        """Its requests that have not ended."""
        return self._servers[endpoint].n_requests

    def leave(self, endpoint: int) -> None:
        """It is down: choose it no longer."""
        self._up = [server for server in self._up if server.index != endpoint]

    def join(self, endpoint: int) -> None:
        """Mark a server as up again."""
        up = {endpoint, *self.up}
        self._up = [server for server in self._in_turn if server.index in up]
