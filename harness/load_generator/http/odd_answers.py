"""What is told of answers that are none of the API: refusals, pages, compression."""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from typing import Any

from ....workloads.parsing import parse_json

_MOST_BYTES = 256 << 20  # of a body, decompressed
_MOST_MESSAGE = 64 << 10
_DECODED = ("gzip", "x-gzip", "deflate")
_NO_CODING = ("", "identity")
_TITLE = re.compile(r"<(title|h1)[^>]*>(.*?)</\1", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^>]*>", re.IGNORECASE | re.DOTALL)
_MESSAGES = ("error", "message", "detail", "errors", "msg", "title", "description", "reason")


@dataclass
class Decoded:
    """A body without its compression, in pieces that came at `stamps`; `problem`: why not."""

    stamps: array[float]
    lengths: array[int]
    body: bytes
    problem: str = ""


def decoded(
    headers: Mapping[str, str], stamps: array[float], lengths: array[int], body: bytes
) -> Decoded:
    """Return the pieces of a body without the compression that its headers name."""
    coding = headers.get("content-encoding", "").lower()
    if coding in _NO_CODING:
        return Decoded(stamps, lengths, body)
    if coding not in _DECODED:
        why = f"the answer is compressed ({coding}), though none was asked for"
        return Decoded(stamps, lengths, body, why)
    # Some servers mean by deflate the format without a head.
    is_bare = coding == "deflate" and not _has_zlib_head(body)
    inflate = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS | 32)
    plain, times_s, room, position = [], array("d"), _MOST_BYTES, 0
    try:
        for time_s, length in zip(stamps, lengths, strict=True):
            piece = inflate.decompress(body[position : position + length], room)
            position += length
            room -= len(piece)
            if room <= 0 or inflate.unconsumed_tail:
                raise zlib.error("too long")
            if piece:
                plain.append(piece)
                times_s.append(time_s)
    except zlib.error as error:
        return Decoded(stamps, lengths, body, f"the answer is no {coding}: {error}")
    return Decoded(times_s, array("I", map(len, plain)), b"".join(plain))


def _has_zlib_head(body: bytes) -> bool:
    head = int.from_bytes(body[:2], "big")
    return head >> 8 & 15 == zlib.DEFLATED and head % 31 == 0  # RFC 1950, 2.2


def is_page(headers: Mapping[str, str], body: bytes) -> bool:
    """Return True if a page for people came in place of an answer."""
    start = body[:200].lstrip().lower()
    return start.startswith((b"<!doctype html", b"<html")) or (
        headers.get("content-type", "").lower().startswith("text/html") and b"data:" not in body
    )


def not_streamed_kind(headers: Mapping[str, str], body: bytes) -> str:
    """Return the kind of an answer that is neither events nor an object; empty if it is one."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return "" if body.startswith((b"{", b"data:", b"event:", b":")) else kind
    return "" if kind in ("", "text/event-stream") else kind


def message_of(body: bytes) -> str:
    """Return the message in the body of an error, whatever its form."""
    try:
        reply: Any = parse_json(body)
    except ValueError:
        return _plain_text(body[:_MOST_MESSAGE].decode(errors="replace"))
    places = ""
    while isinstance(reply, dict | list):
        if isinstance(reply, list):  # of one or several problems, as FastAPI returns them
            if not reply or not isinstance(reply[0], dict | str):
                return str(reply)
            reply = reply[0]
            continue
        if isinstance(location := reply.get("loc"), list):
            places = ".".join(map(str, location)) + ": "
        reply = next((reply[name] for name in _MESSAGES if reply.get(name)), str(reply))
    return f"{places}{reply}"


def code_of(body: bytes) -> int:
    """Return the HTTP status that an error within a stream names; 0 without one."""
    try:
        reply: Any = parse_json(body)
    except ValueError:
        return 0
    error = reply.get("error") if isinstance(reply, dict) else None
    fields = error if isinstance(error, dict) else reply if isinstance(reply, dict) else {}
    kind = f"{fields.get('type', '')} {fields.get('code', '')}".lower()
    if "overloaded" in kind:
        return 529
    if "rate_limit" in kind or "too_many_requests" in kind:
        return 429
    code = fields.get("code") or fields.get("status")
    try:
        return int(str(code))
    except ValueError:
        return 0


def after_status(headers: Mapping[str, str]) -> str:
    """Return what the headers of a refusal say: when to come again, where to go."""
    clauses = ""
    if wait := headers.get("retry-after"):
        clauses += f" (retry-after: {wait}{' s' if wait.isdecimal() else ''})"
    if there := headers.get("location"):
        clauses += f" (redirected to {there}; redirects are not followed, give that address)"
    return clauses


def _plain_text(text: str) -> str:
    """The title of a page and what stands on it, or a text as it is."""
    if "<" not in text:
        return text
    title = _TITLE.search(text)
    words = " ".join(unescape(_TAG.sub(" ", title[2] if title else text)).split())
    return words or text
