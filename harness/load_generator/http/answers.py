"""Parses the bytes of an answer into events, after the run; `token_counts` counts their tokens."""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, islice, pairwise, repeat
from operator import and_
from typing import Any, NamedTuple, cast

from ....workloads.masking import masked
from ....workloads.parsing import parse_event
from ...core.records.request_records import Outcome
from ...core.wire import DROPPED, REJECTED
from .api_events import as_chat
from .event_shapes import Run, Shape, SharedShapes, chunk_head, without_names
from .faults import RequestFault, outcome_of
from .odd_answers import after_status, code_of, decoded, is_page, message_of, not_streamed_kind
from .token_counts import Shown, TokenEvents, shown

_decode = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_MOST_SIZE_BYTES = 20  # of the line before a chunk; longer ones are taken apart elsewhere
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;|\Z)")
_DATA = re.compile(rb"data:[ ]?([^\r\n]*)\r?\n")
_FAILED = re.compile(rb"^event:[ ]?error[ ]*\r?$", re.MULTILINE)
_LINE_ENDS = b"\r\n"
_MOST_TOGETHER_BYTES = 16 << 10  # of events that are compared at once
_MOST_UNLIKE = 8  # shapes in a row that no other event has: no more are tried
_MOST_MISSED = 8  # chunks of a known shape that are not read as such
_MOST_PLAIN = 1 << 10  # events that are remembered, but for their ids
_MOST_PLAIN_BYTES = 1 << 10  # of each
_MOST_SHOWN_BYTES = 80  # of an event in a message
_MARK = "\ufeff".encode()  # before the first event, it is part of none
_NO_ENDS = (  # finish reasons of answers that are not whole
    *("error", "failed", "timeout", "content_filter", "network_error", "server_error"),
    *("insufficient_system_resource", "sensitive"),
)
# How a connection may end after the answer's own end: gateways leave the last chunk out.
_AFTER_END = (RequestFault.CUT, RequestFault.RESET, RequestFault.STALLED, RequestFault.TIME_LIMIT)
_ABORTED = ("abort", "aborted", "cancelled", "canceled")
_DETAIL_CHARACTERS = 200
_MOST_TOKENS = 1 << 24  # more than any context holds
_MOST_DIGITS = 20  # of a count that is a text
_LONE_CR = re.compile(rb"\r(?!\n)")  # which ends a line of events as well


@dataclass
class CompletionResult:
    """Result of one request; `token_s` are clock times, one per token."""

    outcome: Outcome
    fault: RequestFault
    detail: str
    token_s: array[float] = field(default_factory=lambda: array("d"))
    sequences: list[array[float]] = field(default_factory=list)  # of each choice, if several
    chunks: int = 0  # events that brought tokens
    untimed_tokens: float = 0  # that take no part in TPOT, see `token_counts.Counted`
    unsure: bool = False  # whether the number of tokens is not known
    surplus: bool = False  # whether there are more than the request allows
    refuted: bool = False  # whether the usage is no count, too low, or counts the prompt as well
    silent: bool = False  # whether it opened long before it showed something
    prompt_tokens: int = -1  # from the server's usage; -1: unknown
    completion_tokens: int = -1
    cached_tokens: int = -1
    text: str = ""  # all texts, those of reasoning included; empty if they were not kept
    content: str = ""  # the answer alone; empty if it was not kept
    token_ids: list[int] = field(default_factory=list)  # likewise, where the server returns them
    finish: str = ""  # `finish_reason` of the server
    refused_as: int = 0  # the status that an error within a stream names


@dataclass
class Raw:
    """Raw bytes and timestamps of one exchange. If `chunked`, the pieces are reads of a chunked
    body, and hold what frames the chunks.
    """

    status: int
    fault: RequestFault
    detail: str
    stamps: array[float]
    lengths: array[int]  # of the pieces
    body: bytes
    embeds: bool
    most_tokens: int | None = None  # `max_tokens` of the request; None: unknown
    chunked: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)  # of the answer, if it is no stream
    hides: bool = False  # whether the request asks for reasoning not to be shown


