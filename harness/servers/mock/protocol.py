"""HTTP on one connection of the mock: requests in, events out."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, cast

import httptools

from ....workloads.parsing import parse_json
from ...core.wire import OFFLOADED
from .config import Fault
from .service import Job, Service, Truth
from .wire import DONE, END_OF_BODY, STREAM_HEAD, Answer, chunked, embedding, error, event, whole

_AT_ONCE = {
    Fault.REFUSED_IN_STREAM: (400, "cannot be served"),
    Fault.OFFLOADED: (503, f"{OFFLOADED} by the policy"),
}
_REFUSALS = {Fault.TOO_MANY: (429, "too many requests"), Fault.BROKEN: (500, "out of order")}


class MockProtocol(asyncio.Protocol):
    """One connection; requests on it come one after another."""

    def __init__(self, service: Service, die: Callable[[], None]) -> None:
        self._service = service
        self._die = die
        self._transport: asyncio.Transport
        self._answering: Streamed | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        found: Any = transport.get_extra_info("socket")
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._request_id = ""

    def abort(self) -> None:
        """Reset the connection."""
        reset(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._answering is not None:
            self._service.cancel(self._answering.job)
            self._answering = None

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        """See `httptools.HttpRequestParser`."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `httptools.HttpRequestParser`."""
        if name.lower() == b"x-request-id":
            self._request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """See `httptools.HttpRequestParser`."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """See `httptools.HttpRequestParser`."""
        method = self._parser.get_method()
        path = self._url.partition(b"?")[0].decode("latin-1")
        body = b"".join(self._body)
        self._body = []
        self._url = b""
        if method == b"GET":
            self._transport.write(self._looked_at(path))
        else:
            self._asked(path, body)
        self._request_id = ""

    def _looked_at(self, path: str) -> bytes:
        service = self._service
        if path == "/health":
            return whole(200, "", "text/plain")
        if path == "/v1/models":
            entry = {"id": service.config.model, "object": "model", "owned_by": "slo-bench"}
            return whole(200, {"object": "list", "data": [entry]})
        if path == "/metrics":
            gauges = {"running": service.running, "waiting": len(service.waiting)}
            lines = [f"vllm:num_requests_{name} {float(n)}" for name, n in gauges.items()]
            return whole(200, "\n".join(lines) + "\n", "text/plain; version=0.0.4")
        if path == "/truth":  # ours: what the measuring is held against
            return whole(200, [dataclasses.asdict(truth) for truth in service.truths])
        return whole(404, error(404, f"no {path} here"))

    def _asked(self, path: str, body: bytes) -> None:
        try:
            asked = parse_json(body)
            if not isinstance(asked, dict):
                raise ValueError("no object")
        except ValueError as problem:
            self._transport.write(whole(400, error(400, f"the body is no JSON object: {problem}")))
            return
        if path not in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            self._transport.write(whole(404, error(404, f"no {path} here")))
            return
        fault = self._service.next_fault()
        refused = _REFUSALS.get(fault) if fault else None
        if fault is Fault.OFFLOADED and not asked.get("stream"):
            refused = _AT_ONCE[fault]
        if refused is not None:
            status, message = refused
            self._transport.write(whole(status, error(status, message)))
            return
        streamed = Streamed(self._transport, asked, path, self._service.arrived, self._die)
        streamed.ended = self._ended
        tokens = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 16)
        truth = Truth(self._request_id, self._received_s, streamed.prompt_tokens)
        streamed.job = Job(streamed, truth, 1 if streamed.embeds else tokens, fault)
        self._answering = streamed
        streamed.begin(self._service.config.model)
        if fault not in _AT_ONCE:
            self._service.submit(streamed.job)

    def _ended(self) -> None:
        self._answering = None


class Streamed:
    """One answer on its way out."""

    job: Job
    ended: Callable[[], None]

    def __init__(
        self,
        transport: asyncio.Transport,
        asked: dict[str, Any],
        path: str,
        number: int,
        die: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._die = die
        self._chat = path == "/v1/chat/completions"
        self.embeds = path == "/v1/embeddings"
        self._streams = bool(asked.get("stream")) and not self.embeds
        self._with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        self._number = number
        given = asked.get("messages") or asked.get("input") or asked.get("prompt") or ""
        self._inputs = len(given) if isinstance(given, list) and _nested(given) else 1
        self.prompt_tokens = _count_tokens(given)

    def begin(self, model: str) -> None:
        """Say what can be said before a token is there."""
        self._model = model
        self._answer = Answer(model, self._number, chat=self._chat)
        self._head = STREAM_HEAD
        if self._streams and self.job.fault in _AT_ONCE:
            self._write(event(error(*_AT_ONCE[self.job.fault])) + DONE)
            self._transport.write(END_OF_BODY)
            self.ended()

    def _write(self, events: bytes) -> None:
        self._transport.write(self._head + chunked(events))
        self._head = b""

    def tokens(self, first: int, count: int) -> None:
        """See `Listener`."""
        if not self._streams:
            return
        events = b""
        if first == 0 and self._chat:
            events = self._answer.role()
        if first == 0 and self.job.fault is Fault.EMPTY_FIRST:
            events += self._answer.empty()
        last = first + count == self.job.output_tokens
        self._write(events + self._answer.tokens(count, last=last))

    def finished(self) -> None:
        """See `Listener`."""
        tokens = self.job.output_tokens
        if self.embeds:
            answer = embedding(self._model, self._inputs, self.prompt_tokens)
            self._transport.write(whole(200, answer))
        elif self._streams:
            end = b"" if self.job.fault is Fault.NO_DONE else DONE
            usage = self._answer.usage(self.prompt_tokens, tokens) if self._with_usage else b""
            if usage + end:
                self._write(usage + end)
            self._transport.write(END_OF_BODY)
        else:
            self._transport.write(whole(200, self._answer.complete(self.prompt_tokens, tokens)))
        self.ended()

    def failed(self, fault: Fault) -> None:
        """See `Listener`."""
        if fault is Fault.MALFORMED:
            self._write(b'data: {"choices": [{"text": \n\n' + DONE)
            self._transport.write(END_OF_BODY)
            self._transport.close()
        elif fault is Fault.CUT:
            self._transport.close()
        elif fault is Fault.RESET:
            reset(self._transport)
        elif fault is Fault.DIE:
            self._die()


def reset(transport: asyncio.Transport) -> None:
    """Close with RST in place of FIN."""
    found: Any = transport.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _nested(given: list[Any]) -> bool:
    return bool(given) and not isinstance(given[0], int)


def _count_tokens(given: Any) -> int:
    """Token ids are counted; of text, each word is a token."""
    if isinstance(given, str):
        return len(given.split())
    if isinstance(given, dict):
        return _count_tokens(given.get("content") or "")
    if isinstance(given, list):
        return sum(1 if isinstance(one, int) else _count_tokens(one) for one in given)
    return 0
