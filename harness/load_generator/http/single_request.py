"""One GET request with limits on the time and the size of its answer; nothing is followed."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping
from typing import Any

from ....workloads.masking import masked_bytes
from .answers import unchunk
from .connection import ConnectionPool, Exchange
from .drive import run_coroutine
from .endpoint import Endpoint
from .faults import RequestFault
from .http_options import request_head
from .odd_answers import decoded


class NoAnswerError(Exception):
    """There is no whole answer; the message says why."""


def get(
    endpoint: Endpoint,
    target: str,
    headers: Mapping[str, str] | None = None,
    *,
    limit_s: float,
    most_bytes: int,
) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a GET request, its secrets masked.

    Args:
        endpoint: the server; no proxy is used, and a redirect is an answer like others.
        target: path and query, as `Endpoint.page` and `Endpoint.target` return them.
        headers: sent as well, in place of our own; names in lower case.
        limit_s: time in seconds from the connection to the last byte.
        most_bytes: largest size of the answer, head included.

    Raises:
        NoAnswerError: no connection, no HTTP, or an answer beyond the limits.
    """
    fields = {"host": endpoint.authority, "user-agent": "slo-bench", **(headers or {})}
    return _answer(endpoint, request_head("GET", target, fields) + b"\r\n", limit_s, most_bytes)


def post(
    endpoint: Endpoint,
    target: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    limit_s: float,
    most_bytes: int,
) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a POST request with a body of JSON, as `get`.

    Raises:
        NoAnswerError: no connection, no HTTP, or an answer beyond the limits.
    """
    content = json.dumps(body).encode()
    fields = {
        "host": endpoint.authority,
        "user-agent": "slo-bench",
        "content-type": "application/json",
        **headers,
        "content-length": str(len(content)),
    }
    request = request_head("POST", target, fields) + b"\r\n" + content
    return _answer(endpoint, request, limit_s, most_bytes)


def _answer(
    endpoint: Endpoint, request: bytes, limit_s: float, most_bytes: int
) -> tuple[int, bytes]:
    exchange = run_coroutine(exchanged(endpoint, request, limit_s, most_bytes))
    if exchange.fault is not RequestFault.NONE:
        raise NoAnswerError(exchange.detail)
    pieces = exchange.pieces
    if exchange.chunked:
        unchunked = unchunk(pieces, exchange.stamps)
        if unchunked.problem or not unchunked.complete:
            raise NoAnswerError(unchunked.problem or "the chunks do not add up")
        pieces = unchunked.pieces
    body = b"".join(pieces)
    plain = decoded(exchange.headers, array("d", [0.0]), array("I", [len(body)]), body)
    if plain.problem:
        raise NoAnswerError(plain.problem)
    return exchange.status, masked_bytes(plain.body)


async def exchanged(
    endpoint: Endpoint, request: bytes, limit_s: float, most_bytes: int
) -> Exchange:
    """Send one request, and return it with its answer or fault.

    Raises:
        NoAnswerError: there was no whole answer in time.
    """
    ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
    pool = ConnectionPool(
        endpoint,
        lambda row: [request],
        lambda exchange: None if ended.done() else ended.set_result(exchange),
        connect_limit_s=limit_s,
    )
    exchange = Exchange(0, 0, 0.0, False, most_bytes=most_bytes)
    try:
        pool.connect(exchange)
        async with asyncio.timeout(limit_s):
            await ended
    except TimeoutError:
        sent = exchange.sent_s == exchange.sent_s
        missing = "whole answer" if sent else "TLS connection" if endpoint.tls else "connection"
        raise NoAnswerError(f"no {missing} within {limit_s:g} s") from None
    finally:
        await pool.close()
    return exchange