def read_answer(raw: Raw, *, keep_text: bool = False) -> CompletionResult:
    """Parse the bytes of one answer."""
    if raw.chunked:
        reader = _Reader(raw, keep_text)
        if reader.read_chunks():
            return _judged(reader.answer, raw)
        raw = _without_chunks(raw)
    raw = _without_compression(raw)
    if b"\r\r" in raw.body or b"\rdata:" in raw.body:
        raw = replace(raw, body=_LONE_CR.sub(b"\n", raw.body))
    reader = _Reader(raw, keep_text)
    answer = reader.answer
    if raw.fault is RequestFault.NONE and raw.status != 200:
        answer.fault, answer.detail = _error(RequestFault.STATUS, raw.body)
        if answer.fault is RequestFault.STATUS:
            message = answer.detail.strip() or "no message"
            answer.detail = f"{raw.status}{after_status(raw.headers)}: {message}"
    elif raw.status == 200 and raw.fault is RequestFault.NONE and is_page(raw.headers, raw.body):
        answer.fault = RequestFault.MALFORMED
        answer.detail = f"a page (text/html) came in place of an answer: {message_of(raw.body)}"
    elif raw.status == 200:
        stripped = raw.body.lstrip()
        if stripped.startswith(b"{"):
            reader.read_whole(stripped)
        else:
            reader.read_stream()
        if answer.fault in (RequestFault.CUT, RequestFault.EMPTY):
            _tell_kind(answer, raw, stripped)
    return _judged(answer, raw)


def _tell_kind(answer: CompletionResult, raw: Raw, body: bytes) -> None:
    """Say of an answer that has no token what it is, if it is neither events nor an object."""
    if not body:
        answer.detail = "status 200 with an empty body"
    elif kind := not_streamed_kind(raw.headers, body):
        answer.fault = RequestFault.MALFORMED
        answer.detail = f"{kind} came in place of an answer: {message_of(raw.body)}"


def _without_compression(raw: Raw) -> Raw:
    """Decompress a body, which nobody asked to be compressed."""
    if "content-encoding" not in raw.headers:
        return raw
    plain = decoded(raw.headers, raw.stamps, raw.lengths, raw.body)
    if plain.problem and raw.fault is RequestFault.NONE:
        return replace(raw, fault=RequestFault.MALFORMED, detail=plain.problem, body=b"")
    return replace(raw, stamps=plain.stamps, lengths=plain.lengths, body=plain.body)


def _judged(answer: CompletionResult, raw: Raw) -> CompletionResult:
    """Say how an answer ended. What it says itself is kept, and is masked here."""
    answer.detail = masked(" ".join(answer.detail.split()))[:_DETAIL_CHARACTERS]
    answer.text, answer.content = masked(answer.text), masked(answer.content)
    answer.finish = masked(answer.finish)
    refused = answer.detail.startswith(REJECTED)
    status = answer.refused_as or raw.status
    answer.outcome = outcome_of(answer.fault, status, refused=refused)
    return answer


def _without_chunks(raw: Raw) -> Raw:
    """Take a chunked body apart."""
    ends = accumulate(raw.lengths, initial=0)
    unchunked = unchunk([raw.body[start:end] for start, end in pairwise(ends)], raw.stamps)
    fault, detail = raw.fault, raw.detail
    if unchunked.problem or (fault is RequestFault.NONE and not unchunked.complete):
        fault, detail = RequestFault.MALFORMED, unchunked.problem or "the chunks do not add up"
    lengths, body = array("I", map(len, unchunked.pieces)), b"".join(unchunked.pieces)
    return replace(
        raw,
        fault=fault,
        detail=detail,
        stamps=unchunked.stamps,
        lengths=lengths,
        body=body,
        chunked=False,
    )


def _error(fault: RequestFault, body: bytes) -> tuple[RequestFault, str]:
    """Return the fault and outcome of an error message; a request that a policy dropped also
    ends with one.
    """
    message = message_of(body)
    return (RequestFault.ABORTED if message.startswith((REJECTED, DROPPED)) else fault), message


class _Said(NamedTuple):
    """What a choice of an event says. `counts`: it may have brought tokens."""

    choice: Mapping[str, Any]
    shown: Shown
    number: int
    finish: str
    stop: str
    counts: bool


_NOTHING = Shown("", "", 0, -1, False)


class _PlainEvent(NamedTuple):
    """An event without a fault, in the form of a chat's."""

    payload: Mapping[str, Any]
    messages: Sequence[_Said]


