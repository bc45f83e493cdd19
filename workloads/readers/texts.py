"""Data sets of texts, without arrivals: ShareGPT, Alpaca, LongBench, vLLM's custom JSON lines.

Without a tokenizer token counts are approximate: four characters a token, OpenAI's rule of thumb
for English (https://help.openai.com/en/articles/4936856). A row that has `prompt_tokens` and
`output_tokens` keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from json import JSONDecodeError
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from ..errors import FileFormatError, SloBenchError
from ..parsing import parse_json
from ..request_bodies import IMAGES, OWN, Body, checked, has_images, prompt_text
from ..workload import Workload
from .columns import ARRIVAL, OUTPUT, PROMPT, Column, roles
from .table_reader import FileTable, WorkloadTrace, lines, objects, parse_object, read_jsonl

CHARACTERS_PER_TOKEN = 4
MOST_TOKENS = 1 << 31  # of one text, by what a row says of it
_CONVERSATION = ("conversations", "messages", "conversation")
_SYSTEM, _HUMAN = ("system", "developer"), ("human", "user")
_NO_ANSWER = (*_SYSTEM, *_HUMAN, "tool", "function", "observation")
_CALLS_OF_TOOLS = ("tool_calls", "function_call")
_ANSWERS = ("completion", "response")
_LIMITS = ("max_completion_tokens", "max_tokens")
CUSTOM_OUTPUT_TOKENS = 256  # vLLM's default for `--custom-output-len`


def approximate_tokens(text: str) -> int:
    """Characters / 4, rounded up, at least 1."""
    return max(1, -(-len(text) // CHARACTERS_PER_TOKEN))


class _Rows:
    """Collects the prompts of a data set and their token counts."""

    def __init__(self) -> None:
        self.prompt_tokens: list[int] = []
        self.output_tokens: list[int] = []
        self.texts: list[str | None] = []
        self.bodies: list[Body | None] = []
        self.approximate = False

    def add(
        self,
        row: dict[str, Any],
        prompt: str | None,
        output: str | int,
        body: Body | None = None,
    ) -> None:
        prompt_tokens = row.get("prompt_tokens")
        self.approximate |= prompt_tokens is None or not (
            row.get("output_tokens") or type(output) is int
        )
        self.texts.append(prompt)
        self.bodies.append(body)
        text = prompt or ""
        if body is not None:
            text += prompt_text(body)
        self.prompt_tokens.append(
            approximate_tokens(text) if prompt_tokens is None else int(prompt_tokens)
        )
        counted = output if isinstance(output, int) else approximate_tokens(output)
        self.output_tokens.append(int(row.get("output_tokens") or counted))

    def trace(self, path: Path, notes: tuple[str, ...]) -> WorkloadTrace:
        if self.approximate:
            notes = (*notes, "token counts are approximate: four characters a token")
        workload = Workload(
            arrival_s=np.zeros(len(self.texts)),
            prompt_tokens=np.array(self.prompt_tokens, dtype=np.int64),
            output_tokens=np.array(self.output_tokens, dtype=np.int64),
            texts=self.texts if any(t is not None for t in self.texts) else None,
            bodies=self.bodies if any(self.bodies) else None,
            name=path.name,
        )
        return WorkloadTrace(workload, notes, has_arrivals=False)


def read_json_array(path: Path) -> WorkloadTrace:
    """Read ShareGPT, chats or Alpaca, a JSON array of objects.

    Of a conversation ("conversations" or "messages") the first message of the human and its answer
    are taken, as vLLM and SGLang do, with the system message before them; conversations without
    both are left out, and so are empty answers.

    Raises:
        FileFormatError: the file is no JSON array of such objects, or has no exchange.
    """
    try:
        data = parse_json("".join(lines(path)))
    except JSONDecodeError as error:
        if error.msg == "Extra data":  # a list of messages a line
            return read_conversations(path)
        raise FileFormatError(path, error.lineno, f"not readable as JSON: {error.msg}") from error
    if not isinstance(data, list):
        raise FileFormatError(path, 1, "expected a JSON array of conversations")
    return _exchanges(path, [(f"element {index}", item) for index, item in enumerate(data)])


def read_conversations(path: Path) -> WorkloadTrace:
    """Read ShareGPT or chats, a JSON object or a list of messages a line, as `read_json_array`
    does.

    Raises:
        FileFormatError: a line is no such object, or none has an exchange.
    """
    rows = []
    for number, text in enumerate(lines(path), 1):
        if text.lstrip().startswith("["):
            text = f'{{"messages": {text}}}'
        if not text.isspace():
            rows.append((f"line {number}", parse_object(path, number, text)))
    return _exchanges(path, rows)


def _exchanges(path: Path, items: Sequence[tuple[str, Any]]) -> WorkloadTrace:
    rows = _Rows()
    for place, item in items:
        key = next((key for key in (*_CONVERSATION, "instruction") if _has(item, key)), None)
        if key is None:
            raise FileFormatError(
                path,
                None,
                f"{place} has neither 'conversations' nor 'messages' nor 'instruction'; requests "
                f"are read an object a line: jq -c '.[]' {quote(str(path))} > {quote(path.stem)}"
                ".jsonl",
            )
        exchange = _alpaca if key == "instruction" else _first_exchange
        try:
            prompt, answer = exchange(item, key)
        except ValueError as error:
            raise FileFormatError(path, None, f"{place}: {error}") from None
        if prompt and answer:
            _check_counts(path, place, item)
            rows.add(item, prompt, answer)
    if not rows.texts:
        raise FileFormatError(path, None, "the data set is empty: no prompt with an answer in it")
    left_out = len(items) - len(rows.texts)
    notes = [f"{left_out} of {len(items)} entries without a first prompt and answer left out"]
    notes = notes if left_out else []
    parts = sorted({part for _, item in items for part in _unread_parts(item)})
    if arrival := roles(items[0][1]).get(ARRIVAL):
        notes.append(f"not used: {arrival.name}")
    if parts:
        notes.append(f"not used: {', '.join(parts)} of messages")
    return rows.trace(path, tuple(notes))


def _unread_parts(item: dict[str, Any]) -> Iterator[str]:
    """What the messages of a conversation, or it, hold beside texts: images, calls of tools."""
    messages: list[dict[str, Any]] = next(
        (item[key] for key in _CONVERSATION if isinstance(item.get(key), list)), []
    )
    yield from (key for key in ("tools", "functions", "images") if item.get(key))
    for message in messages:
        yield from (key for key in _CALLS_OF_TOOLS if message.get(key))
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type", "text") != "text":
                yield str(part["type"])


def _has(item: Any, key: str) -> bool:
    return isinstance(item, dict) and key in item


def _alpaca(item: dict[str, Any], key: str) -> tuple[str, str]:
    parts = [item[key], item.get("input")]
    if not all(text is None or isinstance(text, str) for text in parts):
        raise ValueError("instruction and input are texts")
    return "\n".join(text for text in parts if text), str(item.get("output") or "")


def _first_exchange(item: dict[str, Any], key: str) -> tuple[str, str]:
    """The first prompt, with the system messages before it, and its answer; else empty texts."""
    messages = item[key]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"{key} must be a list of objects")
    before: list[str] = []
    for message, answer in pairwise(messages):
        speaker = str(message.get("from", message.get("role", ""))).lower()
        text = _text(message)
        if speaker in _SYSTEM:
            before.append(text)
        elif speaker in _HUMAN:
            other = str(answer.get("from", answer.get("role", ""))).lower()
            if other in _NO_ANSWER:
                break
            return "\n".join(filter(None, (*before, text))) if text else "", _text(answer)
        else:
            break
    return "", ""


def _text(message: dict[str, Any]) -> str:
    """The text of a message, which may be in parts."""
    content = message.get("value", message.get("content"))
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    if content is not None and not isinstance(content, str):
        raise ValueError("the value of a message is a text")
    return content or ""


def _check_counts(path: Path, place: str, item: dict[str, Any]) -> None:
    for key in ("prompt_tokens", "output_tokens"):
        value = item.get(key)
        if value is not None and (type(value) is not int or not 0 <= value <= MOST_TOKENS):
            raise FileFormatError(
                path, None, f"{place}: {key} must be a whole number but is {value!r:.40}"
            )


def read_custom_jsonl(path: Path) -> WorkloadTrace:
    """Read vLLM's custom data set: `{"prompt": …, "output_tokens": …}` a line.

    Counts may have other names (`columns`). Without `output_tokens` a row asks for what its
    `completion` or `response` takes; without these for 256, vLLM's default. `body` and `images` are
    fields of the request alone (`request_bodies`).

    Raises:
        FileFormatError: a line cannot be read.
    """
    extras = ("body", IMAGES)
    named = roles(next(objects(path), (0, {}))[1])
    counted = {role: named.get(role, Column(role)).name for role in (PROMPT, OUTPUT)}
    table = read_jsonl(path, ("prompt",), (*counted.values(), *extras, *_ANSWERS))
    rows = _Rows()
    assumed = 0
    table.used.update(table.columns)
    for row, prompt in enumerate(table.columns["prompt"]):
        if not isinstance(prompt, str) or not prompt:
            raise table.fail(row, f"prompt must be a text but is {prompt!r}")
        counts = {role: table.columns[name][row] for role, name in counted.items()}
        answers = [table.columns[key][row] for key in _ANSWERS]
        answer = next((text for text in answers if isinstance(text, str) and text), None)
        _check_row_counts(table, row, counts)
        assumed += counts["output_tokens"] is None and answer is None
        body, images = table.columns["body"][row], table.columns[IMAGES][row]
        fields = _body(table, row, body, images, counts[PROMPT])
        rows.add(counts, prompt, answer or CUSTOM_OUTPUT_TOKENS, fields)
    notes = [f"{role} is read from {name}" for role, name in counted.items() if name != role]
    if assumed:
        notes.append(
            f"{assumed} prompts without output_tokens ask for {CUSTOM_OUTPUT_TOKENS}, as in vLLM"
        )
    return rows.trace(path, (*notes, *table.unused()))


def _check_row_counts(table: FileTable, row: int, counts: dict[str, Any]) -> None:
    for key, value in counts.items():
        if value is not None and (type(value) is not int or not 1 <= value <= MOST_TOKENS):
            raise table.fail(row, f"{key} must be a whole number from 1 on but is {value!r:.40}")


def _body(
    table: FileTable, row: int, body: Any, images: Any = None, prompt_tokens: int | None = None
) -> Body | None:
    """The fields of a row's request; None if it has none.

    Raises:
        FileFormatError: they are malformed, or there are images and no `prompt_tokens`.
    """
    if body is None and images is None:
        return None
    image_fields = {} if images is None else {IMAGES: images}
    try:
        fields = checked(checked({} if body is None else body) | image_fields)
    except SloBenchError as error:
        raise table.fail(row, str(error)) from None
    if has_images(fields) and prompt_tokens is None:
        raise table.fail(row, "what an image takes depends on the model: give prompt_tokens")
    return fields


def read_batch(path: Path) -> WorkloadTrace:
    """Read requests of OpenAI's batch API, as vLLM's `run-batch` takes: `{"url": …, "body": …}` a
    line. Chats keep their messages, requests their other fields but those that are null; they ask
    for their `max_tokens`, without it for 256. Prompt tokens beside the body say what images
    take. What is neither a chat nor a completion of one text is left out.

    Raises:
        FileFormatError: a line cannot be read.
    """
    table = read_jsonl(path, ("body",), ("custom_id", "method", "url", PROMPT))
    table.used.update(table.columns)
    rows, models = _Rows(), set()
    assumed = several = 0
    for row, body in enumerate(table.columns["body"]):
        if not isinstance(body, dict):
            raise table.fail(row, f"body must be a JSON object but is {body!r:.40}")
        request = {key: value for key, value in body.items() if value is not None}
        prompt, url = request.get("prompt"), table.columns["url"][row] or "completions"
        is_text = request.get("messages") or (isinstance(prompt, str) and prompt)
        if not is_text or "completions" not in str(url):
            continue
        limit = request.get(_LIMITS[0], request.get(_LIMITS[1], CUSTOM_OUTPUT_TOKENS))
        assumed += not request.keys() & set(_LIMITS)
        several += request.get("n", 1) != 1
        models.add(str(request.get("model")))
        counts = {PROMPT: table.columns[PROMPT][row]}
        _check_row_counts(table, row, {**counts, "max_tokens": limit})
        fields = {key: value for key, value in request.items() if key not in (*OWN, *_LIMITS)}
        rows.add(counts, prompt, limit, _body(table, row, fields, None, counts[PROMPT]))
    left_out = len(table) - len(rows.texts)
    if not rows.texts:
        raise FileFormatError(path, None, "no request has messages, or a prompt that is a text")
    facts = {
        "answers are taken to be as long as max_tokens": True,
        f"{assumed} requests without max_tokens ask for {CUSTOM_OUTPUT_TOKENS}": assumed,
        f"{several} requests that ask for several answers (n) get one": several,
        f"all are of one model, though they name {len(models)}": len(models) > 1,
        f"{left_out} of {len(table)} left out, as no chat and no completion of a text": left_out,
    }
    return rows.trace(path, (*(fact for fact in facts if facts[fact]), *table.unused()))


def read_longbench(path: Path) -> WorkloadTrace:
    """Read one task of LongBench: `{"context": …, "input": …, "answers": […]}` a line.

    The prompt is the context and the question, without the task's instruction; the output is
    the first reference answer.

    Raises:
        FileFormatError: a line cannot be read.
    """
    table = read_jsonl(path, ("context", "input", "answers"))
    rows = _Rows()
    columns = (table.columns[key] for key in ("context", "input", "answers"))
    for row, (context, question, answers) in enumerate(zip(*columns, strict=True)):
        if not isinstance(context, str) or not isinstance(question, str):
            raise table.fail(row, "context and input must be texts")
        prompt = "\n".join(text for text in (context, question) if text)
        if not prompt or not isinstance(answers, list) or not answers:
            raise table.fail(row, "each line needs a context or an input, and a list of answers")
        rows.add({}, prompt, str(answers[0]))
    return rows.trace(path, ())
