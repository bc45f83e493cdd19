"""Requests that servers died of."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..http.http_server import HttpRequest

_MOST_REMEMBERED = 1000
_GUILTY = 2  # deaths among others; one death alone counts as many


class Suspects:
    """Which requests were at a server when it died, by their targets and bodies.

    One that was there alone is guilty; one among others after two deaths.
    """

    def __init__(self, servers: int) -> None:
        self._present: list[dict[int, HttpRequest]] = [{} for _ in range(servers)]
        self._deaths: OrderedDict[bytes, int] = OrderedDict()

    @contextmanager
    def at(self, server: int, request: HttpRequest) -> Iterator[None]:
        """While a request is at a server."""
        present = self._present[server]
        key = id(request)
        present[key] = request
        try:
            yield
        finally:
            del present[key]

    def present(self, server: int) -> Sequence[HttpRequest]:
        """The requests at a server."""
        return tuple(self._present[server].values())

    def blame(self, requests: Sequence[HttpRequest]) -> None:
        """Remember the requests that were at a server that died."""
        for request in requests:
            name = _name(request)
            self._deaths[name] = self._deaths.pop(name, 0) + (_GUILTY if len(requests) == 1 else 1)
        while len(self._deaths) > _MOST_REMEMBERED:
            self._deaths.popitem(last=False)

    def guilty(self, request: HttpRequest) -> bool:
        """Whether a request took servers down before."""
        return bool(self._deaths) and self._deaths.get(_name(request), 0) >= _GUILTY


def _name(request: HttpRequest) -> bytes:
    return hashlib.blake2b(request.target.encode() + b"\n" + request.body).digest()
