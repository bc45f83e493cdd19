"""The HTTP head of each request; with its body all that goes over the wire."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ....workloads.request import RequestType
from ....workloads.workload import Workload
from ...core.wire import PredictedLength
from .bodies import Bodies
from .endpoint import Endpoint
from .options import HttpOptions

REQUEST_ID = "slo-bench-"  # what `x-request-id` begins with; the row follows


class WireRequests:
    """See `drive.Requests`. Holds the API key, so never print one."""

    def __init__(
        self,
        workload: Workload,
        endpoints: Sequence[Endpoint],
        options: HttpOptions,
        bodies: Bodies,
    ) -> None:
        extra = options.header_lines()
        self._values = f'"{options.values_field}":{{'.encode()  # no text has these quotes bare
        self._told: dict[int, bytes] = {}
        self._bodies = bodies
        self._kinds = [RequestType(kind) for kind in workload.request_type.tolist()]
        self._embeds = {kind: not options.api.of(kind).streams for kind in RequestType}
        self._heads = [
            {kind: _head(endpoint, options.api.of(kind).path, extra) for kind in RequestType}
            for endpoint in endpoints
        ]

    def of(self, endpoint: int, row: int) -> list[bytes]:
        """Head and body of a row's request."""
        body = self._bodies[row]
        told = self._told.get(row)
        if told is not None:
            body = body.replace(self._values, self._values + told, 1)
        head = self._heads[endpoint][self._kinds[row]]
        return [head % (row, len(body)), body]

    def tell(self, row: int, told: PredictedLength) -> None:
        """Put a prediction among the values of a row's request."""
        plain = json.dumps(told.to_wire(), separators=(",", ":"))
        self._told[row] = plain[1:-1].encode() + b","  # others follow, always

    def embeds(self, row: int) -> bool:
        """Return True if the request is an embedding request."""
        return self._embeds[self._kinds[row]]


def _head(endpoint: Endpoint, path: str, extra: bytes) -> bytes:
    first = (
        f"POST {endpoint.prefix}{path} HTTP/1.1\r\nhost: {endpoint.authority}\r\n"
        "user-agent: slo-bench\r\naccept: text/event-stream, application/json\r\n"
        "content-type: application/json\r\n"
    )
    fixed = (first.encode("latin-1") + extra).replace(b"%", b"%%")
    return fixed + f"x-request-id: {REQUEST_ID}%d\r\ncontent-length: %d\r\n\r\n".encode()
