"""Prompts as blocks: what a request's prompt begins with, as salted hashes, and never its text.

A server tells how many tokens a prompt has, not where they begin. A prompt is cut into chunks of
four bytes a token of a block (ids of tokens: exactly its tokens), each with a keyed hash of all up
to its end. Chunks that an earlier request had keep their place in tokens; the tokens that are left
are spread over the new chunks by their bytes, and every full block of tokens gets its id in the
chunk in which it ends.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

BYTES_PER_TOKEN = 4
MOST_CHUNKS = 1_000_000  # that are remembered: about 150 MB
_ASSISTANT = b"assistant\0"
_ID_BITS = 62  # so that ids are below the largest that readers take
_USUAL_BYTES = 4_000.0  # of prompts, that count for `BYTES_PER_TOKEN` before there are others


@dataclass(frozen=True)
class PromptText:
    """What a request sends in order: `segments` are messages, or the whole prompt.

    `is_chat`: an answer is a message of its own, else it continues the last segment. `root` are
    names without which nothing is shared (model, cache salt).
    """

    root: bytes
    segments: tuple[bytes, ...]
    is_chat: bool

    def answered(self, content: str, token_ids: Sequence[int], calls_tools: bool) -> PromptText:
        """The prompt of a request that continues this one and its answer, so far."""
        if self.is_chat:
            answer = _message("assistant", content.encode(errors="replace"), calls_tools)
            return PromptText(self.root, (*self.segments, answer), True)
        more = _ids(token_ids) if token_ids else content.encode(errors="replace")
        return PromptText(self.root, (*self.segments[:-1], self.segments[-1] + more), False)


@dataclass(frozen=True)
class Ended:
    """A row whose prompt, or prompt and answer, ends with a chunk."""

    row: int
    end_s: float
    session: int
    prompt_tokens: int
    answered: bool


@dataclass
class _Chunk:
    tokens: float  # of the prompt up to its end
    ids: tuple[int, ...]  # of blocks that end in it
    ended: Ended | None = None


class Context(NamedTuple):
    """Blocks of all up to the end of a prompt, or of its answer."""

    digest: bytes
    tokens: float
    ids: tuple[int, ...]  # of full blocks


class Read(NamedTuple):
    """A prompt that was read: its context, the rows it continues, and whether its tokens were
    estimated.
    """

    context: Context
    tokens: int
    continues: list[Ended]
    is_estimate: bool
    last_digest: bytes  # of the last chunk that later prompts can have too; empty: none


class PromptBlocks:
    """Blocks of prompts by their chunks, the last `MOST_CHUNKS` of them.

    `numbered`: ids count from 0 on; else they are hashes, equal for equal `salt`.
    """

    def __init__(self, block_size: int, salt: bytes, *, numbered: bool) -> None:
        self.block_size = block_size
        self._salt = salt
        self._numbered = numbered
        self._count = 0
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._bytes, self._tokens = _USUAL_BYTES, _USUAL_BYTES / BYTES_PER_TOKEN

    def name(self, text: str) -> bytes:
        """Keyed hash of a name."""
        return self._hash(b"name\0", text.encode(errors="replace"))

    def read(self, text: PromptText, tokens: int | None, before: Context | None = None) -> Read:
        """Blocks of a prompt of so many tokens (None: estimated from its bytes); `before`: of what
        the server puts before it.
        """
        digest, position, ids = before or Context(self._hash(b"root\0", text.root), 0.0, ())
        all_ids, continues, chunks = list(ids), list[Ended](), self._cut(digest, text)
        new: list[_Cut] = []
        for cut in chunks:
            digest = cut.digest
            chunk = None if new else self._chunks.get(digest)
            if chunk is None:
                new.append(cut)
                continue
            self._chunks.move_to_end(digest)
            position = chunk.tokens
            all_ids += chunk.ids
            if chunk.ended is not None and (chunk.ended.answered or cut.before_answer):
                continues.append(chunk.ended)
        new_bytes = sum(cut.size for cut in new)
        is_estimate = tokens is None
        if tokens is None:
            tokens = max(1, round(position + new_bytes * self._tokens / self._bytes))
        elif new_bytes and tokens > position:
            self._bytes += new_bytes
            self._tokens += tokens - position
        per_byte = max(0.0, tokens - position) / new_bytes if new_bytes else 0.0
        full = tokens // self.block_size
        del all_ids[full:]
        for cut in new:
            position = min(position + cut.size * per_byte, tokens)
            ends = min(round(position, 6) // self.block_size, full)
            missing = range(int(ends) - len(all_ids))
            fresh = tuple(self._id(cut.digest, k) for k in missing)
            all_ids += fresh
            self._chunks[cut.digest] = _Chunk(position, fresh)
        while len(self._chunks) > MOST_CHUNKS:
            self._chunks.popitem(last=False)
        all_ids += [self._id(digest, -1 - k) for k in range(full - len(all_ids))]
        whole = text.is_chat or not chunks or chunks[-1].is_full
        last = chunks[-1:] if whole else chunks[-2:-1]
        last_digest = last[0].digest if last else b""
        context = Context(digest, float(tokens), tuple(all_ids))
        return Read(context, tokens, continues, is_estimate, last_digest)

    def partial_id(self, digest: bytes) -> int:
        """Id of a block that is only partly filled, which nothing shares."""
        return self._id(digest, 1 << 20)

    def mark(self, digest: bytes, ended: Ended) -> None:
        """A request ended with a chunk; later ones that have it continue the request."""
        chunk = self._chunks.get(digest)
        if chunk is not None:
            chunk.ended = ended

    def _cut(self, digest: bytes, text: PromptText) -> list[_Cut]:
        size = self.block_size * BYTES_PER_TOKEN
        cuts = []
        for segment, following in zip(text.segments, (*text.segments[1:], b""), strict=True):
            for start in range(0, len(segment), size):
                piece = segment[start : start + size]
                is_last = start + size >= len(segment)
                digest = self._hash(digest + (b"|" if is_last and text.is_chat else b"."), piece)
                answers = is_last and following.startswith(_ASSISTANT)
                cuts.append(_Cut(digest, len(piece), len(piece) == size, answers))
        return cuts

    def _hash(self, before: bytes, piece: bytes) -> bytes:
        # Keyed each time: who knows one hash of a chain cannot try what comes after it.
        return hashlib.blake2b(before + piece, digest_size=8, key=self._salt).digest()

    def _id(self, digest: bytes, index: int) -> int:
        if self._numbered:
            self._count += 1
            return self._count - 1
        hashed = self._hash(digest, index.to_bytes(8, "big", signed=True))
        return int.from_bytes(hashed, "big") >> (64 - _ID_BITS)


class _Cut(NamedTuple):
    digest: bytes
    size: int  # bytes
    is_full: bool
    before_answer: bool  # the next message is an answer


def prompt_text(body: Mapping[str, Any]) -> PromptText | None:
    """What a request's body sends; None if there is nothing, or several prompts."""
    root = json.dumps([body.get("model"), body.get("cache_salt")], default=str).encode()
    prompt = body.get("prompt")
    if prompt is not None:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return PromptText(root, (prompt.encode(errors="replace"),), False)
        if isinstance(prompt, list) and prompt and all(type(part) is int for part in prompt):
            return PromptText(root, (_ids(prompt),), False)
        return None
    segments = tuple(_chat_segments(body))
    return PromptText(root, segments, True) if segments else None


