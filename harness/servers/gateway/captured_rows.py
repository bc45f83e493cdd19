"""Rows of a capture, a JSON object a line for `workloads.readers.tables`, never content."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....workloads.errors import SloBenchError
from ...load_generator.http.answers import CompletionResult, Raw, read_answer
from ...load_generator.http.faults import RequestFault
from ..http.http_server import Headers, HttpRequest
from .captured_prompts import Context, Ended, PromptBlocks, Read, prompt_text

GENERATES = ("/completions", "/responses", "/messages")  # ends of paths
EMBEDS = "/embeddings"
_MOST_REMEMBERED = 100_000  # sessions, and answers by their ids
_SESSION_HEADERS = (
    *("x-session-id", "session-id", "session_id", "x-session-affinity", "x-conversation-id"),
    *("x-litellm-session-id", "x-claude-code-session-id", "helicone-session-id", "x-thread-id"),
)
_SESSION_FIELDS = ("session_id", "conversation_id", "conversation", "thread_id", "prompt_cache_key")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,200})"')
# What a replay needs; the others tell of the server and its clients.
_SHARED = (
    *("arrival_s", "request_type", "prompt_tokens", "output_tokens", "max_output_tokens"),
    *("num_inputs", "model", "session", "follows", "think_s", "hash_ids", "answer_hash_ids"),
    *("outcome", "stream", "estimated"),
)


@dataclass
class Exchange:
    """A request and what came of it. Times are those of `time.perf_counter`.

    `outcome`: ok, cancelled (by the client), lost (the server went away), error.
    """

    request: HttpRequest
    arrival_s: float
    pieces: list[bytes] = field(default_factory=list)
    stamps: array[float] = field(default_factory=lambda: array("d"))
    status: int = 0
    headers: Headers = field(default_factory=list)
    end_s: float = 0.0
    outcome: str = "lost"

    def answer(self, most_tokens: int | None, *, embeds: bool) -> CompletionResult:
        """What the server answered, as far as it came; `most_tokens` were allowed."""
        fault = RequestFault.NONE if self.outcome == "ok" else RequestFault.CUT
        body = b"".join(self.pieces)
        stamps, lengths = self.stamps, array("I", map(len, self.pieces))
        if not stamps:
            stamps, lengths = array("d", [self.end_s]), array("I", [0])
        headers = {name.decode("latin-1").lower(): v.decode("latin-1") for name, v in self.headers}
        encoding = {k: v for k, v in headers.items() if k == "content-encoding"}
        raw = Raw(
            *(self.status, fault, "", stamps, lengths, body, embeds, most_tokens), headers=encoding
        )
        return read_answer(raw, keep_text=True)


class CaptureFile:
    """Appends a row for each request that ended; a process that is killed leaves whole rows.

    Raises:
        SloBenchError: the file cannot be made, or there is one of its name.
    """

    def __init__(self, path: Path, blocks: PromptBlocks, *, share: bool) -> None:
        self.path = path
        self.outcomes: Counter[str] = Counter()
        self.lost: list[str] = []  # why rows could not be written
        self._writer = ThreadPoolExecutor(1, "capture")  # so that hashing delays no stream
        self._blocks = blocks
        self._share = share
        self._rows = 0
        self.begin_s = math.inf  # when the first request arrived, which may be the last to end
        self._models: dict[str, str] = {}
        self._sessions: OrderedDict[bytes, int] = OrderedDict()
        self._responses: OrderedDict[bytes, tuple[Context, Ended]] = OrderedDict()
        self._next_session = itertools.count()
        try:
            if path.exists():
                raise SloBenchError(f"{path} is there already: name another with --out")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise SloBenchError(f"cannot write {path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Write the rows that wait, and close the file."""
        self._writer.shutdown()
        os.close(self._file)

    def write(self, exchange: Exchange) -> None:
        """Append the row of a request that ended, in a thread; none once it is closed."""
        with contextlib.suppress(RuntimeError):
            self._writer.submit(self._append, exchange)

    def _append(self, exchange: Exchange) -> None:
        try:
            row = self._row(exchange)
            line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
            if (written := os.write(self._file, line)) < len(line):  # the disk is full
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError(f"only {written:,} of {len(line):,} bytes could be written")
        except Exception as error:  # whatever it is: the clients are served
            self.lost.append(f"{type(error).__name__}: {error}")
            return
        self._rows += 1
        self.outcomes[exchange.outcome] += 1

    def _row(self, exchange: Exchange) -> dict[str, Any]:
        request = exchange.request
        body = request.json() or {}
        embeds = request.path.endswith(EMBEDS)
        most_tokens = next((body[n] for n in _LIMITS if _is_count(body.get(n))), None)
        answer = exchange.answer(most_tokens, embeds=embeds)
        if exchange.outcome == "ok" and answer.fault is not RequestFault.NONE:
            exchange.outcome = "error"
        row: dict[str, Any] = {
            "arrival_s": round(max(exchange.arrival_s - self.begin_s, 0.0), 6),
            "request_type": "embed" if embeds else "generate",
            "outcome": exchange.outcome,
            "http_status": exchange.status,
            "path": _api(request.path),
            "model": self._model(body),
            "stream": bool(body.get("stream")),
            "max_output_tokens": most_tokens,
            "follows": -1,
            "think_s": 0.0,
        }
        self._add_tokens(row, exchange, body, answer, embeds)
        if exchange.stamps:
            row["first_byte_s"] = round(exchange.stamps[0] - exchange.arrival_s, 6)
        row["whole_s"] = round(exchange.end_s - exchange.arrival_s, 6)
        return {k: row[k] for k in _SHARED if k in row} if self._share else row

    def _model(self, body: Mapping[str, Any]) -> str:
        name = body.get("model")
        if not isinstance(name, str):
            return ""
        if not self._share:
            return name
        return self._models.setdefault(name, f"model-{len(self._models) + 1}")

    def _add_tokens(
        self,
        row: dict[str, Any],
        exchange: Exchange,
        body: Mapping[str, Any],
        answer: CompletionResult,
        embeds: bool,
    ) -> None:
        """Add lengths, the session and blocks of the prompt and the answer."""
        estimated = []
        output = answer.completion_tokens
        if output < 0 or answer.refuted:
            output = len(answer.token_s)
            if output and not embeds:
                estimated.append("output_tokens")
        if embeds:
            output = int(exchange.outcome == "ok")
            inputs = body.get("input")
            is_list = isinstance(inputs, list) and bool(inputs) and not isinstance(inputs[0], int)
            row["num_inputs"] = len(inputs) if is_list and inputs is not None else 1
        text = None if embeds else prompt_text(body)
        tokens = answer.prompt_tokens if answer.prompt_tokens > 0 else None
        before = self._before(body)
        if text is None:
            row |= {"prompt_tokens": tokens or 1, "hash_ids": [], "answer_hash_ids": []}
            estimated += ["prompt_tokens"] * (tokens is None)
            self._add_session(row, exchange, body, (), before)
        else:
            prompt = self._blocks.read(text, tokens, None if before is None else before[0])
            estimated += ["prompt_tokens"] * prompt.is_estimate
            row["prompt_tokens"] = prompt.tokens
            hash_ids = list(prompt.context.ids)
            if prompt.tokens % self._blocks.block_size:
                hash_ids.append(self._blocks.partial_id(prompt.context.digest))
            row["hash_ids"] = hash_ids
            session = self._add_session(row, exchange, body, prompt.continues, before)
            calls_tools = answer.finish in ("tool_calls", "tool_use")
            shown = answer.content or calls_tools or answer.token_ids
            # Reasoning is not in later prompts, whose blocks then end with the prompt.
            is_whole = answer.text == answer.content or calls_tools
            ended = (self._rows, exchange.end_s, session, prompt.tokens)
            if exchange.outcome == "ok" and output:
                self._blocks.mark(prompt.last_digest, Ended(*ended, answered=False))
            row["answer_hash_ids"] = []
            if exchange.outcome == "ok" and output and shown and is_whole:
                more = text.answered(answer.content, answer.token_ids, calls_tools)
                with_answer = self._blocks.read(
                    more, prompt.tokens + output, None if before is None else before[0]
                )
                full = prompt.tokens // self._blocks.block_size
                row["answer_hash_ids"] = list(with_answer.context.ids[full:])
                if with_answer.last_digest != prompt.last_digest:
                    self._blocks.mark(with_answer.last_digest, Ended(*ended, answered=True))
                self._remember(exchange, with_answer, Ended(*ended, answered=True))
        row["output_tokens"] = output
        if answer.cached_tokens >= 0:
            row["cached_tokens"] = answer.cached_tokens
        if estimated:
            row["estimated"] = " ".join(estimated)

    def _before(self, body: Mapping[str, Any]) -> tuple[Context, Ended] | None:
        """Context of the response that a request continues by its id."""
        previous = body.get("previous_response_id")
        if not isinstance(previous, str):
            return None
        return self._responses.get(self._blocks.name(previous))

    def _remember(self, exchange: Exchange, read: Read, ended: Ended) -> None:
        match = None
        if exchange.request.path.endswith("/responses"):
            match = _RESPONSE_ID.search(b"".join(exchange.pieces[:64]))
        if match is not None:
            name = self._blocks.name(match[1].decode(errors="replace"))
            self._responses[name] = (read.context, ended)
            if len(self._responses) > _MOST_REMEMBERED:
                self._responses.popitem(last=False)

    def _add_session(
        self,
        row: dict[str, Any],
        exchange: Exchange,
        body: Mapping[str, Any],
        continues: Sequence[Ended],
        before: tuple[Context, Ended] | None,
    ) -> int:
        """Add the session of a request, by what it was recognised, and the row that it follows."""
        rows = [*continues, *([] if before is None else [before[1]])]
        previous = next(
            (
                ended
                for ended in reversed(rows)
                if ended.end_s <= exchange.arrival_s and ended.prompt_tokens < row["prompt_tokens"]
            ),
            None,
        )
        if previous is not None:
            row["follows"] = previous.row
            row["think_s"] = round(exchange.arrival_s - previous.end_s, 6)
        by, name = _session_name(exchange.request, body)
        if not name and previous is not None:
            session, by = previous.session, "previous_response_id" if before else "prompt"
        elif name or (isinstance(body.get("user"), str) and body["user"]):
            by, name = (by, name) if name else ("user", str(body["user"]))
            session = self._session(self._blocks.name(f"{by}\0{name}"))
        else:
            session, by = next(self._next_session), ""
        row["session"] = session
        if by:
            row["session_by"] = by
        return session

    def _session(self, key: bytes) -> int:
        session = self._sessions.pop(key, None)
        self._sessions[key] = session = next(self._next_session) if session is None else session
        if len(self._sessions) > _MOST_REMEMBERED:
            self._sessions.popitem(last=False)
        return session


def _session_name(request: HttpRequest, body: Mapping[str, Any]) -> tuple[str, str]:
    """By what a request names its session, and the name; both empty if it does not."""
    headers = {name.lower().decode("latin-1"): value for name, value in request.headers}
    for header in _SESSION_HEADERS:
        if headers.get(header):
            return header, headers[header].decode("latin-1")
    metadata = body.get("metadata")
    for source in (body, metadata if isinstance(metadata, Mapping) else {}):
        for name in _SESSION_FIELDS:
            value = source.get(name)
            if isinstance(value, Mapping):  # `conversation: {"id": …}` of /v1/responses
                value = value.get("id")
            if isinstance(value, str) and value:
                return name, value
    return "", ""


def _api(path: str) -> str:
    """The path from its last version on: what is before it may be a key or a name."""
    version = path.rfind("/v1/")
    end_of_path = next(end for end in (*GENERATES, EMBEDS) if path.endswith(end))
    return path[version:] if version >= 0 else end_of_path


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31
