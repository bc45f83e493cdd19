"""A pass-through before one server that writes the trace of what passes.

Every path, header and byte goes through as it came. One thing is added where a stream would not
tell its tokens: `stream_options.include_usage`, and the event with it is taken out of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from time import perf_counter
from typing import Any, cast

from ....workloads.parsing import parse_json
from ...load_generator.http.endpoint import Endpoint
from ..http.allowed_hosts import AllowedHosts
from ..http.http_server import Clients, Headers, HttpRequest, Ready, Reply, in_thread, refuse, serve
from .captured_rows import EMBEDS, GENERATES, CaptureFile, Exchange
from .replies import Wrapped
from .upstream import ConnectionLostError, UnreachableError, Upstream

_MOST_BYTES = 64 << 20  # of an answer that are kept until it ends
_REFUSALS = (400, 422)  # statuses of servers that know no `stream_options`
_ASKS = ("/completions",)  # ends of paths of which streams tell no usage unasked
_USAGE = b'"usage"'
_FINISHES = (b'"finish_reason":"', b'"finish_reason": "')
_MARKS = (_USAGE, *_FINISHES)
_BLANKS = (b"\n\n", b"\n\r\n")  # after an event
_LAST_REQUESTS_S = 5.0


class Capture:
    """Handler that passes requests to a server and hands what became of them to `CaptureFile`."""

    def __init__(self, endpoint: Endpoint, file: CaptureFile) -> None:
        self._upstream = Upstream(endpoint)
        self._file = file
        self._tells_usage: dict[str, bool] = {}  # by path: whether `stream_options` are known
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, request: HttpRequest, reply: Reply) -> None:
        """Answer one request."""
        generates = request.path.endswith((*GENERATES, EMBEDS))
        if request.method != "POST" or not generates:
            await self._pass(request, reply)
            return
        exchange = Exchange(request, request.received_s or perf_counter())
        self._file.begin_s = min(self._file.begin_s, exchange.arrival_s)
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._tasks.add(task)
        try:
            await self._watch(exchange, reply)
        except BaseException:
            if exchange.outcome == "lost":
                exchange.outcome = "cancelled"
            raise
        finally:
            exchange.end_s = exchange.end_s or perf_counter()
            self._file.write(exchange)
            self._tasks.discard(task)

    async def _watch(self, exchange: Exchange, reply: Reply) -> None:
        request = exchange.request
        tells_usage = self._tells_usage.get(request.path)
        asking = None if tells_usage is False else asking_for_usage(request)
        if asking is None:
            await self._pass(request, _WatchedReply(reply, exchange, asks=False))
            return
        watched = _WatchedReply(reply, exchange, asks=True, retries=tells_usage is None)
        await self._pass(asking, watched)
        if watched.refused:
            exchange.pieces, exchange.stamps = [], exchange.stamps[:0]
            await self._pass(request, _WatchedReply(reply, exchange, asks=False))
        if exchange.status == 200:
            self._tells_usage[request.path] = not watched.refused

    async def _pass(self, request: HttpRequest, reply: Reply) -> None:
        try:
            await self._upstream.exchange(request, reply)
        except (UnreachableError, ConnectionLostError) as error:
            if not reply.begun:
                url = self._upstream.endpoint.url
                refuse(reply, 502, f"slo-bench capture: the server at {url} was lost: {error}")

    async def close(self) -> None:
        """Close the connections, which ends the requests that are under way."""
        self._upstream.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_REQUESTS_S)


@contextlib.contextmanager
def capturing(
    endpoint: Endpoint,
    file: CaptureFile,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    names: tuple[str, ...] | None = None,
) -> Iterator[str]:
    """Pass requests at the yielded address on to a server until the block is left; `names` as of
    `AllowedHosts`.

    Raises:
        SloBenchError: the port is taken.
    """

    async def start(ready: Ready) -> None:
        capture = Capture(endpoint, file)
        try:
            clients = Clients(hosts=AllowedHosts(host, names))
            await serve(capture.answer, host=host, port=port, clients=clients, ready=ready)
        finally:
            await capture.close()

    with in_thread(f"capture at {host}:{port}", start) as server:
        yield server.url


def asking_for_usage(request: HttpRequest) -> HttpRequest | None:
    """The request with `stream_options.include_usage`; None if it needs none, or has its own."""
    if not request.path.endswith(_ASKS) or b'"stream"' not in request.body:
        return None
    body = request.json()
    if body is None or body.get("stream") is not True:
        return None
    options = body.get("stream_options")
    if options is None and b'"stream_options"' not in request.body:
        head, brace, _ = request.body.rstrip().rpartition(b"}")
        content = head + b',"stream_options":{"include_usage":true}' + brace
    elif isinstance(options, dict | None) and not (options or {}).get("include_usage"):
        options = {**(options or {}), "include_usage": True}
        content = json.dumps({**body, "stream_options": options}).encode()
    else:
        return None
    # An answer that is compressed could not be read on its way.
    headers = [(n, v) for n, v in request.headers if n.lower() != b"accept-encoding"]
    return dataclasses.replace(request, body=content, headers=headers)


class _WatchedReply(Wrapped):
    """A `Reply` that passes everything on at once and keeps a copy.

    `asks`: the usage was asked for here, and is taken out. `refused`: the server may have refused
    the request for that alone, and nothing was passed on, so that it can be sent again (`retries`).
    """

    def __init__(
        self, reply: Reply, exchange: Exchange, *, asks: bool, retries: bool = False
    ) -> None:
        super().__init__(reply)
        self.refused = False
        self._exchange = exchange
        self._asks, self._retries = asks, retries
        self._bytes = 0
        self._rest = b""  # of an event that is not whole
        self._held: list[bytes] = []  # last events of choices

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """Store the head and send it."""
        exchange = self._exchange
        exchange.status, exchange.headers = status, headers
        self.refused = self._retries and status in _REFUSALS
        if self.refused:
            return
        if self._asks and status == 200:
            headers = [(n, v) for n, v in headers if n.lower() != b"content-length"]
        self._reply.begin(status, reason, headers)

    def pieces(self, pieces: list[bytes]) -> None:
        """Keep pieces of the body and send them."""
        exchange = self._exchange
        self._bytes += sum(map(len, pieces))
        if self._bytes <= _MOST_BYTES:
            exchange.pieces += pieces
            exchange.stamps.extend([perf_counter()] * len(pieces))
        if self.refused:
            return
        if not self._asks:
            self._reply.pieces(pieces)
            return
        data = b"".join((self._rest, *pieces))
        end = _events_end(data)
        self._rest = data[end:]
        if end and (passed := self._without_usage(data[:end])):
            self._reply.pieces([passed])

    def end(self) -> None:
        """End the answer."""
        self._exchange.end_s = perf_counter()
        self._exchange.outcome = "ok" if self._exchange.status < 400 else "error"
        if self.refused:
            return
        if left := b"".join((*self._held, self._rest)):
            self._reply.pieces([left])
        self._reply.end()

    def _without_usage(self, events: bytes) -> bytes:
        """Whole events without the usage that was asked for.

        The last event of a choice waits for the one behind it: vLLM moves `system_fingerprint` from
        there to the event with the usage.
        """
        if not self._held and not any(mark in events for mark in _MARKS):
            return events
        passed: list[bytes] = []
        while events:
            ends = [events.find(mark) + len(mark) for mark in _BLANKS if mark in events]
            end = min(ends, default=len(events))
            event, events = events[:end], events[end:]
            if any(mark in event for mark in _FINISHES) and _USAGE not in event:
                self._held.append(event)
                continue
            plain, fingerprint = _event_without_usage(event) if _USAGE in event else (event, None)
            if fingerprint is not None:
                self._held = [_with_fingerprint(last, fingerprint) for last in self._held]
            passed += [*self._held, plain]
            self._held = []
        return b"".join(passed)


def _events_end(data: bytes) -> int:
    """Where the last whole server-sent event ends; 0 if none does."""
    return max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _BLANKS)


def _with_fingerprint(event: bytes, moved: str) -> bytes:
    """An event with the field that was moved, if it has none."""
    head, brace, blank = event.rpartition(b"}")
    if not brace or b'"system_fingerprint"' in event:
        return event
    field = b',"system_fingerprint":' + json.dumps(moved).encode()
    return head + field + brace + blank


def _event_without_usage(event: bytes) -> tuple[bytes, str | None]:
    """The event without usage, empty if it has nothing else; and its `system_fingerprint` then."""
    head, data_mark, data = event.partition(b"data:")
    try:
        payload: Any = parse_json(data)
    except ValueError:
        return event, None
    if not isinstance(payload, dict) or "usage" not in payload or head.strip():
        return event, None
    if payload.get("choices") == []:
        fingerprint = payload.get("system_fingerprint")
        return b"", fingerprint if isinstance(fingerprint, str) else None
    if payload["usage"] is None and data.count(b',"usage":null') == 1:
        return event.replace(b',"usage":null', b""), None
    del payload["usage"]
    plain = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
    return head + data_mark + b" " + plain + b"\n\n", None