def _chat_segments(body: Mapping[str, Any]) -> Iterator[bytes]:
    """Tools, instructions and messages of a chat, of `/v1/responses` or of `/v1/messages`."""
    tools = body.get("tools")
    if tools:
        yield b"tools\0" + json.dumps(tools, default=str).encode()
    for name in ("system", "instructions"):
        if body.get(name):
            yield _message("system", _content(body[name]))
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        messages = [messages]
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping):
            role, content = str(message.get("role", message.get("type"))), message.get("content")
            if content is None:
                content = message.get("output", message.get("arguments"))
            yield _message(role, _content(content), _calls_tools(message))
        elif isinstance(message, str):
            yield _message("user", _content(message))


def _calls_tools(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return bool(message.get("tool_calls")) or any(
        isinstance(part, Mapping) and part.get("type") == "tool_use" for part in parts
    )


def _message(role: str, content: bytes, calls_tools: bool = False) -> bytes:
    return role.encode(errors="replace") + b"\0" + content + b"\0tools" * calls_tools


def _content(content: object) -> bytes:
    """Text of a message; of an image or another part the hash alone, which is as long for all."""
    if isinstance(content, str):
        return content.encode(errors="replace")
    texts = []
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            texts.append(text.encode(errors="replace"))
        elif isinstance(part, Mapping) and part.get("type") != "tool_use":
            whole = json.dumps(part, default=str).encode()
            texts.append(hashlib.blake2b(whole).hexdigest().encode())
    return b"".join(texts)


def _ids(token_ids: Sequence[int]) -> bytes:
    return (np.array(token_ids, dtype=object) & 0xFFFFFFFF).astype("<u4").tobytes()
