"""Prompts with the lengths of their answers: training data of length predictors.

Files are JSON lines or one JSON array, plain or gzip. A row has a prompt (`prompt`, Alpaca's
`instruction` and `input`, `question`, or ShareGPT's `conversations`, of which the first message and
its answer are taken), and `output_tokens` or the answer's text (`output`, `answer`, `response` or
`completion`). `model` names the model that answered. `outputs` and `output_tokens` may also be
objects with an answer or a length for each of several models.

Logs of OpenAI's chat API have `messages` (or `request.messages`), of which the contents make the
prompt, and `usage.completion_tokens` or `choices.0.message.content` (or these under `response`).
CSV has a column for each field. Logs of vLLM are read as `readers.vllm_log` says. A name with dots
is a path into objects and lists.

Texts without a count of tokens get one by `tokenizer_count`, or else an approximate one.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import FileFormatError, SloBenchError
from .extras import need
from .parsing import parse_json
from .readers.table_reader import lines, parse_object
from .readers.texts import approximate_tokens
from .readers.vllm_log import logged_requests

_ANSWERS = (
    "answer answers bucket canonical_solution chosen completion completion_tokens completions "
    "expected expected_output_tokens generated_text generated_texts label output output_len "
    "output_length output_text output_tokens outputs rejected response response_tokens responses "
    "solution target"
)
ANSWER_COLUMNS = frozenset(_ANSWERS.split())
"""Columns that hold the answer or its length: a predictor must never see them."""

PROMPT_COLUMNS = (("prompt",), ("instruction", "input"), ("question",))
TEXT_COLUMNS = ("output", "answer", "response", "completion")
_OPENAI = ("", "response.", "response.body.", "body.")  # where logs keep the API's answer
_OPENAI_REQUEST = ("", "request.", "request.body.")
_MOST_TOKENS = 1 << 40
TELLING_CHARACTERS = 40  # an answer this long does not stand in a prompt by chance


@dataclass(frozen=True)
class LabelledPrompt:
    """A prompt, and how long its answer was. `answer` is its text, where the data has it."""

    prompt: str
    prompt_tokens: int
    output_tokens: int
    model: str
    corpus: str
    answer: str | None = None


@dataclass(frozen=True)
class TokenCount:
    """Counts the tokens of texts that come without a count; `name` says how."""

    count: Callable[[str], int]
    name: str


APPROXIMATE = TokenCount(approximate_tokens, "four characters a token")


@dataclass(frozen=True)
class LabelledPrompts:
    """Labelled prompts of a file or run folder. `labels` names the method that counted lengths."""

    name: str
    rows: tuple[LabelledPrompt, ...]
    labels: str
    notes: tuple[str, ...] = ()
    named_by_file: bool = False  # the file's name stands for the model of some rows


def read_labelled_prompts(
    path: Path,
    *,
    model: str | None = None,
    columns: Sequence[str] | None = None,
    tokens: TokenCount = APPROXIMATE,
    length: str | None = None,
) -> LabelledPrompts:
    """Read a file of prompts and answers.

    Args:
        path: the file.
        model: the model that answered, for rows without one; by default the file's name without its
            ending.
        columns: columns of the prompt, joined by newlines; by default as in the module's
            description.
        tokens: counts the tokens of texts without a count.
        length: column or path of the answer's length in tokens; by default `output_tokens`.

    Raises:
        SloBenchError: there is no such file, or a column of `columns` holds the answer.
        FileFormatError: the file cannot be read, a row lacks a field, or there is no row.
    """
    if columns is not None:
        refuse_answers(columns)
    corpus = path.name.split(".")[0]
    reader = _Reader(path, corpus, corpus if model is None else model, columns, tokens, length)
    notes: list[str] = []
    rows = [
        labelled for place, row in _objects(path, notes) for labelled in reader.answered(place, row)
    ]
    if not rows:
        raise FileFormatError(path, None, "the data is empty: no prompt with an answer in it")
    _refuse_repeated_answers(path, rows)
    if reader.empty:
        notes.append(f"{reader.empty} rows without an answer left out")
    from_data = "output_tokens of the data"
    if not reader.counted:
        labels = from_data
    elif reader.counted == len(rows):
        labels = f"answers counted by {tokens.name}"
    else:
        labels = f"{from_data}, else answers counted by {tokens.name}"
    by_file = model is None and any(row.model == corpus for row in rows)
    return LabelledPrompts(corpus, tuple(rows), labels, tuple(notes), by_file)


def refuse_answers(columns: Sequence[str]) -> None:
    """Make sure that no column holds the answer.

    Raises:
        SloBenchError: one does, and says which.
    """
    if not columns:
        raise SloBenchError("no column is named to make the prompt")
    for column in columns:
        if set(column.lower().split(".")) & ANSWER_COLUMNS:
            raise SloBenchError(
                f"column {column!r} holds the answer, which is unknown when a request "
                "arrives; name other columns"
            )


def prompt_key(prompt: str) -> str:
    """Hash of a prompt, ignoring case and white space; 16 hexadecimal digits."""
    return hashlib.sha256(" ".join(prompt.casefold().split()).encode()).hexdigest()[:16]


def split_by_prompt(
    rows: Sequence[LabelledPrompt], shares: Mapping[str, float], seed: int
) -> dict[str, list[LabelledPrompt]]:
    """Rows by part: all rows with the same prompt are in the same part, independent of the other
    data.

    `shares` are of the prompts and sum to 1; the part of a prompt depends on it and the seed alone.
    """
    parts: dict[str, list[LabelledPrompt]] = {name: [] for name in shares}
    for row in rows:
        digest = hashlib.sha256(f"{seed} {prompt_key(row.prompt)}".encode()).digest()
        left = int.from_bytes(digest[:8]) / 2**64
        for name, share in shares.items():
            chosen, left = name, left - share
            if left < 0:
                break
        parts[chosen].append(row)
    return parts


def _objects(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a file with the line, or the place in the array, where each stands.

    `notes` gets what was left out.
    """
    if ".csv" in path.suffixes:
        rows = csv.DictReader(lines(path))
        for place, cells in enumerate(rows, 2):
            yield place, {name: _number(text) for name, text in cells.items() if name and text}
        return
    numbered = [(number, text) for number, text in enumerate(lines(path), 1) if text.strip()]
    if not numbered:
        raise FileFormatError(path, None, "the file is empty")
    first = numbered[0][1].lstrip()[0]
    if first not in "{[" and (logged := logged_requests(path, numbered, notes)):
        yield from logged
        return
    if first != "[":
        for number, text in numbered:
            yield number, parse_object(path, number, text)
        return
    try:
        data = parse_json("".join(text for _, text in numbered))
    except json.JSONDecodeError as error:
        raise FileFormatError(path, error.lineno, f"not readable as JSON: {error.msg}") from error
    for place, item in enumerate(data, 1):
        if not isinstance(item, dict):
            raise FileFormatError(path, None, f"element {place} is no object but {item!r:.40}")
        yield place, item


