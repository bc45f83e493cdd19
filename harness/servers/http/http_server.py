"""A small HTTP/1.1 server on asyncio and httptools: of the gateway, the torch engine and the mock.

A handler is a coroutine function that takes an `HttpRequest` and a `Reply`. It is cancelled when
its client goes away. Requests on one connection are answered one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from time import perf_counter
from typing import Any, Protocol, cast

import httptools

from ....workloads.errors import SloBenchError
from ....workloads.parsing import parse_json
from ...load_generator.machine import run_event_loop, sockets_left
from .allowed_hosts import AllowedHosts
from .http_limits import DEFAULT_LIMITS, HttpLimits

MOST_HEAD_BYTES = 1 << 20
_MOST_AHEAD = 64  # requests that a client may send before it is answered
_PROBE_S = 1.0  # between two looks whether a client that sends no more still reads
_START_S = 20.0

Headers = list[tuple[bytes, bytes]]
# Receives the address, and the function that stops the server.
Ready = Callable[[str, Callable[[], None]], None]

# These belong to one connection, not to the message (RFC 9110, 7.6.1); lengths are ours to state.
_OF_THE_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate"),
        *(b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"expect", b"host", b"content-length"),
    )
)


_ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeout",
    413: "PayloadTooLarge",
    429: "RateLimitError",
    502: "BadGateway",
    503: "ServiceUnavailable",
    504: "GatewayTimeout",
}


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers without those of the connection (RFC 9110, 7.6.1) and those that it names."""
    headers = list(headers)
    named = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for word in value.split(b",")
    }
    dropped = _OF_THE_CONNECTION | named if named else _OF_THE_CONNECTION
    return [(n, v) for n, v in headers if n.lower() not in dropped]


def json_object(body: bytes) -> dict[str, Any] | None:
    """The JSON object in `body`; None if there is none."""
    try:
        content = parse_json(body)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


@dataclass(frozen=True)
class HttpRequest:
    """A complete request. `target` is the path with query; `received_s` by `time.perf_counter`."""

    method: str
    target: str
    headers: Headers
    body: bytes = b""
    received_s: float = 0.0

    @property
    def path(self) -> str:
        """The target without the query."""
        return self.target.partition("?")[0]

    def json(self) -> dict[str, Any] | None:
        """The body, if it is a JSON object."""
        return json_object(self.body)

    def with_json(self, body: Mapping[str, Any]) -> HttpRequest:
        """The same request with another body."""
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        return replace(self, body=text.encode())


class Reply(Protocol):
    """The answer to a client, sent in pieces."""

    @property
    def begun(self) -> bool:
        """Whether the head has been sent, so that the status is fixed."""

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """Send the head of the answer."""

    def pieces(self, pieces: list[bytes]) -> None:
        """Send pieces of the body."""

    def end(self) -> None:
        """Mark the body as complete."""

    def comes_from(self, source: asyncio.ReadTransport | None) -> None:
        """Pause reading from `source` while the client cannot take pieces as fast as they come."""


def respond(reply: Reply, content: bytes, content_type: str, status: int = 200) -> None:
    """Send a complete answer: status, head and body."""
    length = b"%d" % len(content)
    headers = [(b"content-type", content_type.encode()), (b"content-length", length)]
    reply.begin(status, HTTPStatus(status).phrase.encode(), headers)
    reply.pieces([content])
    reply.end()


