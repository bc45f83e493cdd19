"""Reused connections to one server; its answers are passed on as they arrive."""

from __future__ import annotations

import asyncio
import select
from time import monotonic
from typing import cast

import httptools

from ...load_generator.http.connection import CLOSE_LIMIT_S
from ...load_generator.http.endpoint import Endpoint
from ...load_generator.http.heartbeats import is_end
from ..http.http_server import Headers, HttpRequest, Reply, end_to_end

CONNECT_LIMIT_S = 5.0
# Servers on uvicorn (vLLM, SGLang) close connections that were idle for 5 s, perhaps just when a
# request is written.
_REUSED_FOR_S = 4.0


def wire(request: HttpRequest, endpoint: Endpoint) -> list[bytes]:
    """Bytes of a request to a server."""
    # We leave the body of an answer to HEAD out ourselves.
    method = "GET" if request.method == "HEAD" else request.method
    headers = end_to_end(request.headers)
    if endpoint.api_key:
        headers = [header for header in headers if header[0].lower() != b"authorization"]
        headers.append((b"authorization", f"Bearer {endpoint.api_key}".encode()))
    lines = [
        f"{method} {endpoint.prefix}{request.target} HTTP/1.1\r\n".encode("latin-1"),
        f"host: {endpoint.authority}\r\n".encode("latin-1"),
        *(b"%b: %b\r\n" % header for header in headers),
    ]
    if request.body or method not in ("GET", "DELETE", "OPTIONS"):
        lines.append(b"content-length: %d\r\n" % len(request.body))
    return [b"".join(lines) + b"\r\n", request.body]


class UnreachableError(Exception):
    """No connection was made, so the request was not sent."""


class ConnectionLostError(Exception):
    """The connection ended before the answer did."""


class Upstream:
    """A server and its connections, for any number of exchanges at once."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._tls = endpoint.tls_context()
        self.idle: list[_Connection] = []
        self.open: set[_Connection] = set()
        self.heard_s = monotonic()  # when the last bytes came

    async def exchange(self, request: HttpRequest, reply: Reply) -> None:
        """Send a request, once, and pass the answer on. Cancelling the call also ends the request
        at the server.

        An idle connection is taken if it is known to be open still: what was written to a
        connection that then closes may have been read, and is not written again.

        Raises:
            UnreachableError: no connection could be made; nothing was sent.
            ConnectionLostError: the server went away before its answer was whole.
        """
        wire_bytes = wire(request, self.endpoint)
        while self.idle:
            connection = self.idle.pop()
            if connection.is_fresh():
                break
            connection.abort()
        else:
            connection = await self._connect()
        await connection.exchange(wire_bytes, reply)

    async def _connect(self) -> _Connection:
        host, port, socket = self.endpoint.host, self.endpoint.port, self.endpoint.socket
        loop, tls = asyncio.get_running_loop(), self._tls
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                if socket:
                    _, connection = await loop.create_unix_connection(
                        lambda: _Connection(self), socket
                    )
                else:
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self), host, port, ssl=tls
                    )
        except TimeoutError:
            raise UnreachableError(f"no connection within {CONNECT_LIMIT_S:g} s") from None
        except OSError as error:
            raise UnreachableError(error.strerror or str(error)) from error
        return connection

    def close_idle(self) -> None:
        """Close the connections that have no request: the next request makes one of its own."""
        while self.idle:
            self.idle.pop().abort()

    def close(self) -> None:
        """Close every connection; requests in progress are lost."""
        for connection in list(self.open):
            connection.abort()


class _Connection(asyncio.Protocol):
    """A connection with at most one exchange at a time."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._done: asyncio.Future[None] | None = None
        self._lost = False
        self._idle_since_s = 0.0

    def is_fresh(self) -> bool:
        """Whether it is open and has nothing to read, as far as can be known."""
        if self._lost or self._transport.is_closing():
            return False
        if monotonic() - self._idle_since_s > _REUSED_FOR_S:
            return False
        look = select.poll()
        look.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not look.poll(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._upstream.open.add(self)

    async def exchange(self, request: list[bytes], reply: Reply) -> None:
        self._reply = reply
        self._parser = httptools.HttpResponseParser(self)
        self._begin_head()
        self._heard = self._framed = self._begun = self._said_end = False
        if self._lost:
            raise UnreachableError("closed at once")
        self._done = asyncio.get_running_loop().create_future()
        if not self._transport.is_closing():  # else `connection_lost` ends the exchange
            self._transport.writelines(request)
        reply.comes_from(self._transport)
        try:
            await self._done
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            reply.comes_from(None)
            self._done = None
        if self._stays and not self._transport.is_closing():
            self._idle_since_s = monotonic()
            self._upstream.idle.append(self)
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():  # no request is in progress
            self.abort()
            return
        self._heard = True
        self._upstream.heard_s = monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            self._fail(ConnectionLostError(f"no HTTP: {error}"))
            self.abort()
            return
        self._flush()

    def _begin_head(self) -> None:
        self._headers: Headers = []
        self._reason = b""
        self._pieces: list[bytes] = []

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # 100 Continue: the answer comes yet
            self._begun = True
            self._reply.begin(status, self._reason, self._headers)

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._begin_head()
            self._framed = False
            return
        self._stays = self._parser.should_keep_alive()
        self._finish()

    def _flush(self) -> None:
        if self._pieces:
            self._reply.pieces(self._pieces)
            self._said_end = is_end(self._pieces[-1])
            self._pieces = []
            if self._said_end:  # perhaps without a last chunk, and open
                loop = asyncio.get_running_loop()
                loop.call_later(CLOSE_LIMIT_S, self._end_open, self._done)

    def _end_open(self, done: asyncio.Future[None] | None) -> None:
        """End an answer that said its end, if it is not whole yet."""
        if done is self._done:
            self._stays = False
            self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._flush()
            self._reply.end()
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        upstream = self._upstream
        self._lost = True
        upstream.open.discard(self)
        if self in upstream.idle:
            upstream.idle.remove(self)
        if self._done is None or self._done.done():
            return
        if not self._heard:
            self._fail(ConnectionLostError("closed without an answer"))
        elif self._said_end or (self._begun and not self._framed and exc is None):
            self._stays = False  # closing is how old servers end a body
            self._finish()
        else:
            self._fail(
                ConnectionLostError(str(exc) if exc else "closed before the end of the answer")
            )