class _Reader:
    """Parser of the events of one answer."""

    def __init__(self, raw: Raw, keep_text: bool) -> None:
        self.answer = CompletionResult(Outcome.UNFINISHED, raw.fault, raw.detail)
        self._raw = raw
        self._keep_text = keep_text
        self._events = TokenEvents()
        self._hidden_tokens = 0  # reasoning, by the usage
        self._whole = -1  # `total_tokens` of the usage
        self._absurd = ""
        self._no_count = False  # whether a usage has no number of tokens where one should be
        self._texts: list[str] = []
        self._contents: list[str] = []
        self._done = False
        self._has_deltas = False
        self._finish = ""
        self._stop = ""
        self._shape: Shape | None = None
        self._unlike = 0  # shapes since the last event that had one

    def read_whole(self, body: bytes) -> None:
        """Read an answer that is one JSON object: embeddings, or a server that does not stream."""
        raw, answer = self._raw, self.answer
        try:
            reply = parse_event(body)
        except ValueError as error:
            kind = not_streamed_kind(raw.headers, body)
            detail = f"{kind} came in place of an answer: {message_of(body)}" if kind else ""
            self._fault(RequestFault.MALFORMED, detail or f"no JSON: {error}")
            return
        if _is_error(reply):
            self._error_event(body)
            return
        last_s = raw.stamps[-1]
        if raw.embeds:
            self._usage(reply)
            if not reply.get("data"):
                self._fault(RequestFault.EMPTY, "no embedding in the answer")
            else:
                answer.token_s.append(last_s)
            return
        for chunk in as_chat(reply):
            if _is_error(chunk):
                self._error_event(json.dumps(chunk).encode())
                return
            choices = _choices(chunk)
            if choices is None:
                self._fault(RequestFault.MALFORMED, "choices are no list of objects")
                return
            for message in _said_by(choices):
                self._choice(message, last_s)
            self._usage(chunk)
        self._done = True
        self._settle()

    def read_chunks(self) -> bool:
        """Read server-sent events from a chunked body in which each chunk holds whole events.

        False: it is none, or it has a fault; nothing may be used of what was read.
        """
        raw, body = self._raw, self._raw.body
        if raw.fault is not RequestFault.NONE or raw.status != 200 or raw.embeds:
            return False
        stamps, lengths, times_s = raw.stamps, raw.lengths.tolist(), self._events.times_s
        ends = list(accumulate(lengths))
        position = like = missed = 0
        together = _MOST_TOGETHER_BYTES
        shared = _shared[self._keep_text]
        while True:
            line_end = body.find(_LINE_ENDS, position, position + _MOST_SIZE_BYTES)
            size_line = _SIZE.match(body, position, line_end) if line_end > 0 else None
            if size_line is None:
                return False
            start, size = line_end + 2, int(size_line[1], 16)
            if size == 0:
                if body[start:] != _LINE_ENDS:
                    return False
                self._settle()
                return True
            end = start + size
            if body[end - 1 : end + 2] != b"\n\r\n":
                return False
            k = bisect_left(ends, end)
            shape = self._shape
            if shape is None or not body.startswith(shape.before, start):
                shape = shared.of(body, start, end)
                self._shape = shape or self._shape
            if shape is not None:
                if body.startswith(shape.after, end - len(shape.after)):
                    run = shape.chunks(body, position, position + together)
                    n = len(run.lengths)
                    if n:
                        self._take(run, shape)
                        if (
                            ends[k] - position == run.lengths[0]
                            and lengths[k : k + n] == run.lengths
                        ):
                            times_s.extend(stamps[k : k + n])  # as a rule a read is a chunk
                        else:
                            data_ends = islice(
                                accumulate(run.lengths, initial=position - 2), 1, None
                            )
                            places = map(bisect_left, repeat(ends), data_ends)
                            times_s.extend(map(stamps.__getitem__, places))
                        size = sum(run.lengths)
                        position += size
                        together = min(2 * size, _MOST_TOGETHER_BYTES)
                        like += n
                        continue
                missed += 1
                if missed > _MOST_MISSED and missed > like:  # chunks of several events
                    return False
            if position == 0 and body[start:end].lstrip()[:1] in (b"", b"{", _MARK[:1]):
                return False
            if body.find(b"event:", start, end) >= 0:  # of an error, perhaps; no shape has it
                return False
            if not self._events_of(start, end, stamps[k]):
                return False
            position = end + 2
            together = max(together, 2 * (size + _MOST_SIZE_BYTES))

    def _events_of(self, position: int, until: int, time_s: float) -> bool:
        """Read the events of a chunk; False ends the reading."""
        body = self._raw.body
        for match in _DATA.finditer(body, position, until):
            start, end = match.span()
            if body[start - 1] not in _LINE_ENDS:  # within a comment or another field
                continue
            if start < position:  # a line of the event before
                continue
            data = match[1]
            if body.startswith(b"data:", end):
                data, end = _whole_data(body, match)
            end += _blank(body, end)
            if not self._event(data, body[position:end], match.start(1) - position, time_s):
                return False
            position = end
        return True

    def read_stream(self) -> None:
        """Read server-sent events; the time of an event is that of its last byte."""
        raw, body = self._raw, self._raw.body
        stamps, ends, times_s = raw.stamps, list(accumulate(raw.lengths)), self._events.times_s
        failed = _FAILED.search(body) if b"event:" in body else None
        until = len(body) if failed is None else _event_start(body, failed.start())
        position = together = 0
        first = len(_MARK) if body.startswith(_MARK) else 0
        while position < until:
            shape = self._shape
            if shape is not None and body.startswith(shape.before, position):
                run = shape.events(body, position, min(until, position + together))
                if run.lengths:
                    self._take(run, shape)
                    blank = len(shape.after) - len(shape.after.rstrip(_LINE_ENDS))
                    data_ends = list(accumulate(run.lengths, initial=position - blank))
                    places = map(bisect_left, repeat(ends), data_ends[1:])
                    times_s.extend(map(stamps.__getitem__, places))
                    position = data_ends[-1] + blank
                    # As many again as there were: an odd event costs no more than those before it.
                    together = min(2 * sum(run.lengths), _MOST_TOGETHER_BYTES)
                    continue
            begin, match = position, _DATA.search(body, position, until)
            if match is None:
                break
            start, position = match.span()
            if (
                start > first and body[start - 1] not in _LINE_ENDS
            ):  # within a comment or another field
                continue
            data = match[1]
            if body.startswith(b"data:", position):
                data, position = _whole_data(body, match)
            line_end = 2 if body.endswith(b"\r\n", start, position) else 1
            time_s = stamps[bisect_left(ends, position - line_end)]
            position += _blank(body, position)
            together = 2 * (position - begin)
            if not self._event(data, body[begin:position], match.start(1) - begin, time_s):
                return
        if failed is not None:
            error_data = _DATA.search(body, until)
            self._error_event(error_data[1] if error_data else b"event: error")
            return
        self._settle()

    def _take(self, run: Run, shape: Shape) -> None:
        """Count events of the present shape, and keep what they hold if that is asked for."""
        self._unlike = 0
        listed = 1 if shape.middle[1] >= 0 else -1
        self._events.take(run.middles, shape.choice, listed)
        self._events.reasons |= shape.reasons
        self._has_deltas |= b'"message":' not in shape.before
        if self._keep_text:
            text = "".join([text for text, _ in run.middles])
            self._texts.append(text)
            if shape.is_content:
                self._contents.append(text)
            if shape.middle[1] >= 0:
                self.answer.token_ids += [token_id for _, token_id in run.middles]

    def _event(self, data: bytes, event: bytes, data_at: int, time_s: float) -> bool:
        """Read any event; `event` has its `data` at `data_at`, after its other fields. False ends
        the reading.
        """
        if data.strip() in (b"[DONE]", b""):  # no data: no event (WHATWG, server-sent events)
            self._done |= data.strip() != b""
            return True
        if len(data) <= _MOST_PLAIN_BYTES and (nameless := without_names(data)) is not None:
            plain = _plain_event(nameless)
            if plain is not None:
                self._plain(plain, event, data_at, time_s)
                return True
        try:
            payload = _parsed(data)
            if not isinstance(payload, dict):
                raise ValueError("no object")
        except ValueError:
            text = data[:_MOST_SHOWN_BYTES].decode(errors="replace").strip()
            self._fault(RequestFault.MALFORMED, f"an event is no JSON object: {text}")
            return False
        return all(self._chunk(chunk, event, data_at, time_s) for chunk in as_chat(payload))

    def _chunk(self, payload: dict[str, Any], event: bytes, data_at: int, time_s: float) -> bool:
        """Read an event in the form of a chat's; False ends the reading."""
        if _is_error(payload):
            self._error_event(json.dumps(payload).encode())
            return False
        choices = _choices(payload)
        if choices is None:
            self._fault(RequestFault.MALFORMED, "choices are no list of objects")
            return False
        self._plain(_PlainEvent(payload, _said_by(choices)), event, data_at, time_s)
        return True

    def _plain(self, plain: _PlainEvent, event: bytes, data_at: int, time_s: float) -> None:
        """Read an event that has no fault, and make a shape of it if it can have one."""
        n_contents = len(self._contents)
        for message in plain.messages:
            if message.choice.get("delta") or "message" not in message.choice:
                self._has_deltas |= message.counts
            elif message.finish and self._has_deltas:
                message = message._replace(shown=_NOTHING, counts=False)  # the whole again
            self._choice(message, time_s)
        has_usage = self._usage(plain.payload)
        if has_usage or len(plain.messages) != 1 or self._finish or not self._is_new(event):
            return
        self._unlike += 1
        self._shape = Shape.of(event, data_at)
        if self._shape is None:
            return
        if not self._fits(self._shape, plain.messages[0], n_contents):
            self._shape = None
        elif not self._stop:
            _shared[self._keep_text].add(self._shape)

    def _is_new(self, event: bytes) -> bool:
        """Whether a shape is to be made of an event."""
        if self._unlike >= _MOST_UNLIKE:
            return False
        return self._shape is None or not self._shape.frames(event)

    def _fits(self, shape: Shape, message: _Said, n_contents: int) -> bool:
        """Whether the middle of a shape is what was read of its event."""
        text, token_id = shape.middle
        choice, ids = message.choice, message.choice.get("token_ids")
        if message.shown.text != text or _part(choice).get(shape.field) != text:
            return False
        if token_id >= 0 and ids != [token_id]:
            return False
        if message.shown.listed != (1 if token_id >= 0 else -1):
            return False
        shape.choice, shape.reasons = message.number, message.shown.reasons
        if self._keep_text:
            contents = self._contents[n_contents:]
            shape.is_content = bool(contents)
            single_text = contents in ([], [text]) and not message.number
            return single_text and (token_id >= 0 or not ids)
        return True

    def _choice(self, message: _Said, time_s: float) -> None:
        text, content, size, listed, reasons = message.shown
        self._events.opened_s = min(self._events.opened_s, time_s)
        if message.finish and self._finish not in _NO_ENDS:
            self._finish = message.finish
        if message.stop:
            self._stop = message.stop
        if message.counts:
            self._events.add(time_s, size, message.number, listed)
            self._events.reasons |= reasons
            self._events.calls |= size > 0 and not text
        if self._keep_text:
            self._texts.append(text)
            if not message.number:
                self._contents.append(content)
                ids = message.choice.get("token_ids")
                if isinstance(ids, list) and all(type(token_id) is int for token_id in ids):
                    self.answer.token_ids += ids

    def _usage(self, payload: Mapping[str, Any]) -> bool:
        """Read the usage of an event or answer, if it has one."""
        usage = payload.get("usage")
        if usage is None and isinstance(other := payload.get("x_groq"), dict):
            usage = other.get("usage")
        if not isinstance(usage, dict):
            self._no_count |= bool(usage)
            return False
        answer = self.answer
        if (prompt := _first(usage, "prompt_tokens", "input_tokens")) is not None:
            answer.prompt_tokens = _count(prompt)
        details = _first(usage, "prompt_tokens_details", "input_tokens_details")
        if isinstance(details, dict) and (cached := details.get("cached_tokens")) is not None:
            answer.cached_tokens = _count(cached)
        details = _first(usage, "completion_tokens_details", "output_tokens_details")
        reasoning = (details if isinstance(details, dict) else usage).get("reasoning_tokens")
        self._hidden_tokens = max(self._hidden_tokens, _count(reasoning))
        if (tokens := _first(usage, "completion_tokens", "output_tokens")) is None:
            return True
        answer.completion_tokens = _count(tokens)
        if isinstance(tokens, int) and tokens > _MOST_TOKENS:
            self._absurd = f"usage of {tokens:,} tokens, more than any context holds"
        # Some servers count reasoning beside the completion.
        whole = answer.prompt_tokens + answer.completion_tokens + self._hidden_tokens
        self._whole = _count(usage.get("total_tokens"))
        if self._hidden_tokens and self._whole == whole:
            answer.completion_tokens += self._hidden_tokens
        if answer.completion_tokens >= 0:
            self._events.total(answer.completion_tokens)
        self._no_count |= answer.completion_tokens < 0
        return True

    def _fault(self, fault: RequestFault, detail: str) -> None:
        self.answer.fault = fault
        self.answer.detail = detail
        self._settle()

    def _error_event(self, data: bytes) -> None:
        self.answer.refused_as = code_of(data)
        self._fault(*_error(RequestFault.ERROR_EVENT, data))

    def _settle(self) -> None:
        """Convert events to token times, and set the fault of an incomplete answer."""
        answer = self.answer
        answer.text = "".join(self._texts)
        answer.content = "".join(self._contents)
        answer.finish = self._finish
        raw, max_tokens = self._raw, self._raw.most_tokens
        prompt = self._hidden_tokens < 1 and self._events.counts_prompt(
            answer.prompt_tokens, self._whole, max_tokens
        )
        beside = answer.prompt_tokens if prompt else 0
        counted = self._events.count(
            self._hidden_tokens, raw.body, hides=raw.hides, prompt_tokens=beside
        )
        answer.token_s, answer.sequences = counted.token_s, counted.sequences
        answer.chunks, answer.untimed_tokens = counted.chunks, counted.untimed_tokens
        answer.unsure, answer.silent = counted.unsure, counted.silent
        answer.refuted = counted.refuted or self._no_count or prompt
        tokens = max(answer.completion_tokens - beside, len(answer.token_s))
        answer.surplus = max_tokens is not None and tokens > max_tokens
        if self._done and answer.fault in _AFTER_END:
            answer.fault, answer.detail = RequestFault.NONE, ""
        if answer.fault is not RequestFault.NONE:
            return
        if self._finish in _ABORTED:
            answer.fault = RequestFault.ABORTED
            answer.detail = self._stop.encode(errors="replace").decode() or "the server gave it up"
        elif self._finish in _NO_ENDS:
            answer.fault = RequestFault.ERROR_EVENT
            answer.detail = f"the answer ended with finish_reason {self._finish}"
        elif self._absurd:
            answer.fault, answer.detail = RequestFault.MALFORMED, self._absurd
        elif not self._done and not self._finish:
            answer.fault = RequestFault.CUT
            answer.detail = "the stream ended without an end"
        elif not answer.token_s:
            answer.fault = RequestFault.EMPTY
            answer.detail = "a whole answer without a token"
            if answer.completion_tokens > 0:
                answer.detail = f"{answer.completion_tokens:,} tokens by the usage, and none shown"