def respond_json(reply: Reply, content: object, status: int = 200) -> None:
    """Send a value as a JSON answer."""
    respond(reply, json.dumps(content).encode(), "application/json", status)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error in the form that OpenAI's clients read. `param`: the parameter it is about."""
    kind = _ERROR_TYPES.get(status, "ServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def refuse(reply: Reply, status: int, message: str, param: str | None = None) -> None:
    """Send an error in OpenAI's form."""
    respond_json(reply, error_body(status, message, param), status)


Handler = Callable[[HttpRequest, "ClientReply"], Awaitable[None]]


CANCELLED = "cancelled"  # the client was gone before the end of its answer
LOST = "lost"  # the answer has no end


class Clients:
    """The connections of a server, the bytes of the requests that it has not answered, and what
    became of each request.

    `ended` counts whole requests by the status of a whole answer, `CANCELLED` or `LOST`; `refused`
    counts by status those that were refused before they were read whole.
    """

    def __init__(
        self, limits: HttpLimits = DEFAULT_LIMITS, hosts: AllowedHosts | None = None
    ) -> None:
        self.limits = limits
        self.hosts = hosts or AllowedHosts("127.0.0.1", None)
        self.connections: set[HttpConnection] = set()
        self.bodies_bytes = 0
        self.received = 0
        self.ended: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()

    def close_idle(self) -> None:
        """Close the connections that have been idle for too long."""
        if self.limits.idle_s is not None:
            since_s = perf_counter() - self.limits.idle_s
            for connection in [c for c in self.connections if c.idle_since(since_s)]:
                connection.close()


class HttpConnection(asyncio.Protocol):
    """One client's connection: parses requests and sends answers in order."""

    def __init__(self, handler: Handler, clients: Clients) -> None:
        self._handler = handler
        self._clients, self._limits = clients, clients.limits
        self._body_bytes = 0
        self._held_bytes = 0  # of requests that are whole and not answered
        self._ahead: deque[tuple[HttpRequest, ClientReply]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._reply: ClientReply | None = None
        self._full = False
        self._waiting: asyncio.TimerHandle | None = None  # for the rest of a request
        self._gone = False
        self._fault: tuple[int, str] | None = None  # of what follows the requests in progress
        self._half_closed = False  # the client sends no more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Prepare the parser of a new connection and register it."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._parser = httptools.HttpRequestParser(self)
        self._received_s = perf_counter()
        self._begin()
        full = len(self._clients.connections) >= self._limits.connections
        self._clients.connections.add(self)
        if full:
            self._give_up(503, f"the server has {self._limits.connections:,} connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister the connection and cancel its requests."""
        self._clients.connections.discard(self)
        self._clients.bodies_bytes -= self._body_bytes + self._held_bytes
        self._body_bytes = self._held_bytes = 0
        self._gone = True
        self._clients.ended[CANCELLED] += len(self._ahead)
        self._ahead.clear()
        if self._waiting is not None:
            self._waiting.cancel()
        if self._task is not None:
            self._count(CANCELLED)  # here: a task that has not begun is cancelled in silence
            self._task.cancel()

    def eof_received(self) -> bool:
        """Keep the connection for the answers of whole requests: who has sent all may still read.

        Who has closed looks the same. One of the two refuses what is written: interim answers
        (`100 Continue`, which clients skip) until the answer begins.
        """
        raw_socket: Any = self._transport.get_extra_info("socket")
        over_tls = self._transport.get_extra_info("sslcontext") is not None
        if self._task is None or over_tls or raw_socket.family == socket.AF_UNIX:
            return False
        self._half_closed = True
        if self._waiting is not None:
            self._waiting.cancel()
        asyncio.get_running_loop().call_later(_PROBE_S, self._probe)
        return True

    def _probe(self) -> None:
        if self._task is None or self._transport.is_closing():
            return
        assert self._reply is not None
        self._reply.probe()
        asyncio.get_running_loop().call_later(_PROBE_S, self._probe)

    def _count(self, cut: str) -> None:
        """Count the request in progress, with `cut` for an answer without an end."""
        reply = self._reply
        assert reply is not None
        self._clients.ended[str(reply.status) if reply.complete else cut] += 1

    def idle_since(self, time_s: float) -> bool:
        """Whether nothing has been received since `time_s` and no request is in progress."""
        return self._task is None and self._waiting is None and self._received_s < time_s

    def close(self) -> None:
        """Close when what was sent has left."""
        self._transport.close()

    def reset(self) -> None:
        """Close at once with RST in place of FIN, and cancel the request in progress."""
        reset(self._transport)

    def pause_writing(self) -> None:
        """Stop sending: the client reads more slowly than the server writes."""
        self._full = True
        if self._reply is not None:
            self._reply.hold(True)

    def resume_writing(self) -> None:
        """Resume sending when the client has read enough."""
        self._full = False
        if self._reply is not None:
            self._reply.hold(False)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse a head that is too large or is not HTTP."""
        self._received_s = perf_counter()
        if self._fault is not None:
            return
        if self._waiting is None:
            loop = asyncio.get_running_loop()
            self._waiting = loop.call_later(self._limits.request_s, self._too_slow)
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

    def _too_slow(self) -> None:
        self._give_up(408, f"the request was not whole within {self._limits.request_s:g} s")

    def _give_up(self, status: int, message: str) -> None:
        """Refuse the request and close the connection, both after answers that are in progress."""
        if self._task is not None:
            self._fault = status, message
            return
        if not self._transport.is_closing():
            reply = ClientReply(self._transport, http_1_1=True, head_only=False, stays=False)
            refuse(reply, status, message)
            self._clients.refused[status] += 1
        self._transport.close()

    def _begin(self) -> None:
        self._url = b""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0  # read since the last request or piece of a body

    def on_url(self, url: bytes) -> None:
        """Collect a part of the request target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect one header, and answer `Expect: 100-continue`."""
        self._headers.append((name, value))
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Collect a part of the request body."""
        self._head_bytes = 0
        self._body_bytes += len(body)
        self._clients.bodies_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes:
            self._give_up(413, f"the body has more than {self._limits.body_bytes >> 20} MiB")
        elif self._clients.bodies_bytes > self._limits.bodies_bytes:
            limit_mib = self._limits.bodies_bytes >> 20
            self._give_up(503, f"requests in progress have more than {limit_mib} MiB of bodies")
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Queue the complete request and start its handler if the connection is idle."""
        if self._transport.is_closing():
            return
        if not self._url.startswith(b"/") or self._url.startswith(b"//"):
            self._give_up(400, "the request's target must be a path, as in GET /v1/models")
            return
        hosts = [value for name, value in self._headers if name.lower() == b"host"]
        if len(hosts) > 1:
            self._give_up(400, "the request has several Host headers")
            return
        if hosts and not self._clients.hosts.allows(host := hosts[0].decode("latin-1")):
            self._give_up(403, f"no name of this server: {host!r:.100} (--allow-host)")
            return
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        method = self._parser.get_method().decode("latin-1")
        body, target = b"".join(self._body), self._url.decode("latin-1")
        request = HttpRequest(method, target, self._headers, body, self._received_s)
        reply = ClientReply(
            self._transport,
            http_1_1=self._parser.get_http_version() == "1.1",
            head_only=method == "HEAD",
            stays=self._parser.should_keep_alive() and not self._parser.should_upgrade(),
        )
        self._held_bytes += self._body_bytes
        self._begin()
        self._clients.received += 1
        self._ahead.append((request, reply))
        if self._task is None:
            self._next()
        elif len(self._ahead) > _MOST_AHEAD:
            self._transport.close()

    def _next(self) -> None:
        self._task = None
        if self._transport.is_closing():
            return
        if not self._ahead:
            if self._fault is not None:
                self._give_up(*self._fault)
            elif self._half_closed:
                self._transport.close()
            return
        request, self._reply = self._ahead.popleft()
        self._reply.hold(self._full)
        self._task = asyncio.get_running_loop().create_task(self._serve(request, self._reply))

    async def _serve(self, request: HttpRequest, reply: ClientReply) -> None:
        limit_s = self._limits.first_byte_s
        try:
            if limit_s is None:
                await self._handler(request, reply)
            else:
                await self._serve_within(limit_s, request, reply)
        finally:
            ended = min(len(request.body), self._held_bytes)  # none if the connection is lost
            self._held_bytes -= ended
            self._clients.bodies_bytes -= ended
            self._received_s = perf_counter()
            if not self._gone:
                self._count(LOST)
            if not reply.complete or not reply.stays:
                self._transport.close()  # no end: so a client hears that its answer was lost
            self._next()

    async def _serve_within(self, limit_s: float, request: HttpRequest, reply: ClientReply) -> None:
        try:
            async with asyncio.timeout(limit_s) as late:
                reply.on_begin = lambda: late.reschedule(None)
                await self._handler(request, reply)
        except TimeoutError:
            if not late.expired():
                raise
            reply.on_begin = None
            refuse(reply, 504, f"the answer did not begin within {limit_s:g} s")


class ClientReply:
    """Implements `Reply` on a connection. Headers of the connection are replaced by our own."""

    def __init__(
        self, transport: asyncio.Transport, *, http_1_1: bool, head_only: bool, stays: bool
    ) -> None:
        self.begun = self.complete = False
        self.status = 0
        self.stays = stays
        self.on_begin: Callable[[], None] | None = None
        self._transport = transport
        self._http_1_1 = http_1_1
        self._head_only = head_only
        self._chunked = self._silent = self._held = False
        self._source: asyncio.ReadTransport | None = None

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """Send the head of the answer."""
        self.begun = True
        self.status = status
        if self.on_begin is not None:
            self.on_begin()
            self.on_begin = None
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason)]
        lines += [b"%b: %b\r\n" % header for header in end_to_end(headers)]
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
        self._write(b"".join(lines) + b"\r\n")

    def pieces(self, pieces: list[bytes]) -> None:
        """Send pieces of the body."""
        chunked = self._chunked
        if not self._silent:
            for piece in pieces:
                if piece:
                    self._write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)

    def end(self) -> None:
        """Mark the body as complete."""
        self.complete = True
        if self._chunked:
            self._write(b"0\r\n\r\n")

    def probe(self) -> None:
        """Write something that is no answer, if that can be."""
        if self._http_1_1 and not self.begun:
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _write(self, data: bytes) -> None:
        """Nothing is written on a connection that closes; the handler is cancelled soon."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def reset(self) -> None:
        """Break the connection off with RST in place of FIN."""
        reset(self._transport)

    def comes_from(self, source: asyncio.ReadTransport | None) -> None:
        """Set the transport that is paused while the client is slow."""
        if source is None:
            self._pause(False)
        self._source = source
        self._pause(self._held)

    def hold(self, held: bool) -> None:
        """Set whether the client is too slow to take more."""
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


def reset(transport: asyncio.Transport) -> None:
    """Close a connection with RST in place of FIN."""
    raw_socket: Any = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def serve(
    handler: Handler,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    unix_socket: str = "",
    tls: ssl.SSLContext | None = None,
    clients: Clients | None = None,
    ready: Ready,
) -> None:
    """Serve until stopped; then all connections are reset. With `unix_socket`, a path, there is no
    port.

    Raises:
        OSError: the port is taken.
    """
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    clients = clients or Clients(hosts=AllowedHosts(host, None))

    def accepted() -> HttpConnection:
        return HttpConnection(handler, clients)

    server: asyncio.Server
    if unix_socket:
        server = await loop.create_unix_server(accepted, unix_socket, backlog=4096)
    else:
        server = await loop.create_server(accepted, host, port, ssl=tls, backlog=4096)

    def stop() -> None:
        loop.call_soon_threadsafe(over.set)

    try:
        bound_to = server.sockets[0].getsockname()
        if unix_socket:
            url = f"unix:{unix_socket}"
        else:
            url = f"http://{host}" if tls is None else "https://localhost"
            url += f":{bound_to[1]}"
        ready(url, stop)
        look_s = None if clients.limits.idle_s is None else clients.limits.idle_s / 8
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_s):
                    await over.wait()
            clients.close_idle()
    finally:
        server.close()
        for connection in list(clients.connections):
            connection.reset()
        await asyncio.sleep(0)  # for their last callbacks


@dataclass(frozen=True)
class Served:
    """A running server. `stop` ends it, from any thread."""

    url: str
    stop: Callable[[], None]


@contextlib.contextmanager
def in_thread(
    server_name: str, start: Callable[[Ready], Coroutine[Any, Any, None]]
) -> Iterator[Served]:
    """Run a server in a thread with an event loop of its own, for as long as the block lasts.

    `start` makes the coroutine that serves; `server_name` stands in errors.

    Raises:
        SloBenchError: it ended before it was ready, or was not ready in time.
    """
    sockets_left()  # raises the limit
    up: list[Served] = []
    problems: list[BaseException] = []
    settled = threading.Event()

    def ready(url: str, stop: Callable[[], None]) -> None:
        up.append(Served(url, stop))
        settled.set()

    def work() -> None:
        try:
            run_event_loop(start(ready))
        except BaseException as error:  # raised in the waiting thread
            problems.append(error)
        finally:
            settled.set()

    thread = threading.Thread(target=work, name=server_name, daemon=True)
    thread.start()
    settled.wait(_START_S)
    if not up:
        reason = problems[0] if problems else f"not within {_START_S:g} s"
        raise SloBenchError(f"no {server_name}: {reason}")
    try:
        yield up[0]
    finally:
        with contextlib.suppress(RuntimeError):  # its loop is gone already
            up[0].stop()
        thread.join(_START_S)
