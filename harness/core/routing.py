"""What a router is, and what it sees of an instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from .state import RequestState


class Target(Protocol):
    """Where a router can send a request: a simulated instance, or a real server."""

    @property
    def index(self) -> int:
        """Its place among its equals."""
        ...

    @property
    def n_requests(self) -> int:
        """Requests on their way to it, waiting at it, or running on it."""
        ...


T = TypeVar("T", bound=Target)


class Router(Protocol):
    """Decides on arrival. `watches`: does it look at the instances' state? `measures`: also at
    loads that only they know (`load_aware.Loaded`)?
    """

    watches: bool
    measures: bool

    def dispatch(self, r: RequestState, instances: Sequence[T]) -> T:
        """The instance that gets `r`."""
        ...


def least_loaded(instances: Sequence[T]) -> T:
    """The one with the fewest requests, of equals the first; there must be one."""
    best, fewest = instances[0], instances[0].n_requests
    for other in instances[1:]:
        n = other.n_requests
        if n < fewest or (n == fewest and other.index < best.index):
            best, fewest = other, n
    return best
