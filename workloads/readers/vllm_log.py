"""vLLM's log of requests and answers (0.19 to 0.32): rows of labelled prompts, or a trace.

`vllm serve --enable-log-requests --enable-log-outputs --log-level DEBUG` (older versions:
`VLLM_LOGGING_LEVEL=DEBUG`) prints for each request of the chat or responses API:

- the request's JSON body (0.32, not yet 0.27), the prompt after the chat template, its token ids;
- the answer, its token ids (streamed: in pieces), and why it ended.

Without DEBUG there are no prompts, without `--enable-log-outputs` no answers, and vLLM prints no
answer of `/v1/completions`. `--max-log-len` cuts all of them, so leave it out. The answering model
is in JSON bodies alone.

Source: vllm/entrypoints/serve/utils/request_logger.py of 0.27 and 0.32, vllm/entrypoints/logger.py
of 0.19.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileFormatError
from ..parsing import parse_json
from ..prefixes import BLOCK_SIZE
from .table_reader import FileTable, Kept, WorkloadTrace, in_order, lines

_TEXT = r"""('[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")"""
_IDS = r"[\[(]([\d, ]*)[\])]"
_ASKED = re.compile(r"(?:Request (\S+) (?:details|JSON body)|Received request (\S+)): (.*)", re.S)
_PROMPT = re.compile(rf"prompt: {_TEXT}")
_PROMPT_IDS = re.compile(rf"prompt_token_ids: {_IDS}")
_ANSWERED = re.compile(
    r"Generated response (\S+?)( \(streaming delta\))?(?: \(streaming complete\))?"
    rf"(?: details)?: (?:output: {_TEXT})?(?:, )?(?:output_token_ids: {_IDS})?(.*)",
    re.S,
)
_TIME = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_MAX_TOKENS = re.compile(r"\bmax_tokens=(\d+)")
_MOST_LINES = 20_000  # in which a log's first request is looked for
_YEAR_S = 366 * 86400.0  # of 2000, as lines have no year
_STREAMED = re.compile(r"<streaming_complete: (\d+) tokens>")
_REMEDY = (
    "start vLLM with --enable-log-requests --enable-log-outputs --log-level DEBUG and without "
    "--max-log-len, and ask /v1/chat/completions (answers of /v1/completions are never logged); "
    "or give a log of the chat API with usage.completion_tokens, or a run folder"
)


@dataclass
class _Request:
    line: int
    body: dict[str, Any] | None = None
    prompt: str | None = None
    prompt_tokens: int | None = None
    answer: str | None = None
    output_tokens: int | None = None
    cut_off: bool = False  # by max_tokens: how long it would have been is unknown
    arrival_s: float | None = None
    max_tokens: int | None = None
    blocks: tuple[int, ...] = ()


def logged_requests(
    path: Path, numbered: Iterable[tuple[int, str]], notes: list[str]
) -> list[tuple[int, dict[str, Any]]]:
    """Requests with prompt and answer, each with the line where it begins.

    Args:
        path: the file, for messages.
        numbered: its lines with their numbers.
        notes: gets what was left out.

    Returns:
        Rows with "prompt" or "messages", "output" or "output_tokens"; none if no line is vLLM's.

    Raises:
        FileFormatError: no request has both a prompt and an answer.
    """
    requests = _requests(path, numbered)
    if not requests:
        return []
    prompted = [r for r in requests.values() if r.body is not None or r.prompt is not None]
    whole = [r for r in prompted if r.answer is not None or r.output_tokens is not None]
    if not whole:
        lacks = "no answer to a prompt" if prompted else "no prompt"
        raise FileFormatError(
            path, None, f"the log of vLLM has {len(requests):,} requests, but {lacks}; {_REMEDY}"
        )
    if len(whole) < len(requests):
        notes.append(f"{len(requests) - len(whole):,} requests without prompt or answer left out")
    kept = [r for r in whole if not r.cut_off]
    if len(kept) < len(whole):
        notes.append(f"{len(whole) - len(kept):,} answers cut off by max_tokens left out")
    if any(r.body is None for r in kept):
        notes.append("prompts are those after the chat template: use the predictor with such ones")
    return [(r.line, _row(r)) for r in kept]


def _requests(
    path: Path, numbered: Iterable[tuple[int, str]], blocks: _Blocks | None = None
) -> dict[str, _Request]:
    """All requests by id, in the order in which they came; with `blocks`, the prompts' own."""
    requests: dict[str, _Request] = {}
    for number, line in numbered:
        matches = [m for m in (_ASKED.search(line), _ANSWERED.search(line)) if m is not None]
        if not matches:
            continue
        match = min(matches, key=re.Match.start)  # what comes later is quoted
        request = requests.setdefault(_key(match[1] or match[2]), _Request(number))
        try:
            if match.re is _ASKED:
                if request.arrival_s is None:
                    request.arrival_s = _time_s(line[: match.start()])
                _ask(request, match, blocks)
            else:
                _answer(request, match)
        except (SyntaxError, ValueError) as error:
            raise FileFormatError(path, number, f"a logged text is damaged: {error}") from error
    return requests


class _Blocks:
    """Numbers the full blocks of prompts: alike where all tokens up to their end are alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], int] = {}

    def of(self, ids: str) -> tuple[int, ...]:
        """The blocks of a prompt from its token ids, as they are logged."""
        tokens = [token.strip() for token in ids.split(",") if token.strip()]
        blocks: list[int] = []
        for begin in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            key = (blocks[-1] if blocks else -1, ",".join(tokens[begin : begin + BLOCK_SIZE]))
            blocks.append(self._known.setdefault(key, len(self._known)))
        return tuple(blocks)


def is_vllm_log(path: Path) -> bool:
    """Whether a request of vLLM's is logged among the first lines of a file."""
    return any(
        _ASKED.search(line) for _, line in zip(range(_MOST_LINES), lines(path), strict=False)
    )


def read_vllm_log(path: Path) -> WorkloadTrace:
    """The requests of a log as a trace: times, lengths, and prefixes that prompts share.

    Times are logged in whole seconds; requests of one second are spread over it. Where an answer is
    not logged, it is as long as `max_tokens`.

    Raises:
        FileFormatError: no request has the token ids of its prompt and a length of its answer.
    """
    requests = _requests(path, enumerate(lines(path), 1), _Blocks())
    # A JSON body has an id of its own where the client sent none.
    requests = {
        k: r for k, r in requests.items() if r.prompt_tokens or r.max_tokens or r.output_tokens
    }
    timed = [r for r in requests.values() if r.arrival_s is not None and r.prompt_tokens]
    whole = [r for r in timed if r.output_tokens or r.max_tokens]
    if not whole:
        raise FileFormatError(
            path,
            None,
            "no request in the log of vLLM has the token ids of its prompt and an answer; "
            f"{_REMEDY}",
        )
    notes = [
        "times are those of the log, in whole seconds; requests of a second are spread over it"
    ]
    if len(whole) < len(requests):
        notes.append(f"{len(requests) - len(whole):,} requests without prompt or answer left out")
    guessed = sum(not r.output_tokens for r in whole)
    if guessed:
        notes.append(f"{guessed:,} answers are not logged and taken to be as long as max_tokens")
    values = {
        "prompt_tokens": np.array([r.prompt_tokens for r in whole], dtype=np.int64),
        "output_tokens": np.array([r.output_tokens or r.max_tokens for r in whole], dtype=np.int64),
        "prefix_blocks": [r.blocks for r in whole],
        "prefix_block_size": BLOCK_SIZE,
    }
    table = FileTable(path, {}, [r.line for r in whole])
    kept = Kept(np.arange(len(whole)), tuple(notes))
    return in_order(table, _spread([r.arrival_s or 0.0 for r in whole]), values, kept)


def _spread(seconds: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Times in order; those of one second evenly over it, and on after the end of a year."""
    times_s = np.array(seconds)
    times_s += _YEAR_S * np.cumsum(np.diff(times_s, prepend=times_s[0]) < -_YEAR_S / 2)
    _, where, n = np.unique(times_s, return_inverse=True, return_counts=True)
    rank = np.zeros(len(times_s))
    for second in range(len(n)):
        rows = np.flatnonzero(where == second)
        rank[rows] = np.arange(len(rows)) / len(rows)
    return np.asarray(times_s + rank)


def _time_s(before: str) -> float | None:
    """Seconds since the year's beginning, of a line's own time."""
    match = _TIME.search(before)
    if match is None:
        return None
    month, day, hour, minute, second = map(int, match.groups())
    moment = datetime(2000, month, day, hour, minute, second, tzinfo=UTC)
    return (moment - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds()


def _key(request_id: str) -> str:
    """A JSON body is printed with the id alone, everything else with the API's name before it."""
    return request_id.removeprefix("chatcmpl-")


def _ask(request: _Request, match: re.Match[str], blocks: _Blocks | None) -> None:
    text = match[3]
    limit = _MAX_TOKENS.search(text) if match[2] else None  # in the sampling parameters
    if limit is not None:
        request.max_tokens = int(limit[1])
    if text.startswith("{"):
        try:
            body = parse_json(text.strip())
        except json.JSONDecodeError:  # cut by --max-log-len
            return
        request.body = body if "messages" in body else None
        return
    prompt = _PROMPT.match(text)
    if prompt is not None:
        request.prompt = _text(prompt[1])
        text = text[prompt.end() :]
    ids = _PROMPT_IDS.search(text)
    if ids is not None:
        request.prompt_tokens = _count(ids[1])
        if blocks is not None:
            request.blocks = blocks.of(ids[1])


def _answer(request: _Request, match: re.Match[str]) -> None:
    _, piece, text, ids, rest = match.groups()
    request.cut_off |= "finish_reason: length" in rest
    if ids is not None and (piece or request.output_tokens is None):
        request.output_tokens = (request.output_tokens or 0) + _count(ids)
    if text is None or piece or request.answer is not None:
        return
    answer = _text(text)
    streamed = _STREAMED.fullmatch(answer)
    if streamed is None:
        request.answer = answer
    elif request.output_tokens is None:
        request.output_tokens = int(streamed[1])


def _text(literal: str) -> str:
    """The text of a Python literal; half a character becomes a question mark."""
    text: str = ast.literal_eval(literal)
    return text.encode(errors="replace").decode()


def _count(ids: str) -> int:
    return len([token for token in ids.split(",") if token.strip()])


def _row(request: _Request) -> dict[str, Any]:
    row = dict(request.body) if request.body is not None else {"prompt": request.prompt}
    more = {
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "output": request.answer,
    }
    return row | {name: value for name, value in more.items() if value is not None}
