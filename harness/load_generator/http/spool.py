"""The bytes of ended exchanges, kept in a file until the run is over: memory stays small."""

from __future__ import annotations

import tempfile
from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import IO

from .answers import Raw
from .chunks import unchunk
from .exchange import Exchange
from .faults import RequestFault

_IN_MEMORY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Place:
    """Offsets of an exchange's timestamps, lengths and bytes, stored in this order."""

    offset: int
    pieces: int
    body_bytes: int


class Spool:
    """Private temporary file for exchanges; it is deleted when closed."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115
        self._places: dict[int, _Place] = {}
        self._end = 0

    def keep(self, exchange: Exchange) -> None:
        """Move the bytes of an ended exchange out of memory."""
        pieces = exchange.pieces
        if not pieces:
            return
        body = b"".join(pieces)
        record = exchange.stamps.tobytes() + array("I", map(len, pieces)).tobytes() + body
        self._file.write(record)
        self._places[exchange.row] = _Place(self._end, len(pieces), len(body))
        self._end += len(record)
        exchange.pieces = []
        exchange.stamps = array("d")

    def raw(self, exchange: Exchange, *, embeds: bool) -> Raw:
        """Return an exchange with its bytes."""
        stamps, lengths, body = array("d"), array("I"), b""
        fault, detail = exchange.fault, exchange.detail
        place = self._places.get(exchange.row)
        if place is not None:
            self._file.seek(place.offset)
            stamps.frombytes(self._file.read(place.pieces * stamps.itemsize))
            lengths.frombytes(self._file.read(place.pieces * lengths.itemsize))
            body = self._file.read(place.body_bytes)
            self._file.seek(0, 2)
        if exchange.chunked:
            found = unchunk(_apart(body, lengths), stamps)
            stamps, body = found.stamps, b"".join(found.pieces)
            lengths = array("I", map(len, found.pieces))
            if found.problem or (fault is RequestFault.NONE and not found.complete):
                fault, detail = RequestFault.MALFORMED, found.problem or "the chunks do not add up"
        return Raw(exchange.status, fault, detail, stamps, lengths, body, embeds)

    def close(self) -> None:
        """Delete the temporary file."""
        self._file.close()


def _apart(joined: bytes, lengths: array[int]) -> list[bytes]:
    ends = list(accumulate(lengths))
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]