def _said_by(choices: Sequence[Mapping[str, Any]]) -> list[_Said]:
    return [_said(choice, position) for position, choice in enumerate(choices)]


def _said(choice: Mapping[str, Any], position: int) -> _Said:
    """What a choice says; its number is its position in the event where it names none."""
    part = _part(choice)
    shows = shown(choice, part)
    index, finish, stop = (
        choice.get("index"),
        choice.get("finish_reason"),
        choice.get("stop_reason"),
    )
    # A role, and a last event that only says why it is the last, bring no token.
    counts = shows.size > 0 or not (part.get("role") or finish)
    return _Said(
        choice,
        shows,
        position if (number := _count(index)) < 0 else number,
        finish if isinstance(finish, str) else "",
        str(stop) if stop else "",
        counts,
    )


@lru_cache(maxsize=_MOST_PLAIN)
def _plain_event(data: bytes) -> _PlainEvent | None:
    """An event with these data; None if it is of another API or has a fault, or cannot be read."""
    try:
        payload = _parsed(data)
    except ValueError:
        return None
    if not isinstance(payload, dict) or "choices" not in payload or _is_error(payload):
        return None
    choices = _choices(payload)
    return None if choices is None else _PlainEvent(payload, _said_by(choices))


_shared = (SharedShapes(), SharedShapes())  # of answers whose texts are not kept, and are


