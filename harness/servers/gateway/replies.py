"""Replies between a server and a client: answers that are collected, counted or held back."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

from ...core.wire import OFFLOADED
from ...load_generator.http.answers import Raw
from ...load_generator.http.faults import RequestFault
from ..http.http_server import Headers, Reply, json_object

_MOST_BYTES = 16 << 20
_GIVEN_BACK = OFFLOADED.encode()
_EVENTS = b"text/event-stream"


class CollectedReply:
    """A `Reply` that keeps the answer instead of passing it on."""

    def __init__(self) -> None:
        self.begun = False
        self.status = 0
        self.reason = b""
        self.headers: Headers = []
        self._pieces: list[bytes] = []

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """Store the head of the answer."""
        self.begun = True
        self.status, self.reason, self.headers = status, reason, headers

    def pieces(self, pieces: list[bytes]) -> None:
        """Store pieces of the body."""
        self._pieces += pieces

    def end(self) -> None:
        """Mark the answer as complete."""

    def comes_from(self, source: asyncio.ReadTransport | None) -> None:
        """Ignore the source: nothing is held back."""

    @property
    def body(self) -> bytes:
        """The complete body."""
        return b"".join(self._pieces)

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; empty if it is none."""
        return json_object(self.body) or {}

    def pass_on(self, reply: Reply) -> None:
        """Send the collected answer to another reply."""
        reply.begin(self.status, self.reason, self.headers)
        reply.pieces([self.body])
        reply.end()


class Wrapped:
    """A `Reply` that forwards to another one."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._pieces: list[bytes] = []

    @property
    def begun(self) -> bool:
        """Whether the head has been sent to the client."""
        return self._reply.begun

    def comes_from(self, source: asyncio.ReadTransport | None) -> None:
        """Set the transport that is paused while the client is slow."""
        self._reply.comes_from(source)


class CountedReply(Wrapped):
    """A `Reply` that passes everything on at once and keeps a copy of the body.

    `whole` is called with a complete answer of status 200 that is not too large to keep, as soon as
    it ends, because the client may disconnect then. The copy has no time stamps.
    """

    def __init__(self, reply: Reply, whole: Callable[[Raw], None]) -> None:
        super().__init__(reply)
        self._whole = whole
        self._bytes = 0
        self._status = 0

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """Store the status and send the head."""
        self._status = status
        self._reply.begin(status, reason, headers)

    def pieces(self, pieces: list[bytes]) -> None:
        """Keep pieces of the body and send them."""
        self._bytes += sum(map(len, pieces))
        if self._bytes <= _MOST_BYTES:
            self._pieces += pieces
        self._reply.pieces(pieces)

    def end(self) -> None:
        """End the answer and report it if it is complete."""
        self._reply.end()
        if self._status == 200 and self._bytes <= _MOST_BYTES:
            lengths = array("I", map(len, self._pieces))
            stamps = array("d", [0.0]) * len(lengths)
            body = b"".join(self._pieces)
            self._whole(Raw(200, RequestFault.NONE, "", stamps, lengths, body, embeds=False))


class BufferedReply(Wrapped):
    """A `Reply` that passes on from the first event of a stream, or from the end of an error.

    vLLM sends the head of a stream before there is a token, and the error of a request that it
    lets go as the first event. `begins` is called when there is a token; `given_back` says that
    the instance gave the request back instead, and then nothing was passed on.
    """

    def __init__(self, reply: Reply, begins: Callable[[], None]) -> None:
        super().__init__(reply)
        self.given_back = False
        self._begins = begins
        self._passes = False
        self._head: tuple[int, bytes, Headers] | None = None
        self._streams = False

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """Hold the head back until the first event; it replaces one of an answer that was lost."""
        self._head = (status, reason, headers)
        self._pieces = []
        types = [value for name, value in headers if name.lower() == b"content-type"]
        self._streams = any(value.startswith(_EVENTS) for value in types)

    def pieces(self, pieces: list[bytes]) -> None:
        """Hold pieces back until the first event shows that the server has begun the request."""
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
        """End the answer, unless the server gave the request back."""
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
