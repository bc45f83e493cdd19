"""Chunked bodies (RFC 9112, 7.1), taken apart once they are whole: a stream's reads stay cheap."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;|\Z)")


@dataclass
class Unchunked:
    """The chunks, each with the time at which its last byte was there.

    `complete` says that the last chunk came; `problem`, that what came is no chunked body.
    """

    pieces: list[bytes]
    stamps: array[float]
    complete: bool
    problem: str = ""


def unchunk(reads: list[bytes], stamps: array[float]) -> Unchunked:
    """Take apart what has been read so far; `reads[i]` came at `stamps[i]`.

    Of a chunk that is not whole yet, what there is counts.
    """
    raw = b"".join(reads)
    ends = list(accumulate(map(len, reads)))
    found = Unchunked([], array("d"), False)
    at = 0
    while True:
        line_end = raw.find(b"\r\n", at)
        if line_end < 0:
            return found
        said = _SIZE.match(raw, at, line_end)
        if said is None:
            found.problem = f"no chunk size: {raw[at : at + 20]!r}"
            return found
        size = int(said[1], 16)
        start = line_end + 2
        if size == 0:
            # Trailers may come between the last chunk and the empty line.
            found.complete = raw.startswith(b"\r\n", start) or raw.endswith(b"\r\n\r\n")
            return found
        piece = raw[start : start + size]
        if piece:
            found.pieces.append(piece)
            found.stamps.append(stamps[bisect_left(ends, start + len(piece))])
        if len(piece) < size:
            return found
        at = start + size + 2
