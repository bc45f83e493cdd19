"""What the iteration loop asks of a waiting queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .state import RequestState


class Queue(Protocol):
    """Requests that wait for prefill. Whoever enters or leaves gets another `version`."""

    @property
    def live(self) -> int:
        """Number of waiting requests."""

    def push(self, r: RequestState) -> None:
        """Add `r` to the queue."""

    def head(self) -> RequestState:
        """The next request; the queue must not be empty."""

    def take_head(self) -> None:
        """The request that `head` has just named leaves."""

    def remove(self, r: RequestState) -> None:
        """`r` leaves from wherever it stands."""

    def __iter__(self) -> Iterator[RequestState]: ...

    def ordered(self) -> Iterator[RequestState]:
        """All waiting requests in queue order, the next first."""

    def overtaken_s(self) -> float:
        """When another request becomes the next one if nothing else happens; infinite if never."""
