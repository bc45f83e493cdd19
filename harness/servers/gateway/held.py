"""An answer that is held back until it begins: what an instance gives back is not passed on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...core.wire import OFFLOADED
from .messages import Headers, Reply

_GIVEN_BACK = OFFLOADED.encode()
_EVENTS = b"text/event-stream"


class Held:
    """A `Reply` that passes on from the first event of a stream, or from the end of an error.

    vLLM sends the head of a stream before there is a token, and the error of a request that it
    lets go as the first event. `begins` is called when there is a token; `given_back` says that
    the instance gave the request back instead, and then nothing was passed on.
    """

    def __init__(self, reply: Reply, begins: Callable[[], None]) -> None:
        self.given_back = False
        self._reply = reply
        self._begins = begins
        self._passes = False
        self._head: tuple[int, bytes, Headers] | None = None
        self._pieces: list[bytes] = []
        self._streams = False

    @property
    def begun(self) -> bool:
        """See `Reply`."""
        return self._reply.begun

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """See `Reply`."""
        self._head = (status, reason, headers)
        types = [value for name, value in headers if name.lower() == b"content-type"]
        self._streams = any(value.startswith(_EVENTS) for value in types)

    def pieces(self, pieces: list[bytes]) -> None:
        """See `Reply`."""
        if self._passes:
            self._reply.pieces(pieces)
            return
        self._pieces += pieces
        if self._head is None or self._head[0] != 200 or self.given_back:
            return
        if self._streams:
            first, end, _ = b"".join(self._pieces).partition(b"\n\n")
            if not end:
                return
            if first.startswith(b'data: {"error"') and _GIVEN_BACK in first:
                self.given_back = True
                return
        self._begins()
        self._pass()

    def end(self) -> None:
        """See `Reply`."""
        if not (self._passes or self.given_back):
            assert self._head is not None
            self.given_back = self._head[0] == 503 and _GIVEN_BACK in b"".join(self._pieces)
            if not self.given_back:
                self._pass()
        if not self.given_back:
            self._reply.end()

    def _pass(self) -> None:
        assert self._head is not None
        self._passes = True
        self._reply.begin(*self._head)
        self._reply.pieces(self._pieces)

    def comes_from(self, source: asyncio.ReadTransport | None) -> None:
        """See `Reply`."""
        self._reply.comes_from(source)
