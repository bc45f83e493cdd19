"""Both sides of every HTTP connection."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

from slo_bench.harness.load_generator.http.answers import Raw, read_answer, unchunk
from slo_bench.harness.load_generator.http.connection import Connection, Exchange
from slo_bench.harness.load_generator.http.endpoint import Endpoint
from slo_bench.harness.load_generator.http.faults import RequestFault
from slo_bench.harness.load_generator.http.request_columns import Spool
from slo_bench.harness.servers.gateway.replies import CollectedReply
from slo_bench.harness.servers.gateway.upstream import (
    ConnectionLostError,
    Upstream,
    _Connection,
    wire,
)
from slo_bench.harness.servers.http.http_limits import HttpLimits
from slo_bench.harness.servers.http.http_server import (
    Clients,
    Handler,
    HttpConnection,
    HttpRequest,
    Reply,
    respond,
)
from slo_bench.harness.servers.mock.mock_answers import MockHandler
from slo_bench.harness.servers.mock.mock_config import MockConfig
from slo_bench.harness.servers.mock.service import Service

from .target import Target

_EVENT = b'data: {"choices": [{"index": 0, "text": " a", "finish_reason": null}]}\n\n'
_LAST = (
    b'data: {"choices": [{"text": " b", "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
    b"data: [DONE]\n\n"
)


def _chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_WHOLE = b'{"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}}'
ANSWERS = [
    _HEAD + _chunked(_EVENT, _LAST),
    b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_WHOLE), _WHOLE),
    b"HTTP/1.1 503 No\r\ncontent-length: 18\r\n\r\n" + b'{"error": {"message": "no"}}'[:18],
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n\r\n" + _EVENT + _LAST,
]
_BODY = b'{"model": "m", "prompt": [1, 2], "max_tokens": 3, "stream": true}'
REQUESTS = [
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-request-id: 1\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_BODY), _BODY),
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\nGET /metrics HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    + _chunked(b'{"model": "m", "input": [[1], [2]]}'),
]


def _torn(data: bytes) -> list[bytes]:
    """In pieces, as a network might hand it over; where they end hangs on the bytes alone."""
    pieces, position, state = [], 0, sum(data[:64])
    while position < len(data):
        state = (1103515245 * state + 12345) % 2**31
        size = (1, 7, 40, 2000)[state >> 16 & 3]
        pieces.append(data[position : position + size])
        position += size
    return pieces


class _Wire(asyncio.Transport):
    """A connection whose other end is nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.written = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self

    def setsockopt(self, *options: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class _Pool:
    """What a client's connection tells of."""

    def __init__(self) -> None:
        self.idle: list[Connection] = []
        self.open: set[Connection] = set()
        self.opening = 0
        self.heard: list[Exchange] = []
        self.ended = self.heard.append

    def request_of(self, row: int) -> list[bytes]:
        return [b""]

    def lost(self, connection: Connection) -> None:
        pass

    def connect(self, exchange: Exchange) -> None:
        self.ended(exchange)


def _client(data: bytes) -> object:
    pool, wire = _Pool(), _Wire()
    connection = Connection(pool)  # type: ignore[arg-type]
    connection.connection_made(wire)
    exchange = Exchange(0, 0, 0.0, False)
    exchange.connections = 2
    connection.send(exchange)
    for piece in _torn(data):
        if not wire.closed and not pool.heard:
            connection.data_received(piece)
    if not pool.heard:
        connection.connection_lost(None)
    assert pool.heard == [exchange], "an exchange ends exactly once"
    spool = Spool()
    spool.keep(exchange)
    answer = read_answer(spool.raw(exchange, embeds=False), keep_text=True)
    spool.close()
    assert len(answer.token_s) <= 1 << 24
    return answer


def _chunks(data: bytes) -> object:
    pieces = _torn(data)
    answer = unchunk(pieces, array("d", range(len(pieces))))
    assert sum(map(len, answer.pieces)) <= len(data)
    return answer


def _answer(data: bytes) -> object:
    pieces = _torn(data)
    stamps, lengths = array("d", range(len(pieces))), array("I", map(len, pieces))
    answer = None
    for embeds in (False, True):
        answer = read_answer(Raw(200, RequestFault.NONE, "", stamps, lengths, data, embeds))
        assert len(answer.token_s) <= 1 << 24
    read_answer(Raw(500, RequestFault.NONE, "", stamps, lengths, data, False))
    return answer


def _gateway_to_server(data: bytes) -> object:
    async def exchange() -> CollectedReply:
        upstream, kept, wire = (
            Upstream(Endpoint.parse("http://127.0.0.1:1")),
            CollectedReply(),
            _Wire(),
        )
        connection = _Connection(upstream)
        connection.connection_made(wire)
        task = asyncio.ensure_future(connection.exchange([b""], kept))
        await asyncio.sleep(0)
        for piece in _torn(data):
            if not wire.closed:
                connection.data_received(piece)
        connection.connection_lost(None)
        try:
            await task
        except ConnectionLostError:
            return kept
        kept.json()
        return kept

    return asyncio.run(exchange())


async def _serve(handler: Handler, data: bytes) -> None:
    line = _Wire()
    connection = HttpConnection(handler, Clients(HttpLimits()))
    connection.connection_made(line)
    for piece in _torn(data):
        if not line.closed:
            connection.data_received(piece)
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    connection.connection_lost(None)


def _gateway_to_client(data: bytes) -> object:
    async def answer(request: HttpRequest, reply: Reply) -> None:
        request.json()
        wire(request, Endpoint.parse("http://127.0.0.1:1"))
        respond(reply, b"x", "text/plain")

    return asyncio.run(_serve(answer, data))


def _mock(data: bytes) -> object:
    async def serve() -> None:
        service = Service(MockConfig(), asyncio.get_running_loop())
        await _serve(MockHandler(service, lambda: None).answer, data)

    return asyncio.run(serve())


def targets() -> list[Target]:
    """What comes over a connection, torn as a network might."""
    stream = _EVENT + _EVENT + _LAST
    return [
        Target("chunked body", [_chunked(_EVENT, _LAST)], _chunks),
        Target("event stream", [stream, _WHOLE], _answer),
        Target("answer to the load generator", ANSWERS, _client),
        Target("answer to the gateway", ANSWERS, _gateway_to_server),
        Target("request to the gateway", REQUESTS, _gateway_to_client),
        Target("request to the mock server", REQUESTS, _mock),
    ]
