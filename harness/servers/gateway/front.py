"""The clients' side: requests in, answers out, one after another on each connection."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import httptools

from .messages import Asked, Headers, Reply, passed_on, refuse

MOST_BODY_BYTES = 256 << 20
MOST_HEAD_BYTES = 1 << 20
_MOST_AHEAD = 64  # requests that a client may send before it is answered

Answer = Callable[[Asked, Reply], Awaitable[None]]


class Front(asyncio.Protocol):
    """One client's connection. `answer` is cancelled when the client goes away."""

    def __init__(self, answer: Answer, connections: set[Front]) -> None:
        self._answer = answer
        self._connections = connections
        self._ahead: deque[tuple[Asked, ClientReply]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._reply: ClientReply | None = None
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        found: Any = transport.get_extra_info("socket")
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = httptools.HttpRequestParser(self)
        self._connections.add(self)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._connections.discard(self)
        self._ahead.clear()
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        """Close at once; what was being answered is cancelled."""
        self._transport.abort()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client reads more slowly than the server writes."""
        self._full = True
        if self._reply is not None:
            self._reply.hold(True)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._full = False
        if self._reply is not None:
            self._reply.hold(False)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._head_bytes += len(data)
        if self._head_bytes > MOST_HEAD_BYTES:
            self._give_up(400, f"the head has more than {MOST_HEAD_BYTES >> 10} KiB")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # we do not: the request has been taken as it stands, and ends the connection
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            self._give_up(400, f"no HTTP/1.1: {error}")

    def _give_up(self, status: int, message: str) -> None:
        """Say why, unless another answer is on its way out, and close."""
        if self._task is None and not self._transport.is_closing():
            reply = ClientReply(self._transport, http_1_1=True, head_only=False, stays=False)
            refuse(reply, status, message)
        self._transport.close()

    def _begin(self) -> None:
        self._url = b""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0  # read since the last request or piece of a body

    def on_url(self, url: bytes) -> None:
        """See `httptools.HttpRequestParser`."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `httptools.HttpRequestParser`."""
        self._headers.append((name, value))
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """See `httptools.HttpRequestParser`."""
        self._head_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes <= MOST_BODY_BYTES:
            self._body.append(body)
        else:
            self._give_up(413, f"the body has more than {MOST_BODY_BYTES >> 20} MiB")

    def on_message_complete(self) -> None:
        """See `httptools.HttpRequestParser`."""
        if self._transport.is_closing():
            return
        if not self._url.startswith(b"/"):
            self._give_up(400, "the request's target must be a path, as in GET /v1/models")
            return
        method = self._parser.get_method().decode("latin-1")
        asked = Asked(method, self._url.decode("latin-1"), self._headers, b"".join(self._body))
        reply = ClientReply(
            self._transport,
            http_1_1=self._parser.get_http_version() == "1.1",
            head_only=method == "HEAD",
            stays=self._parser.should_keep_alive() and not self._parser.should_upgrade(),
        )
        self._begin()
        self._ahead.append((asked, reply))
        if self._task is None:
            self._next()
        elif len(self._ahead) > _MOST_AHEAD:
            self._transport.close()

    def _next(self) -> None:
        self._task = None
        if not self._ahead or self._transport.is_closing():
            return
        asked, self._reply = self._ahead.popleft()
        self._reply.hold(self._full)
        self._task = asyncio.get_running_loop().create_task(self._serve(asked, self._reply))

    async def _serve(self, asked: Asked, reply: ClientReply) -> None:
        try:
            await self._answer(asked, reply)
        finally:
            if not reply.complete or not reply.stays:
                self._transport.close()  # no end: so a client hears that its answer was lost
            self._next()


class ClientReply:
    """An answer on its way out; see `Reply`. Hop-by-hop headers are replaced by our own."""

    def __init__(
        self, transport: asyncio.WriteTransport, *, http_1_1: bool, head_only: bool, stays: bool
    ) -> None:
        self.begun = self.complete = False
        self.stays = stays
        self._transport = transport
        self._http_1_1 = http_1_1
        self._head_only = head_only
        self._chunked = self._silent = self._held = False
        self._source: asyncio.ReadTransport | None = None

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """See `Reply`."""
        self.begun = True
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason)]
        lines += [b"%b: %b\r\n" % header for header in passed_on(headers)]
        lengths = [value for name, value in headers if name.lower() == b"content-length"]
        self._silent = self._head_only or status in (204, 304)
        if lengths:
            lines.append(b"content-length: %b\r\n" % lengths[0])
        elif not self._silent:
            if self._http_1_1:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.stays = False
        if not self.stays:
            lines.append(b"connection: close\r\n")
        elif not self._http_1_1:
            lines.append(b"connection: keep-alive\r\n")
        self._transport.write(b"".join(lines) + b"\r\n")

    def pieces(self, pieces: list[bytes]) -> None:
        """See `Reply`."""
        if self._silent:
            return
        if self._chunked:
            pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece]
        self._transport.write(b"".join(pieces))

    def end(self) -> None:
        """See `Reply`."""
        self.complete = True
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")

    def comes_from(self, source: asyncio.ReadTransport | None) -> None:
        """See `Reply`."""
        if source is None:
            self._pause(False)
        self._source = source
        self._pause(self._held)

    def hold(self, held: bool) -> None:
        """Whether the client cannot take more at present."""
        self._held = held
        self._pause(held)

    def _pause(self, paused: bool) -> None:
        source = self._source
        if source is None or source.is_closing() or source.is_reading() is not paused:
            return
        if paused:
            source.pause_reading()
        else:
            source.resume_reading()
