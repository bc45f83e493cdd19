"""vLLM's log of requests and answers (0.19 to 0.32), as rows of labelled prompts.

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
from pathlib import Path
from typing import Any

from ..errors import FileFormatError
from ..parsing import parse_json

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


def logged_requests(
    path: Path, numbered: Iterable[tuple[int, str]], notes: list[str]
) -> list[tuple[int, dict[str, Any]]]:
    """Requests with prompt and answer, each with the line where it begins.

    Args:
        path: the file, for messages.
        numbered: its lines with their numbers.
        notes: gets what was left out.

    Returns:
        Rows with `prompt` or `messages`, `output` or `output_tokens`; none if no line is vLLM's.

    Raises:
        FileFormatError: no request has both a prompt and an answer.
    """
    found: dict[str, _Request] = {}
    for number, line in numbered:
        matches = [m for m in (_ASKED.search(line), _ANSWERED.search(line)) if m is not None]
        if not matches:
            continue
        match = min(matches, key=re.Match.start)  # what comes later is quoted
        request = found.setdefault(_key(match[1] or match[2]), _Request(number))
        try:
            (_ask if match.re is _ASKED else _answer)(request, match)
        except (SyntaxError, ValueError) as error:
            raise FileFormatError(path, number, f"a logged text is damaged: {error}") from error
    if not found:
        return []
    prompted = [r for r in found.values() if r.body is not None or r.prompt is not None]
    whole = [r for r in prompted if r.answer is not None or r.output_tokens is not None]
    if not whole:
        lacks = "no answer to a prompt" if prompted else "no prompt"
        raise FileFormatError(
            path, None, f"the log of vLLM has {len(found):,} requests, but {lacks}; {_REMEDY}"
        )
    if len(whole) < len(found):
        notes.append(f"{len(found) - len(whole):,} requests without prompt or answer left out")
    kept = [r for r in whole if not r.cut_off]
    if len(kept) < len(whole):
        notes.append(f"{len(whole) - len(kept):,} answers cut off by max_tokens left out")
    if any(r.body is None for r in kept):
        notes.append("prompts are those after the chat template: use the predictor with such ones")
    return [(r.line, _row(r)) for r in kept]


def _key(request_id: str) -> str:
    """A JSON body is printed with the id alone, everything else with the API's name before it."""
    return request_id.removeprefix("chatcmpl-")


def _ask(request: _Request, found: re.Match[str]) -> None:
    text = found[3]
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


def _answer(request: _Request, found: re.Match[str]) -> None:
    _, piece, text, ids, rest = found.groups()
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
    return len([one for one in ids.split(",") if one.strip()])


def _row(request: _Request) -> dict[str, Any]:
    row = dict(request.body) if request.body is not None else {"prompt": request.prompt}
    more = {
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "output": request.answer,
    }
    return row | {name: value for name, value in more.items() if value is not None}