def _number(text: str) -> str | int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text


def at_path(row: object, path: str) -> Any:
    """What stands at a path such as `choices.0.message.content`; None if nothing does."""
    if isinstance(row, dict) and path in row:
        return row[path]
    for name in path.split("."):
        if isinstance(row, dict):
            row = row.get(name)
        elif isinstance(row, list) and name.isdigit() and int(name) < len(row):
            row = row[int(name)]
        else:
            return None
    return row


def _from_openai(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a log of the chat API as this module's own; others as they are."""
    request = next(
        (prefix for prefix in _OPENAI_REQUEST if at_path(row, f"{prefix}messages")), None
    )
    if request is None:
        return row
    messages = at_path(row, f"{request}messages")
    if not isinstance(messages, list):
        return row
    messages = [m for m in messages if isinstance(m, dict)]
    answer = None
    if messages and messages[-1].get("role") == "assistant":  # a conversation with its answer
        answer = _content(messages.pop())
    fields: dict[str, Any] = {"prompt": "\n".join(filter(None, map(_content, messages)))}
    for prefix in _OPENAI:
        answer = answer or at_path(row, f"{prefix}choices.0.message.content")
        for name, field in (("completion_tokens", "output_tokens"), ("prompt_tokens",) * 2):
            count = at_path(row, f"{prefix}usage.{name}")
            if count is not None:
                fields.setdefault(field, count)
    model = at_path(row, f"{request}model") or at_path(row, "response.model")
    fields |= {"model": model} if model else {}
    fields |= {"output": answer} if isinstance(answer, str) and answer else {}
    return {**row, **fields} if "output_tokens" not in row else {**fields, **row}


def _content(message: dict[str, Any]) -> str | None:
    """Text of a message; of parts those that are text."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else None


@dataclass
class _Reader:
    """Rows of one file, as they are written there, to `LabelledPrompt`."""

    path: Path
    corpus: str
    model: str
    columns: Sequence[str] | None
    tokens: TokenCount
    length: str | None
    counted: int = 0  # answers that we had to count
    empty: int = 0

    def answered(self, place: int, row: dict[str, Any]) -> Iterator[LabelledPrompt]:
        """None for an empty answer, several where several models answered."""
        row = _from_openai(row)
        if self.length is not None:
            row = {**row, "output_tokens": at_path(row, self.length)}
        prompt = self._prompt(place, row)
        counts, texts = row.get("output_tokens"), row.get("outputs")
        if isinstance(counts, dict) or isinstance(texts, dict):
            counts = counts if isinstance(counts, dict) else {}
            texts = texts if isinstance(texts, dict) else {}
            names = [str(name) for name in {**counts, **texts}]
            named = {name: (counts.get(name), texts.get(name)) for name in names}
        else:
            model_name = row.get("model")
            model = model_name if isinstance(model_name, str) and model_name else self.model
            named = {model: (counts, self._text(place, row))}
        prompt_tokens = row.get("prompt_tokens")
        if prompt_tokens is None:
            prompt_tokens = self.tokens.count(prompt)
        prompt_tokens = self._whole(place, "prompt_tokens", prompt_tokens)
        for model, (count, text) in named.items():
            if count is None and text is None:
                raise self._fail(
                    place,
                    "the row has neither output_tokens nor an answer's text "
                    f"({', '.join(TEXT_COLUMNS)}), but {', '.join(row)}",
                )
            if count is None and text:
                count = self.tokens.count(text)
                self.counted += 1
            if not count or text == "":
                self.empty += 1
                continue
            length = self._whole(place, "output_tokens", count)
            yield LabelledPrompt(prompt, prompt_tokens, length, model, self.corpus, text)

    def _prompt(self, place: int, row: dict[str, Any]) -> str:
        if self.columns is not None:
            parts = [at_path(row, name) for name in self.columns]
            missing = [n for n, part in zip(self.columns, parts, strict=True) if part is None]
            if missing:
                raise self._fail(place, f"the row lacks {missing[0]!r}; it has {', '.join(row)}")
        elif "conversations" in row:
            parts = [message.get("value") for message in _messages(row)[:1]]
        else:
            prompt_columns = next((names for names in PROMPT_COLUMNS if names[0] in row), None)
            if prompt_columns is None:
                raise self._fail(
                    place,
                    "the row has no prompt, instruction, question or conversations, but "
                    f"{', '.join(row)}; name the columns that make the prompt",
                )
            parts = [row[prompt_columns[0]], *(row.get(name) for name in prompt_columns[1:])]
        texts = [part for part in parts if part]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise self._fail(place, f"the prompt must be a text but is {parts!r:.60}")
        return "\n".join(texts)

    def _text(self, place: int, row: dict[str, Any]) -> str | None:
        if "conversations" in row:
            return next((message.get("value") for message in _messages(row)[1:2]), None)
        for column in TEXT_COLUMNS:
            text = row.get(column)
            if isinstance(text, list):  # reference answers: the first stands for all
                text = next((answer for answer in text if isinstance(answer, str)), None)
            if isinstance(text, str):
                return text
            if text is not None:
                raise self._fail(place, f"{column} must be a text but is {text!r:.60}")
        return None

    def _whole(self, place: int, column: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
            raise self._fail(
                place,
                f"{column} must be a whole number from 1 to {_MOST_TOKENS} but is {value!r:.40}",
            )
        return value

    def _fail(self, place: int, problem: str) -> FileFormatError:
        return FileFormatError(self.path, place, problem)


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = row["conversations"]
    return [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []


def _refuse_repeated_answers(path: Path, rows: Sequence[LabelledPrompt]) -> None:
    """A prompt column under an innocent name may still hold the answer."""
    telling = [r for r in rows if r.answer and len(r.answer) >= TELLING_CHARACTERS]
    repeating = sum((r.answer or "") in r.prompt for r in telling)
    if repeating > 0.5 * len(telling):
        raise SloBenchError(
            f"{path}: {repeating} of {len(telling)} prompts contain their answer word for word; a "
            "predictor would read its length off. Leave the answer out of the prompt"
        )


def tokenizer_count(folder: Path) -> TokenCount:
    """The tokenizer in a folder, without special tokens; named by its place and its hash.

    Raises:
        SloBenchError: there is none, or the extra torch is not installed.
    """
    need("torch", "a tokenizer")
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json" if folder.is_dir() else folder
    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except OSError:
        raise SloBenchError(
            f"there is no tokenizer in {folder}: it has no tokenizer.json"
        ) from None
    except Exception as error:  # tokenizers raises nothing more precise
        raise SloBenchError(f"{path} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    digest = hashlib.sha256(content).hexdigest()[:12]
    return TokenCount(
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        f"the tokenizer {folder.name} (sha256 {digest}…)",
    )