def _part(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a choice that holds its text."""
    part: Mapping[str, Any] = choice.get("delta") or choice.get("message") or choice
    return part


def _is_error(payload: Mapping[str, Any]) -> bool:
    """Whether an event of a stream is an error in any known form."""
    if payload.get("error") or payload.get("errors") or payload.get("object") == "error":
        return True
    choices = payload.get("choices")
    if choices and isinstance(choices, list):
        for choice in choices:  # noqa: SIM110 - faster than a generator
            if isinstance(choice, dict) and choice.get("error"):
                return True
        return False
    if "usage" in payload or "data" in payload:
        return False
    return isinstance(payload.get("message") or payload.get("detail"), str | list)


def _first(usage: Mapping[str, Any], name: str, other_name: str) -> Any:
    """A field of a usage, by either name."""
    value = usage.get(name)
    return usage.get(other_name) if value is None else value


def _parsed(data: bytes) -> Any:
    """The value of an event, as `parse_event` returns it."""
    if data.startswith(b'{"'):  # the others may be in other encodings
        try:
            text = data.decode()
            value, end = _decode(text, 0)
        except (ValueError, RecursionError, StopIteration):
            # Says what is wrong; a character that was cut between two tokens is not.
            return parse_event(data.decode(errors="replace"))
        if end == len(text):
            return value
    return parse_event(data)


def _blank(body: bytes, position: int) -> int:
    """Bytes of the empty line at `position`, if there is one."""
    return 1 if body.startswith(b"\n", position) else 2 if body.startswith(b"\r\n", position) else 0


def _whole_data(body: bytes, match: re.Match[bytes]) -> tuple[bytes, int]:
    """The data of an event whose first line of several matched, and where they end.

    Lines of data that follow each other are those of one event, or where the first is whole by
    itself, of several without the empty lines between them.
    """
    data, end = match[1], match.end()
    try:
        _parsed(data)
    except ValueError:
        while (line := _DATA.match(body, end)) is not None:
            data, end = data + b"\n" + line[1], line.end()
    return data, end


def _event_start(body: bytes, position: int) -> int:
    """Where the server-sent event with a line at `position` begins: after the last empty line."""
    ends = ((body.rfind(line, 0, position), len(line)) for line in (b"\n\n", b"\n\r\n"))
    return max((start + length for start, length in ends if start >= 0), default=0)


def _choices(reply: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the choices of an answer or event; None if it does not have the form of the API."""
    choices = reply.get("choices") or []
    if not isinstance(choices, list):
        return None
    for choice in choices:
        if not isinstance(choice, dict):
            return None
        if not isinstance(_part(choice), dict):
            return None
    return choices


def _count(value: object) -> int:
    """Return a token count reported by the server, as text or as 16.0 too; -1 if it is none."""
    if isinstance(value, float):
        value = int(value) if value % 1 == 0 else -1
    elif isinstance(value, str) and value.isdecimal() and len(value) < _MOST_DIGITS:
        value = int(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS
    return cast("int", value) if is_count else -1


@dataclass
class Unchunked:
    """Chunks of a body, each with the time at which its last byte was there.

    `complete`: the last chunk has arrived. `problem`: why the bytes are no chunked body, or empty.
    """

    pieces: list[bytes]
    stamps: array[float]
    complete: bool
    problem: str = ""


def unchunk(reads: list[bytes], stamps: array[float]) -> Unchunked:
    """Split the bytes read so far into chunks (RFC 9112, 7.1); `reads[i]` came at `stamps[i]`.

    The part of an incomplete chunk that has arrived counts as a chunk.
    """
    raw = b"".join(reads)
    lengths = list(map(len, reads))
    ends = list(accumulate(lengths))
    # As a rule a read is a chunk.
    heads = list(map(chunk_head, lengths))
    ended = map(bytes.endswith, reads, repeat(b"\r\n"))
    whole = [*map(and_, map(bytes.startswith, reads, heads), ended), False]
    unchunked = Unchunked([], array("d"), False)
    position = k = 0
    while True:
        if whole[k] and position == ends[k] - lengths[k]:
            stop = whole.index(False, k)
            unchunked.pieces += [
                r[len(h) : -2] for r, h in zip(reads[k:stop], heads[k:stop], strict=True)
            ]
            unchunked.stamps += stamps[k:stop]
            position, k = ends[stop - 1], stop
        line_end = raw.find(b"\r\n", position)
        if line_end < 0:
            return unchunked
        size_line = _SIZE.match(raw, position, line_end)
        if size_line is None:
            unchunked.problem = f"no chunk size: {raw[position : position + 20]!r}"
            return unchunked
        size = int(size_line[1], 16)
        start = line_end + 2
        if size == 0:
            # Trailers may come between the last chunk and the empty line.
            unchunked.complete = raw.startswith(b"\r\n", start) or raw.endswith(b"\r\n\r\n")
            return unchunked
        piece = raw[start : start + size]
        if piece:
            unchunked.pieces.append(piece)
            k = bisect_left(ends, start + len(piece), k)
            unchunked.stamps.append(stamps[k])
        if len(piece) < size:
            return unchunked
        position = start + size + 2
        k = bisect_right(ends, position, k)
