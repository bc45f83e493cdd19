"""Prompts of sessions: a follow-up holds what the server really answered before.

A request that continues another's context has the prompt of that request as it was sent, the
server's answer to it, the answers of the other requests that it waits for (sub-agents), and a new
message. Its body on file has the new message alone; the rest is put before it when it is due. So a
server's prefix cache acts on the real conversation, as with vLLM's `benchmark_serving_multi_turn`,
AIPerf and GuideLLM.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....workloads.errors import SloBenchError
from ....workloads.request import RequestType
from ....workloads.workload import Workload
from .answers import CompletionResult
from .http_options import HttpOptions, PromptFormat
from .prompts import encode_json, load_encoder

PROMPT_FIELDS = ("prompt", "messages", "input")
_USER = b'{"role":"user","content":"'  # how a new message begins


def contexts_of(workload: Workload, options: HttpOptions) -> array[int]:
    """For each row the request whose context it continues, -1 for none; empty if none does.

    A request continues the one that it follows if it holds all of its prompt: its prefix blocks say
    so, where they are known, and it is longer. A sub-agent's first request has a context of its
    own. A request whose prompt is given as text or messages is sent as it is.
    """
    rows = (workload.follows >= 0).nonzero()[0].tolist()
    if not rows or any(name in options.body for name in PROMPT_FIELDS):
        return array("q")
    contexts = array("q", [-1]) * len(workload)
    for row in rows:
        before = int(workload.follows[row])
        if _continues(workload, row, before):
            contexts[row] = before
    return contexts if max(contexts) >= 0 else array("q")


def _continues(workload: Workload, row: int, before: int) -> bool:
    w = workload
    if any(w.request_type[request_row] != RequestType.GENERATE for request_row in (row, before)):
        return False
    sources = [source for source in (w.texts, w.bodies) if source is not None]
    if any(source[request_row] is not None for source in sources for request_row in (row, before)):
        return False
    alike = all(column[row] == column[before] for column in (w.class_index, w.model_index))
    if not alike or w.prompt_tokens[row] <= w.prompt_tokens[before]:
        return False
    if w.prefix_blocks is None:
        return True
    whole = int(w.prompt_tokens[before]) // w.prefix_block_size
    held, blocks = w.prefix_blocks[before][:whole], w.prefix_blocks[row]
    return blocks[: len(held)] == held


def answers_held(workload: Workload, row: int) -> Iterator[tuple[int, int]]:
    """The requests whose answers stand in the prompt of a row that continues one, in their order,
    and how many tokens of each, by the lengths of the workload.

    Where a prompt has no place for all of an answer (think tokens are left out of later prompts),
    it holds its end. A new message has one token at least.
    """
    before = int(workload.follows[row])
    joins = workload.joins[row] if workload.joins is not None else ()
    room = int(workload.prompt_tokens[row] - workload.prompt_tokens[before]) - 1
    types = workload.request_type
    generated = (joined for joined in joins if types[joined] == RequestType.GENERATE)
    for other in dict.fromkeys((before, *generated)):
        tokens = min(room, int(workload.output_tokens[other]))
        room -= tokens
        yield other, tokens


def tokens_before(workload: Workload, row: int) -> int:
    """Tokens in the prompt of a row that continues one before its new message."""
    held = sum(tokens for _, tokens in answers_held(workload, row))
    return int(workload.prompt_tokens[workload.follows[row]]) + held


def encode_body(body: Mapping[str, Any]) -> str:
    """A request's body in JSON with its prompt last, after the only line break; that of an
    embedding request as it is.
    """
    name = next((name for name in PROMPT_FIELDS if name in body), None)
    if name is None or (name == "input" and not _is_conversation(body[name])):
        return encode_json(body)
    rest = {field: value for field, value in body.items() if field != name}
    return f'{encode_json(rest)[:-1]},"{name}":\n{encode_json(body[name])}}}'


def _is_conversation(prompt: object) -> bool:
    """Whether an `input` is messages, and not texts or token ids to embed."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


