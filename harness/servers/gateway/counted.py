"""An answer that is passed on and kept, to be read when it has ended."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from ...load_generator.http.answers import Raw
from ...load_generator.http.faults import Fault
from .messages import Headers, Reply

_MOST_BYTES = 16 << 20


class Counted:
    """A `Reply` that passes on at once what it is given.

    `whole` gets an answer that has come to its end, unless it is an error or more than is kept; at
    once, for the client may then go away, and nothing waits any more. Times are not in it.
    """

    def __init__(self, reply: Reply, whole: Callable[[Raw], None]) -> None:
        self._reply = reply
        self._whole = whole
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._status = 0

    @property
    def begun(self) -> bool:
        """See `Reply`."""
        return self._reply.begun

    def begin(self, status: int, reason: bytes, headers: Headers) -> None:
        """See `Reply`."""
        self._status = status
        self._reply.begin(status, reason, headers)

    def pieces(self, pieces: list[bytes]) -> None:
        """See `Reply`."""
        self._bytes += sum(map(len, pieces))
        if self._bytes <= _MOST_BYTES:
            self._pieces += pieces
        self._reply.pieces(pieces)

    def end(self) -> None:
        """See `Reply`."""
        self._reply.end()
        if self._status == 200 and self._bytes <= _MOST_BYTES:
            lengths = array("I", map(len, self._pieces))
            stamps = array("d", [0.0]) * len(lengths)
            body = b"".join(self._pieces)
            self._whole(Raw(200, Fault.NONE, "", stamps, lengths, body, embeds=False))

    def comes_from(self, source: asyncio.ReadTransport | None) -> None:
        """See `Reply`."""
        self._reply.comes_from(source)
