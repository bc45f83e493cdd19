"""HTTP requests of a workload: bodies, written before the run and read when due, and heads."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict
from zlib import crc32

import numpy as np

from ....workloads.arrays import Ints
from ....workloads.errors import SloBenchError
from ....workloads.request import Request, RequestType
from ....workloads.request_bodies import with_fields
from ....workloads.workload import Workload
from ...core.wire import PredictedLength, to_wire
from .connection import MOST_BODY_BYTES
from .conversations import Conversations, contexts_of, encode_body, tokens_before
from .endpoint import Endpoint
from .http_options import LEFT_OUT, Api, HttpOptions, PromptFormat, request_head
from .prompts import PromptMaker, Vocabulary, encode_json, load_encoder

# Of an answer, with what frames it. An event of a token with its logprobs takes a few KiB.
_HEAD, _TOKEN = 4 << 20, 16 << 10

_ENDS, _CONTEXTS = ".ends", ".contexts"  # files beside the bodies

# Stands for token ids, which are not encoded one by one. No text has its JSON: quotes are bare.
_IDS_LATER = "\0token ids"
_MOST_ALIKE = 1 << 12  # bodies that are remembered, without their prompts
_IDS_LATER_JSON = b'"prompt":"\\u0000token ids"'

REQUEST_ID = "slo-bench-"  # what `x-request-id` begins with; the row follows


class BodyMaker:
    """Makes the JSON body of a request for its API."""

    def __init__(
        self, workload: Workload, options: HttpOptions, *, ends_of_vocabulary: bool = False
    ) -> None:
        self._options = options
        tokenizer = options.tokenizer
        vocabulary = _vocabulary(options)
        encoder = None
        if tokenizer is not None and any(self._wordy(api) for api in _used(workload, options)):
            encoder = load_encoder(tokenizer)
        # Prompts that differ in their lengths alone would begin alike.
        lengths = crc32(workload.prompt_tokens.tobytes() + workload.output_tokens.tobytes())
        salt = f"{options.salt} {lengths}"
        self._prompts = PromptMaker(vocabulary, workload.prefix_block_size, salt, encoder)
        self._without_ids: dict[tuple[object, ...] | None, bytes] = {}
        self._first_ids = vocabulary.ids[[0, -1]].tolist() if ends_of_vocabulary else []
        uses_messages = any(api.takes_messages for api in _used(workload, options))
        if options.prompt_format is PromptFormat.TOKEN_IDS and uses_messages:
            raise SloBenchError(
                f"the {options.api} API takes no token ids; use --prompt-format text, or "
                "--api completions"
            )

    def encoded(self, request: Request) -> bytes:
        """Return the request body as JSON."""
        alike = None  # what bodies have in common that differ in their prompts alone
        if request.text is None and request.body is None and self._options.values_field is None:
            lengths = request.output_tokens, request.max_output_tokens
            alike = request.model, request.request_type, request.priority, *lengths
        encoded = self._without_ids.get(alike)
        if encoded is None:
            body = self.body(request, ids_later=True)
            encoded = encode_json(body).encode()
            if body.get("prompt") is not _IDS_LATER:
                return encoded
            if alike is not None and len(self._without_ids) < _MOST_ALIKE:
                self._without_ids[alike] = encoded
        ids = self._prompts.token_ids_json(request)
        if self._first_ids:
            ids = encode_json([*self._first_ids, *json.loads(ids)[2:]]).encode()
        return encoded.replace(_IDS_LATER_JSON, b'"prompt":' + ids, 1)

    def body(self, request: Request, first: int = 0, *, ids_later: bool = False) -> dict[str, Any]:
        """Return all fields of the request body; a prompt that is made begins with the token
        `first`. With `ids_later` a mark stands for a prompt of token ids.
        """
        options = self._options
        api = options.api.of(request.request_type)
        body: dict[str, Any] = {}
        if request.model or options.model:
            body["model"] = request.model or options.model
        if api is Api.EMBEDDINGS:
            body["input"] = self._inputs(request)
        elif api.takes_messages:
            name = "input" if api is Api.RESPONSES else "messages"
            body[name] = [{"role": "user", "content": self._prompt(request, api, first)}]
        elif ids_later and request.text is None and not self._wordy(api):
            body["prompt"] = _IDS_LATER
        else:
            body["prompt"] = self._prompt(request, api, first)
        if api is not Api.EMBEDDINGS:
            body |= self._generation(request)
        if request.body is not None:
            body = with_fields(body, request.body, request.id)
        if request.priority:
            body["priority"] = request.priority
        if options.values_field is not None:
            body[options.values_field] = to_wire(request)
        return _renamed({**body, **options.body}, options.rename_fields)

    def _generation(self, request: Request) -> dict[str, Any]:
        """The fields of a request for tokens. The API of OpenAI's responses and Anthropic's
        messages refuses fields that it does not have, so that they cannot ask for exact lengths.
        """
        api, exact = self._options.api, self._options.exact_output
        if api in (Api.RESPONSES, Api.MESSAGES):
            name = "max_output_tokens" if api is Api.RESPONSES else "max_tokens"
            tokens = request.output_tokens if exact else request.max_output_tokens
            return {name: tokens, "stream": True, "temperature": 0}
        common = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        if not exact:
            return {"max_tokens": request.max_output_tokens, **common}
        tokens = request.output_tokens
        return {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, **common}

    def _prompt(self, request: Request, api: Api, first: int = 0) -> str | list[int]:
        if request.text is not None:
            return request.text
        if self._wordy(api):
            return self._prompts.words(request, first)
        return self._prompts.token_ids(request, first)

    def _inputs(self, request: Request) -> str | list[int] | list[str] | list[list[int]]:
        """The texts of an embedding request, of equal length; several as a list."""
        prompt, texts = self._prompt(request, Api.EMBEDDINGS), request.num_inputs
        if texts <= 1:
            return prompt
        if request.text is not None:
            raise SloBenchError(
                f"request {request.id} embeds {texts} texts but has the text of one; leave "
                "num_inputs or the text out"
            )
        length = max(1, request.prompt_tokens // texts)
        starts = range(0, texts * length, length)
        if isinstance(prompt, str):
            words = prompt.split(" ")
            return [" ".join(words[start : start + length]) for start in starts]
        return [prompt[start : start + length] for start in starts]

    def _wordy(self, api: Api) -> bool:
        prompts = self._options.prompt_format
        return prompts is PromptFormat.TEXT or (prompts is PromptFormat.AUTO and api.takes_messages)


def _vocabulary(options: HttpOptions) -> Vocabulary:
    if options.vocabulary:
        return Vocabulary(np.array(options.vocabulary, dtype=np.int64))
    if options.tokenizer is not None:
        return Vocabulary.read(options.tokenizer)
    return Vocabulary.span(*options.token_ids)


def _renamed(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a body that are sent, under the names that the server has for them. Of the two
    limits of tokens the newer one replaces the older.
    """
    if body.get("max_completion_tokens", LEFT_OUT) != LEFT_OUT:
        body = {name: value for name, value in body.items() if name != "max_tokens"}
    return {names.get(name, name): value for name, value in body.items() if value != LEFT_OUT}


