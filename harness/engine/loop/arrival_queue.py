"""Waiting requests in order of arrival, for engines that look at all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...core.state import RequestState


class ArrivalQueue:
    """A list in order of arrival."""

    def __init__(self) -> None:
        self._requests: list[RequestState] = []

    @property
    def live(self) -> int:
        """Number of waiting requests."""
        return len(self._requests)

    def push(self, r: RequestState) -> None:
        """Add `r` at the end."""
        self._requests.append(r)

    def push_back(self, returned: Iterable[RequestState]) -> None:
        """Those were here before and take their old places."""
        self._requests = sorted((*self._requests, *returned), key=lambda r: r.seq)

    def remove_all(self, gone: Iterable[RequestState]) -> None:
        """Remove these requests in one pass."""
        ids = {r.id for r in gone}
        self._requests = [r for r in self._requests if r.id not in ids]

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests)
