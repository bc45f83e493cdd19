"""What in a stream is no data (comments, pings, events with an empty text), and what ends it."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Comments, pings and events without data of a stream, with the sizes of their chunks.
_COMMENTS = re.compile(
    rb"(?:(?:[0-9A-Fa-f]++\r\n)?"
    rb"(?::[^\r\n]*+|event: ?ping\r?\n(?:data:[^\r\n]*+)?|data: ?)?[\r\n]++)++"
)
# Events that keep a stream alive in the form of an answer: their text is empty.
_EMPTY_TEXT = re.compile(rb'"delta": ?(?:\{\}|"")|"(?:content|text)": ?(?:""|null)')
_TEXT = re.compile(
    rb'"(?:content|text|reasoning\w*|thinking|arguments|partial_json|delta|refusal|finish_reason)":'
    rb' ?"[^"]|"(?:tool_calls|function_call|token_ids)": ?[\[{]\s*[^\]}\s]|\[DONE\]'
)


def is_comment(piece: bytes) -> bool:
    """Return True for comments and pings alone."""
    return _COMMENTS.fullmatch(piece) is not None


def has_data_since(stamps: Sequence[float], pieces: Sequence[bytes], since_s: float) -> bool:
    """Return True if more has come than what keeps a stream alive."""
    for stamp_s, piece in zip(reversed(stamps), reversed(pieces), strict=True):
        if stamp_s < since_s:
            return False
        if not is_empty(piece):
            return True
    return False


def is_empty(piece: bytes) -> bool:
    """Return True for comments, pings and events with an empty text: no token is in them."""
    if is_comment(piece):
        return True
    return _EMPTY_TEXT.search(piece) is not None and _TEXT.search(piece) is None


def is_end(piece: bytes) -> bool:
    """Return True if a piece ends with the event that ends a stream, and not a text with it."""
    return piece.rstrip().rpartition(b"\n")[2] in (b"data: [DONE]", b"data:[DONE]")
