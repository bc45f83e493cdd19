"""Requests and answers on their way through: what is passed on, and what is ours to say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ....workloads.parsing import parse_json
from ...load_generator.http.endpoint import Endpoint

Headers = list[tuple[bytes, bytes]]

# These belong to one connection, not to the message (RFC 9110, 7.6.1); lengths are ours to state.
_OF_THE_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate"),
        *(b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"expect", b"host", b"content-length"),
    )
)
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    413: "PayloadTooLarge",
    502: "BadGateway",
    503: "ServiceUnavailable",
}


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Without those of the connection and those that it names as such."""
    headers = list(headers)
    named = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for word in value.split(b",")
    }
    return [(n, v) for n, v in headers if n.lower() not in _OF_THE_CONNECTION | named]


@dataclass(frozen=True)
class Asked:
    """A whole request. `target` is the path with its query."""

    method: str
    target: str
    headers: Headers
    body: bytes = b""

    @property
    def path(self) -> str:
        """Without the query."""
        return self.target.partition("?")[0]

    def json(self) -> dict[str, Any] | None:
        """The body, if it is a JSON object."""
        return _object(self.body)

    def with_json(self, body: Mapping[str, Any]) -> Asked:
        """The same request with another body."""
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        return replace(self, body=text.encode())

    def wire(self, endpoint: Endpoint) -> list[bytes]:
        """The bytes that go to a server."""
        method = "GET" if self.method == "HEAD" else self.method  # we leave the body out ourselves
        lines = [
            f"{method} {endpoint.prefix}{self.target} HTTP/1.1\r\n".encode("latin-1"),
            f"host: {endpoint.authority}\r\n".encode("latin-1"),
            *(b"%b: %b\r\n" % header for header in passed_on(self.headers)),
        ]
        if self.body or method not in ("GET", "DELETE", "OPTIONS"):
            lines.append(b"content-length: %d\r\n" % len(self.body))
        return [b"".join(lines) + b"\r\n", self.body]


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Reply(Protocol):
    """Whoever is answered."""

    @property
    def begun(self) -> bool:
        """The head is out, so that nothing else can be said any more."""
        ...

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """The head of the answer, as the server gave it."""
        ...

    def pieces(self, pieces: list[bytes]) -> None:
        """More of the body."""
        ...

    def end(self) -> None:
        """That was all."""
        ...

    def comes_from(self, source: asyncio.ReadTransport | None) -> None:
        """Whose reading to pause while the pieces cannot be passed on as fast as they come."""
        ...


def say(reply: Reply, status: int, reason: str, content: bytes, content_type: str) -> None:
    """A whole answer of our own."""
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", b"%d" % len(content)),
    ]
    reply.begin(status, reason.encode(), headers)
    reply.pieces([content])
    reply.end()


def refuse(reply: Reply, status: int, message: str) -> None:
    """An error of ours, in the form that OpenAI's clients read."""
    kind = _TYPES[status]
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    say(reply, status, kind, json.dumps(body).encode(), "application/json")


class Kept:
    """A `Reply` that keeps the answer instead of passing it on."""

    def __init__(self) -> None:
        self.begun = False
        self.status = 0
        self.reason = b""
        self.headers: Headers = []
        self._pieces: list[bytes] = []

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """See `Reply`."""
        self.begun = True
        self.status, self.reason, self.headers = status, reason, headers

    def pieces(self, pieces: list[bytes]) -> None:
        """See `Reply`."""
        self._pieces += pieces

    def end(self) -> None:
        """See `Reply`."""

    def comes_from(self, source: asyncio.ReadTransport | None) -> None:
        """See `Reply`."""

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(self._pieces)

    def json(self) -> dict[str, Any]:
        """The body; empty if it is no JSON object."""
        return _object(self.body) or {}

    def pass_on(self, reply: Reply) -> None:
        """Give the kept answer to somebody else."""
        reply.begin(self.status, self.reason, self.headers)
        reply.pieces([self.body])
        reply.end()
