"""One GET request with limits on the time and the size of its answer; nothing is followed."""

from __future__ import annotations

import asyncio
import ssl

from .answers import unchunk
from .connection import ConnectionPool, Exchange
from .drive import run_coroutine
from .endpoint import Endpoint
from .faults import RequestFault


class NoAnswerError(Exception):
    """There is no whole answer; the message says why."""


def get(
    endpoint: Endpoint, path: str, headers: bytes = b"", *, limit_s: float, most_bytes: int
) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a GET request, as the server sent it.

    Args:
        endpoint: the server; no proxy is used, and a redirect is an answer like others.
        path: path after the endpoint's prefix.
        headers: lines that end with CRLF, sent as well.
        limit_s: time in seconds from the connection to the last byte.
        most_bytes: largest size of the answer, head included.

    Raises:
        NoAnswerError: no connection, no HTTP, or an answer beyond the limits.
    """
    return run_coroutine(_get(endpoint, path, headers, limit_s, most_bytes))


async def _get(
    endpoint: Endpoint, path: str, headers: bytes, limit_s: float, most_bytes: int
) -> tuple[int, bytes]:
    head = f"GET {endpoint.prefix}{path} HTTP/1.1\r\nhost: {endpoint.authority}\r\n"
    request = head.encode("latin-1") + b"user-agent: slo-bench\r\n" + headers + b"\r\n"
    ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
    pool = ConnectionPool(
        endpoint,
        lambda row: [request],
        lambda exchange: None if ended.done() else ended.set_result(exchange),
        connect_limit_s=limit_s,
        tls=ssl.create_default_context() if endpoint.tls else None,
    )
    exchange = Exchange(0, 0, 0.0, False, most_bytes=most_bytes)
    try:
        pool.connect(exchange)
        async with asyncio.timeout(limit_s):
            await ended
    except TimeoutError:
        raise NoAnswerError(f"no whole answer within {limit_s:g} s") from None
    finally:
        await pool.close()
    if exchange.fault is not RequestFault.NONE:
        raise NoAnswerError(exchange.detail)
    pieces = exchange.pieces
    if exchange.chunked:
        unchunked = unchunk(pieces, exchange.stamps)
        if unchunked.problem or not unchunked.complete:
            raise NoAnswerError(unchunked.problem or "the chunks do not add up")
        pieces = unchunked.pieces
    return exchange.status, b"".join(pieces)
