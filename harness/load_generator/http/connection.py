"""Exchanges of one request and one answer, and the reused connections that carry them.

This is the hot path. A read of a stream costs one clock reading and two appends; chunks and JSON
are parsed after the run. So a busy client's timestamps are as accurate as those of an idle one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import MappingProxyType
from typing import Any, cast

import httptools

from ....workloads.masking import masked
from .endpoint import Endpoint
from .faults import RequestFault, connect_detail, connect_fault
from .heartbeats import has_data_since, is_comment, is_end

NOT_YET_S = float("nan")
CLOSE_LIMIT_S = 2.0
_LAST_CHUNK_LIMIT_S = 0.05  # after the end of an answer for which other requests wait
MOST_BODY_BYTES = 256 << 20  # of one answer, with its head; a million tokens have less

# How the last chunk follows another. In a stream of events that are JSON it can be nothing else;
# whether all chunks before it are whole is looked at when they are taken apart.
_END = b"\r\n0\r\n\r\n"
# The same with an extension or with trailers after it (RFC 9112, 7.1.2), at the end of what came.
_LAST_CHUNK = re.compile(rb"(?:\A|\r\n)0+[ \t]*(?:;[^\r\n]*)?\r\n(?:[^\r\n:]+:[^\r\n]*\r\n)*\r\n\Z")
_PERHAPS_ENDS = (b"\r\n\r\n", b"]\n\n\r\n")  # of the last chunk, and of [DONE]
_MOST_TRAILER_BYTES = 8 << 10
_MOST_HEADER_BYTES = 200
# Headers that say what an answer is if it is no stream of events.
_KEPT_HEADERS = (b"content-type", b"content-encoding", b"retry-after", b"location")
_TLS_ALERT = b"\x15\x03"  # what a server that speaks TLS answers to plain HTTP
_SPEAKS_TLS = "the server speaks TLS there: https:// in place of http://"
_HTTP2_SETTINGS = b"\x04\x00\x00\x00\x00\x00"  # after its length, the first frame of HTTP/2
_SPEAKS_HTTP2 = "the server speaks HTTP/2 alone there; only HTTP/1.1 is sent"
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})  # of a stream of events


def _no_headers() -> Mapping[str, str]:
    return _NO_HEADERS


@dataclass(slots=True, eq=False)
class Exchange:
    """One request in progress: its times and the bytes of its answer.

    Times but the arrival are `time.perf_counter`'s; `pieces[i]` was there at `stamps[i]`.

    The pieces are those of the body; if it is `chunked`, with the bytes that say so.
    """

    row: int
    endpoint: int
    arrival_s: float  # scheduled, on the workload's clock
    waited_for: bool  # others arrive when this one is answered
    started_s: float = NOT_YET_S  # later than due if the client is late
    sent_s: float = NOT_YET_S  # written to a connection
    first_byte_s: float = NOT_YET_S
    end_s: float = NOT_YET_S
    status: int = 0
    fault: RequestFault = RequestFault.NONE
    detail: str = ""
    connections: int = 0  # that were tried
    chunked: bool = False
    body_bytes: int = 0  # that came, with what frames them
    most_bytes: int = MOST_BODY_BYTES
    headers: Mapping[str, str] = field(
        default_factory=_no_headers
    )  # of the answer, those of `_KEPT_HEADERS`
    stamps: array[float] = field(default_factory=lambda: array("d"))
    pieces: list[bytes] = field(default_factory=list)


Ended = Callable[[Exchange], None]


@dataclass(slots=True, eq=False, repr=False)
class Connection(asyncio.Protocol):
    """A connection with at most one exchange at a time."""

    _pool: ConnectionPool
    _transport: asyncio.Transport = field(init=False)
    _parser: Any = None
    _framed: bool = False  # the answer's head says where its body ends
    _streams: bool = False  # it is a chunked body
    _stays: bool = True  # the connection may be used again
    _used: bool = False  # has carried a whole exchange
    _lost: tuple[Exception | None] | None = None  # with the reason
    _left_bytes: int = 0  # that the answer may still have
    # Of the exchange whose answer streams: looked up once, not on each read.
    _stamp: Callable[[float], None] = field(init=False)
    _keep: Callable[[bytes], None] = field(init=False)
    _now_s: float = 0.0
    exchange: Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._pool.opening -= 1
        self._pool.open.add(self)

    @property
    def was_made(self) -> bool:
        """Return True if there is or was a connection."""
        return hasattr(self, "_transport")

    def send(self, exchange: Exchange) -> None:
        """Send a request; the pool is told when its exchange has ended.

        On a connection that closes just now nothing is sent; `connection_lost` ends the exchange.
        """
        self.exchange = exchange
        self._parser = None
        self._framed = False
        request = self._pool.request_of(exchange.row)
        exchange.sent_s = perf_counter()
        if self._lost is not None:
            self.connection_lost(*self._lost)
        elif not self._transport.is_closing():
            self._transport.write(b"".join(request))  # of several it would keep a list

    def data_received(self, data: bytes) -> None:
        now_s = perf_counter()
        if self._streams:
            self._stamp(now_s)
            self._keep(data)
            n_bytes = len(data)
            self._left_bytes -= n_bytes
            if n_bytes < 4 or data.endswith(_PERHAPS_ENDS) or self._left_bytes < 0:
                self._look_for_end(now_s)
            return
        exchange = self.exchange
        if exchange is None:  # no request is in progress
            self._transport.abort()
            return
        if exchange.first_byte_s != exchange.first_byte_s:
            exchange.first_byte_s = now_s
        if self._parser is not None or not self._begin_stream(exchange, data, now_s):
            self._parse(data, now_s)

    def _look_for_end(self, now_s: float) -> None:
        """End the exchange if its whole answer has come, or too much."""
        exchange = self.exchange
        assert exchange is not None
        if self._left_bytes < 0:
            self._too_long(exchange)
        elif _is_whole(exchange):
            self._end(exchange, now_s, stays=self._stays)
        else:
            self._end_soon(exchange)

    def _end_soon(self, exchange: Exchange) -> None:
        """Where requests wait for an answer that said its end, wait no longer for the last chunk
        than they can.
        """
        if exchange.waited_for and exchange.pieces and is_end(exchange.pieces[-1]):
            loop = asyncio.get_running_loop()
            loop.call_later(_LAST_CHUNK_LIMIT_S, self._end_open, exchange)

    def _end_open(self, exchange: Exchange) -> None:
        """End an exchange that has no last chunk after its answer said its end."""
        if self.exchange is exchange:
            self.break_off(RequestFault.STALLED, "no last chunk")

    def _begin_stream(self, exchange: Exchange, data: bytes, now_s: float) -> bool:
        """Return True if `data` is the start of a chunked answer with its whole head."""
        head_end = data.find(b"\r\n\r\n") + 4
        if head_end < 4 or not data.startswith(b"HTTP/1.1 200"):
            return False
        head = data[:head_end].lower()
        if b"\r\ntransfer-encoding: chunked\r\n" not in head or b"\r\ntrailer:" in head:
            return False
        if b"\r\ncontent-type: text/event-stream" not in head or b"content-encoding:" in head:
            return False
        self._streams = exchange.chunked = self._framed = True
        self._left_bytes = exchange.most_bytes
        self._stamp, self._keep = exchange.stamps.append, exchange.pieces.append
        self._stays = b"\r\nconnection: close" not in head
        exchange.status = 200
        if head_end < len(data):
            exchange.stamps.append(now_s)
            exchange.pieces.append(data[head_end:])
            self._look_for_end(now_s)
        return True

    def _parse(self, data: bytes, now_s: float) -> None:
        """Parse an answer that the fast path does not handle."""
        self._now_s = now_s
        exchange = self.exchange
        assert exchange is not None
        exchange.body_bytes += len(data)
        if exchange.body_bytes > exchange.most_bytes:
            self._too_long(exchange)
            return
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(data)
            self._end_soon(exchange)
        except httptools.HttpParserUpgrade:
            self.break_off(RequestFault.MALFORMED, "the server changes the protocol (status 101)")
        except httptools.HttpParserCallbackError:
            raise  # an error of this module, which the driver raises
        except httptools.HttpParserError as error:
            detail = _SPEAKS_TLS if data.startswith(_TLS_ALERT) else f"no HTTP: {error}"
            detail = _SPEAKS_HTTP2 if data[3:9] == _HTTP2_SETTINGS else detail
            self.break_off(RequestFault.MALFORMED, detail)

    def _too_long(self, exchange: Exchange) -> None:
        self.break_off(
            RequestFault.MALFORMED, f"the answer has more than {exchange.most_bytes >> 20} MiB"
        )

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name in _KEPT_HEADERS and self.exchange is not None:
            text = masked(value.decode("latin-1"))[:_MOST_HEADER_BYTES].strip()
            kept = {name.decode(): text}
            self.exchange.headers = {**self.exchange.headers, **kept}

    def on_headers_complete(self) -> None:
        if self.exchange is not None:
            self.exchange.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        exchange = self.exchange
        if exchange is not None:
            exchange.stamps.append(self._now_s)
            exchange.pieces.append(piece)

    def on_message_complete(self) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.status >= 200:  # 100 Continue: the answer comes yet
            self._end(exchange, self._now_s, stays=self._parser.should_keep_alive())

    def _end(self, exchange: Exchange, now_s: float, *, stays: bool) -> None:
        """Finish an exchange after its whole answer has arrived."""
        self.exchange = None
        self._streams = False
        self._used = True
        exchange.end_s = now_s
        if stays:
            self._pool.idle.append(self)
        else:
            self._transport.close()
        self._pool.ended(exchange)

    def abort(self) -> None:
        """Close at once, without the closing messages of TLS."""
        self._transport.abort()

    def break_off(self, fault: RequestFault, detail: str) -> None:
        """End the exchange with a fault, and close the connection."""
        exchange, self.exchange = self.exchange, None
        self._streams = False
        self._transport.abort()
        if exchange is not None:
            _fail(exchange, fault, detail)
            self._pool.ended(exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = (exc,)
        pool = self._pool
        pool.lost(self)
        exchange, self.exchange = self.exchange, None
        self._streams = False
        if exchange is None:
            return
        nothing_came = exchange.first_byte_s != exchange.first_byte_s
        if nothing_came and self._used and exchange.connections == 1:
            # The server closed an idle connection just when it was used again.
            pool.connect(exchange)
            return
        if exchange.status == 200 and not self._framed and exc is None:
            exchange.end_s = perf_counter()  # HTTP/1.0 servers end a body by closing
        elif exc is None:
            _fail(exchange, RequestFault.CUT, "closed before the end of the answer")
        else:
            _fail(exchange, RequestFault.RESET, str(exc) or type(exc).__name__)
        pool.ended(exchange)


def _is_whole(exchange: Exchange) -> bool:
    """Return True if the last chunk has arrived, alone, split, or with trailers after it."""
    if exchange.pieces[-1].endswith(_END):
        return True
    end = _tail(exchange, len(_END))
    if end == _END:
        return True
    if not end.endswith(b"\r\n\r\n") or end[-6:-4] == b"\r\n":  # of an event, as a rule
        return False
    return _LAST_CHUNK.search(_tail(exchange, _MOST_TRAILER_BYTES)) is not None


def _tail(exchange: Exchange, n_bytes: int) -> bytes:
    """Return the last `n_bytes` of the body, or all of it where it is shorter."""
    pieces: list[bytes] = []
    missing = n_bytes
    for piece in reversed(exchange.pieces):
        pieces.append(piece[-missing:])
        missing -= len(piece)
        if missing <= 0:
            break
    return b"".join(reversed(pieces))


def _fail(exchange: Exchange, fault: RequestFault, detail: str) -> None:
    exchange.fault = fault
    exchange.detail = detail
    exchange.end_s = perf_counter()


class ConnectionPool:
    """Connections to one server, as many as needed; the one used last is used first.

    `request_of` returns the bytes of a row's request; `ended` is called once for each exchange.
    `has_room` says whether another connection may be opened.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        request_of: Callable[[int], list[bytes]],
        ended: Ended,
        *,
        connect_limit_s: float,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        self.endpoint = endpoint
        self.request_of = request_of
        self.ended = ended
        self.idle: list[Connection] = []
        self.open: set[Connection] = set()
        self.opening = 0  # connections that are being made
        self._connect_limit_s = connect_limit_s
        self._tls = endpoint.tls_context()
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._closed = asyncio.Event()
        self._connecting: dict[asyncio.Task[None], Exchange] = {}
        self._address: tuple[str, int] = (endpoint.host, endpoint.port)

    async def resolve(self) -> None:
        """Resolve the host name once, so that no request waits for it.

        Raises:
            OSError: the host does not exist.
        """
        if self.endpoint.socket:
            return
        addresses = await self._loop.getaddrinfo(
            self.endpoint.host, self.endpoint.port, type=socket.SOCK_STREAM
        )
        if len(addresses) == 1:  # of several, whichever answers is tried for each connection
            self._address = addresses[0][4][:2]  # type: ignore[assignment]

    def send(self, exchange: Exchange) -> None:
        """Send a request on an idle connection, or on a new one."""
        if self.idle:
            exchange.connections = 1
            self.idle.pop().send(exchange)
        else:
            self.connect(exchange)

    def connect(self, exchange: Exchange) -> None:
        """Send a request on a new connection."""
        exchange.connections += 1
        task = self._loop.create_task(self._connect(exchange))
        self._connecting[task] = exchange
        task.add_done_callback(lambda task: self._connecting.pop(task, None))

    async def _connect(self, exchange: Exchange) -> None:
        if not self._has_room():
            detail = "no more connections: the limit of open files is reached (ulimit -n)"
            _fail(exchange, RequestFault.CLIENT, detail)
            self.ended(exchange)
            return
        connection = Connection(self)
        self.opening += 1
        try:
            async with asyncio.timeout(self._connect_limit_s):
                await self._open(connection)
        except (OSError, TimeoutError) as error:
            detail = connect_detail(error) or f"no connection within {self._connect_limit_s:g} s"
            _fail(exchange, connect_fault(error), detail)
            self.ended(exchange)
            return
        finally:
            if not connection.was_made:
                self.opening -= 1
        connection.send(exchange)

    async def _open(self, connection: Connection) -> None:
        loop, tls, socket_path = self._loop, self._tls, self.endpoint.socket
        name = self.endpoint.host if tls is not None else None
        if socket_path:
            await loop.create_unix_connection(
                lambda: connection, socket_path, ssl=tls, server_hostname=name
            )
            return
        host, port = self._address
        await loop.create_connection(lambda: connection, host, port, ssl=tls, server_hostname=name)

    @property
    def sockets(self) -> int:
        """Number of sockets that are open or are being opened."""
        return len(self.open) + self.opening

    @property
    def answering(self) -> int:
        """Number of requests on open connections."""
        return len(self.open) - len(self.idle)

    def stalled(
        self, now_s: float, limit_s: float, first_limit_s: float
    ) -> list[tuple[Connection, float]]:
        """Return connections without data for `limit_s`, or to which none has come yet for
        `first_limit_s`, or whose stream stays open after its end, each with the limit that it
        exceeded.
        """
        stalled = []
        for connection in self.open:
            exchange = connection.exchange
            if exchange is None:
                continue
            if exchange.pieces and is_end(exchange.pieces[-1]):
                limit = min(limit_s, CLOSE_LIMIT_S)
            elif exchange.sent_s >= now_s - min(limit_s, first_limit_s):
                continue
            else:
                limit = first_limit_s if all(map(is_comment, exchange.pieces)) else limit_s
            before_s = now_s - limit
            if exchange.sent_s < before_s and not has_data_since(
                exchange.stamps, exchange.pieces, before_s
            ):
                stalled.append((connection, limit))
        return stalled

    def give_up(self, fault: RequestFault, detail: str) -> None:
        """Abort all exchanges in progress."""
        for connection in list(self.open):
            if connection.exchange is not None:
                connection.break_off(fault, detail)
        for task, exchange in list(self._connecting.items()):
            if task.cancel():
                _fail(exchange, fault, detail)
                self.ended(exchange)

    async def close(self) -> None:
        """Close all connections, and wait until they are closed."""
        self._closing = True
        for task in list(self._connecting):
            task.cancel()
        for connection in list(self.open):
            connection.abort()
        if self._connecting:
            await asyncio.wait(list(self._connecting))
        if self.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), CLOSE_LIMIT_S)

    def lost(self, connection: Connection) -> None:
        """Handle a closed connection."""
        self.open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        if self._closing and not self.open:
            self._closed.set()