def _used(workload: Workload, options: HttpOptions) -> set[Api]:
    return {options.api.of(RequestType(int(kind))) for kind in np.unique(workload.request_type)}


class Bodies:
    """Bodies of all requests in one file, so that memory does not grow with the workload.

    `contexts`: see `contexts_of`; of a request that continues another the body has the new message
    alone, and `Conversations` puts the rest before it.
    """

    def __init__(self, path: Path, ends: array[int], contexts: array[int]) -> None:
        self.path = path
        self.contexts = contexts
        self._file = path.open("rb")
        self._ends = ends

    @classmethod
    def write(
        cls,
        workload: Workload,
        options: HttpOptions,
        path: Path,
        *,
        ends_of_vocabulary: bool = False,
    ) -> Bodies:
        """Write the bodies of all requests. With `ends_of_vocabulary` prompts of token ids begin
        with the smallest and the largest id, as some among many do.

        Raises:
            SloBenchError: a prompt cannot be made, or the file cannot be written.
        """
        maker = BodyMaker(workload, options, ends_of_vocabulary=ends_of_vocabulary)
        contexts = contexts_of(workload, options)
        ends = array("q")
        try:
            with path.open("wb", buffering=1 << 20) as file:
                for request in workload:
                    if contexts:
                        body = cls._of_conversation(maker, request, workload, contexts)
                    else:
                        body = maker.encoded(request)
                    file.write(body)
                    ends.append(file.tell() if not ends else ends[-1] + len(body))
            path.with_suffix(_ENDS).write_bytes(ends.tobytes())
            path.with_suffix(_CONTEXTS).write_bytes(contexts.tobytes())
        except OSError as error:
            raise SloBenchError(f"cannot write {path}: {error.strerror or error}") from error
        return cls(path, ends, contexts)

    @staticmethod
    def _of_conversation(
        maker: BodyMaker, request: Request, workload: Workload, contexts: array[int]
    ) -> bytes:
        continues = contexts[request.id] >= 0
        fields = maker.body(request, tokens_before(workload, request.id) if continues else 0)
        if isinstance(fields.get("prompt"), list):
            fields["return_token_ids"] = True
        return encode_body(fields).encode()

    @classmethod
    def read(cls, path: Path) -> Bodies:
        """Open bodies written by `write`, possibly in another process."""
        ends, contexts = array("q"), array("q")
        ends.frombytes(path.with_suffix(_ENDS).read_bytes())
        contexts.frombytes(path.with_suffix(_CONTEXTS).read_bytes())
        return cls(path, ends, contexts)

    def __getitem__(self, row: int) -> bytes:
        first = self._ends[row - 1] if row else 0
        return os.pread(self._file.fileno(), self._ends[row] - first, first)

    def files_of(self, rows: Collection[int]) -> dict[str, bytes]:
        """Files for `read` with the bodies of these rows; other bodies are empty."""
        bodies = [self[row] if row in rows else b"" for row in range(len(self._ends))]
        ends = array("q", accumulate(map(len, bodies)))
        names = self.path.name, *(self.path.with_suffix(end).name for end in (_ENDS, _CONTEXTS))
        held = b"".join(bodies), ends.tobytes(), self.contexts.tobytes()
        return dict(zip(names, held, strict=True))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Expected(TypedDict):
    """What is known of an answer: its kind, the most tokens it may have (None: unknown), whether
    its reasoning is not to be shown.
    """

    embeds: bool
    most_tokens: int | None
    hides: bool


