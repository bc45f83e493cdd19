"""What clients may take of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpLimits:
    """What clients may take of a server. None: no limit."""

    body_bytes: int = 256 << 20  # of a request
    bodies_bytes: int = 4 << 30  # of all requests that are not answered
    connections: int = 10_000  # at a time
    request_s: float = 120.0  # from the first byte of a request to its last
    idle_s: float | None = 600.0  # of a connection between two requests
    first_byte_s: float | None = 600.0  # from a whole request to the first byte of its answer


DEFAULT_LIMITS = HttpLimits()