class Conversations:
    """Prompts and answers of the sessions that one process sends, as long as they are needed."""

    def __init__(self, workload: Workload, contexts: Sequence[int], options: HttpOptions) -> None:
        self._contexts = contexts
        self._workload = workload
        self._chat = options.api.takes_messages
        self._in_ids = not self._chat and options.prompt_format is not PromptFormat.TEXT
        self._tokenizer = options.tokenizer
        self._holds: dict[int, dict[int, int]] = {}  # row: requests whose answers it holds
        self._needed: Counter[int] = Counter()  # by how many rows that have not ended
        for row, before in enumerate(contexts):
            if before >= 0:
                self._holds[row] = dict(answers_held(workload, row))
                self._needed.update(self._holds[row].keys())
        self._prompts: dict[int, bytes] = {}  # as sent, without the brackets or quotes around it
        self._answers: dict[int, CompletionResult] = {}

    def needs(self, row: int) -> bool:
        """Whether a later prompt holds the answer of a row."""
        return self._needed[row] > 0

    def body(self, row: int, kept: bytes) -> bytes:
        """The body of a row's request as it is sent; `kept` is the one on file."""
        fields, _, message = kept.partition(b"\n")
        if not message:
            return kept
        first, new, last = message[:1], message[1:-2], message[-2:]
        prompt = self._prompts.get(row)
        if prompt is None:
            prompt = self._prompt(row, new) if row in self._holds else new
            self._prompts[row] = prompt
        return b"".join((fields, first, prompt, last))

    def _prompt(self, row: int, new: bytes) -> bytes:
        before = self._contexts[row]
        context = self._prompts[before]
        if self._in_ids:
            ids = (self._ids(*held) for held in self._holds[row].items())
            return b",".join((context, *filter(None, ids), new))
        if not self._chat:
            return context + b"".join(map(self._text, self._holds[row])) + b" " + new
        answer = {"role": "assistant", "content": _whole(self._answers[before].content)}
        joined = [self._text(other) + b"\\n" for other in self._holds[row] if other != before]
        message = _USER + b"".join(joined) + new.removeprefix(_USER)
        return b",".join((context, encode_json(answer).encode(), message))

    def _text(self, row: int) -> bytes:
        return encode_json(_whole(self._answers[row].content))[1:-1].encode()

    def _ids(self, row: int, tokens: int) -> bytes:
        answer = self._answers[row]
        ids = answer.token_ids
        if len(ids) > tokens and tokens < self._workload.output_tokens[row]:
            ids = ids[len(ids) - tokens :]
        return ",".join(map(str, ids)).encode()

    def ended(self, row: int, answer: CompletionResult | None) -> None:
        """Keep the answer of a row that later prompts hold; None: it failed or was never sent, or
        no later prompt holds it.

        Raises:
            SloBenchError: prompts are token ids, and the server returns none with its answer.
        """
        for other in self._holds.get(row, ()):
            self._needed[other] -= 1
            self._forget(other)
        if answer is None or not self._needed[row]:
            self._needed[row] = 0
            self._forget(row)
            return
        if self._in_ids and not answer.token_ids and answer.content:
            answer.token_ids = self._encoded(answer.content)
        self._answers[row] = answer

    def _encoded(self, text: str) -> list[int]:
        encoder = None if self._tokenizer is None else load_encoder(self._tokenizer)
        if encoder is None:
            raise SloBenchError(
                "follow-ups hold the answers before them, and this server does not return their "
                "token ids (return_token_ids of vLLM and SGLang); use --prompt-format text, "
                "--api chat, or --tokenizer with the folder of the served model's tokenizer"
            )
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids

    def _forget(self, row: int) -> None:
        if not self._needed[row]:
            self._prompts.pop(row, None)
            self._answers.pop(row, None)


def _whole(text: str) -> str:
    """A text without halves of characters, as streams of single tokens have them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