def _most_tokens(workload: Workload, options: HttpOptions) -> Ints | None:
    """Return the most tokens of each answer as requests say it; None if they leave it open."""
    tokens = workload.output_tokens if options.exact_output else workload.max_output_tokens
    body = options.body
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if name in body]
    copies = body.get("n", 1)
    if not all(type(value) is int for value in (*limits, copies)):
        return None
    per_copy = np.full(len(workload), max(limits)) if limits else tokens
    total_tokens: Ints = np.multiply(per_copy, copies, dtype=np.int64)
    return total_tokens


def _hides(body: Mapping[str, Any]) -> bool:
    """Whether the fields of a request ask for reasoning not to be shown."""
    reasoning, thinking = body.get("reasoning"), body.get("thinking")
    return (
        body.get("include_reasoning") is False  # vLLM, OpenRouter
        or body.get("reasoning_format") == "hidden"  # Groq
        or (isinstance(reasoning, dict) and reasoning.get("exclude") is True)  # OpenRouter
        or (isinstance(thinking, dict) and thinking.get("display") == "omitted")  # Anthropic
    )


class WireRequests:
    """Encodes requests to HTTP bytes. Holds the API key, so never print one."""

    def __init__(
        self,
        workload: Workload,
        endpoints: Sequence[Endpoint],
        options: HttpOptions,
        bodies: Bodies,
    ) -> None:
        extra = options.header_fields()
        self._values = f'"{options.values_field}":{{'.encode()  # no text has these quotes bare
        self._predicted: dict[int, bytes] = {}
        self._bodies = bodies
        self.conversations = (
            Conversations(workload, bodies.contexts, options) if bodies.contexts else None
        )
        self._kinds = [RequestType(kind) for kind in workload.request_type.tolist()]
        self._most_tokens = _most_tokens(workload, options)
        self._hides = _hides(options.body)
        self._embeds = {kind: not options.api.of(kind).streams for kind in RequestType}
        self._heads = [
            {kind: _head(endpoint, options.api.of(kind).path, extra) for kind in RequestType}
            for endpoint in endpoints
        ]

    def of(self, endpoint: int, row: int) -> list[bytes]:
        """Return the HTTP head and body of a row's request."""
        body = self._bodies[row]
        predicted = self._predicted.get(row)
        if predicted is not None:
            body = body.replace(self._values, self._values + predicted, 1)
        if self.conversations is not None:
            body = self.conversations.body(row, body)
        head = self._heads[endpoint][self._kinds[row]]
        return [head % {b"row": row, b"size": len(body)}, body]

    def tell(self, row: int, predicted: PredictedLength) -> None:
        """Put a prediction among the values of a row's request."""
        plain = json.dumps(predicted.to_wire(), separators=(",", ":"))
        self._predicted[row] = plain[1:-1].encode() + b","  # others follow, always

    def expects(self, row: int) -> Expected:
        """Return what is known of a row's answer before it comes."""
        embeds = self._embeds[self._kinds[row]]
        most_tokens = None if embeds or self._most_tokens is None else int(self._most_tokens[row])
        return {"embeds": embeds, "most_tokens": most_tokens, "hides": self._hides}

    def most_bytes(self, row: int) -> int:
        """Return the size in bytes above which a row's answer is broken off."""
        tokens = self.expects(row)["most_tokens"]
        return MOST_BODY_BYTES if tokens is None else min(MOST_BODY_BYTES, _HEAD + _TOKEN * tokens)


def _head(endpoint: Endpoint, path: str, extra: Mapping[str, str]) -> bytes:
    fields = {
        "host": endpoint.authority,
        "user-agent": "slo-bench",
        "accept": "text/event-stream, application/json",
        "accept-encoding": "identity",
        "content-type": "application/json",
        **extra,
    }
    head = request_head("POST", endpoint.target(path), fields).replace(b"%", b"%%")
    if "x-request-id" not in fields:
        head += f"x-request-id: {REQUEST_ID}%(row)d\r\n".encode()
    return head + b"content-length: %(size)d\r\n\r\n"
