"""OpenAI's completions and chat completions on the torch engine: from a body to its last token.

A request has a choice for each prompt and each of its `n` answers. Every choice is a request of the
engine, which the policy schedules on its own. A parameter that the engine does not have is refused
by its name, unless its value asks for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.decisions import ReleaseReason
from ...core.wire import (
    DROPPED,
    REJECTED,
    VLLM_FIELD,
    predicted_length_from_wire,
    priority_from_wire,
    slo_from_wire,
)
from ...engine.torch.live_engine import GenerationRequest, LiveEngine
from ...engine.torch.sequence import Sampling, TokenLogprobs
from ...engine.torch.text import Text, TextStream
from ..http.http_server import Reply, refuse, respond_json

_DEFAULT_TOKENS = 16  # as OpenAI's completions
_MOST_ANSWERS = 128  # n, and texts of a list of prompts times n
_MOST_LOGPROBS = 20

# Parameters that are read, or that say nothing about the answer.
_READ = {
    *("model", "stream", "stream_options", "stop", "n", "best_of", "max_tokens", "min_tokens"),
    *("temperature", "top_p", "top_k", "seed", "ignore_eos", "priority", "logprobs", VLLM_FIELD),
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("return_token_ids", "request_id"),
}
_READ_OF_CHAT = {"messages", "max_completion_tokens", "top_logprobs"}
_READ_OF_COMPLETIONS = {"prompt", "echo"}
# Values of other parameters that ask for nothing.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
}


class BadRequestError(Exception):
    """A request that is refused: the message, the parameter that it is about, and the status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(frozen=True)
class GenerationModel:
    """Served model: its name for clients, its tokenizer, its end tokens and its longest request."""

    name: str
    text: Text
    eos: frozenset[int]
    most_tokens: int


def check_model(body: Mapping[str, Any], name: str) -> None:
    """Raise BadRequestError if the body names another model."""
    model = body.get("model")
    if model is not None and model != name:
        raise BadRequestError(
            f"there is no model {model!r:.100}; this server has {name!r}", "model", 404
        )


def _check_parameters(body: Mapping[str, Any], *, chat: bool) -> None:
    read = _READ | (_READ_OF_CHAT if chat else _READ_OF_COMPLETIONS)
    for name, value in body.items():
        if name in read or value is None or value in ([], {}, ""):
            continue
        if value is False or any(value == neutral for neutral in _NEUTRAL.get(name, ())):
            continue
        raise BadRequestError(f"{name} is not supported by the torch engine", name)


@dataclass
class _Choice:
    """One answer: what comes before it, its text without that, and how much of it was sent."""

    index: int
    echo: str
    request: GenerationRequest
    stream: TextStream
    text: str = ""
    sent: int = 0
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None


class Generation:
    """A client's generation request, from its body to its last token.

    Raises:
        BadRequestError: it asks for what this server cannot do.
        SloBenchError: the model has no tokenizer or chat template that it needs.
    """

    def __init__(
        self, live: LiveEngine, model: GenerationModel, body: Mapping[str, Any], *, chat: bool
    ) -> None:
        check_model(body, model.name)
        _check_parameters(body, chat=chat)
        self._live = live
        self._model = model
        self._chat = chat
        self._stream = _flag(body, "stream")
        self._read_stream_options(body)
        self._stop = _stops(body.get("stop"))
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._top = _top_logprobs(body, chat=chat)
        self._echo = _flag(body, "echo")
        if self._echo and self._top is not None:
            raise BadRequestError("echo with logprobs is not supported by the torch engine", "echo")
        self._hold = max(map(len, self._stop), default=1) - 1  # characters that may begin a stop
        self._echoes, self._prompts = self._read_prompts(body)
        self._events: asyncio.Queue[tuple[int, str, Any]] = asyncio.Queue()
        self._choices = self._make_choices(body)

    # ---------------------------------------------------------------- what is asked

    def _read_stream_options(self, body: Mapping[str, Any]) -> None:
        options = body.get("stream_options")
        if options is not None and not self._stream:
            raise BadRequestError("stream_options go with stream=true", "stream_options")
        if options is not None and not isinstance(options, Mapping):
            raise BadRequestError("stream_options must be an object", "stream_options")
        options = options or {}
        self._usage_at_end = bool(options.get("include_usage"))
        self._usage_always = bool(options.get("continuous_usage_stats"))

    def _read_prompts(self, body: Mapping[str, Any]) -> tuple[list[str], list[list[int]]]:
        """What is repeated before each answer, and the tokens of each prompt."""
        text = self._model.text
        if self._chat:
            return [""], [text.chat(_messages(body.get("messages")))]
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        prompts: list[Any] = prompt if several else [prompt]  # type: ignore[assignment]
        tokens = [self._prompt(entry) for entry in prompts]
        if not self._echo:
            return [""] * len(prompts), tokens
        pairs = zip(prompts, tokens, strict=True)
        echoes = [entry if isinstance(entry, str) else text.decoded(ids) for entry, ids in pairs]
        return echoes, tokens

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._model.text.tokens(prompt) or [0]
        vocabulary = self._live.engine.decoder.config.vocab
        if not (
            isinstance(prompt, list)
            and prompt
            and all(type(token) is int and 0 <= token < vocabulary for token in prompt)
        ):
            raise BadRequestError(
                f"prompt must be a text, ids of tokens below {vocabulary}, one at least, or a list "
                "of either",
                "prompt",
            )
        return prompt

    def _make_choices(self, body: Mapping[str, Any]) -> list[_Choice]:
        copies = body.get("n")
        copies = 1 if copies is None else copies
        if type(copies) is not int or not 1 <= copies * len(self._prompts) <= _MOST_ANSWERS:
            raise BadRequestError(
                f"n must be a whole number above 0, with at most {_MOST_ANSWERS} answers in all, "
                f"but is {copies!r}",
                "n",
            )
        if body.get("best_of") not in (None, copies):
            raise BadRequestError("best_of must be n: no answers are compared", "best_of")
        seed = int(_number(body, "seed", hash(self._id) & 0xFFFF_FFFF, 0, 1 << 62))
        return [
            self._make_choice(body, prompt_index, prompt_index * copies + copy, seed + copy)
            for prompt_index in range(len(self._prompts))
            for copy in range(copies)
        ]

    def _make_choice(
        self, body: Mapping[str, Any], prompt_index: int, index: int, seed: int
    ) -> _Choice:
        prompt = self._prompts[prompt_index]
        max_tokens = self._most_tokens(body, prompt)
        least = int(_number(body, "min_tokens", 0, 0, 1 << 31))
        free = _flag(body, "ignore_eos") or least >= max_tokens
        if least and not free:
            raise BadRequestError("min_tokens below max_tokens is not supported", "min_tokens")
        wire = body.get(VLLM_FIELD)
        wire = wire if isinstance(wire, Mapping) else {}
        logprobs = None if self._top is None else TokenLogprobs(self._top)
        loop = asyncio.get_running_loop()

        def tell(kind: str) -> Callable[[Any], None]:
            def enqueue(value: Any) -> None:
                with contextlib.suppress(RuntimeError):  # the server is gone
                    loop.call_soon_threadsafe(self._events.put_nowait, (index, kind, value))

            return enqueue

        request = GenerationRequest(
            tokens=prompt,
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=_number(body, "temperature", 1.0, 0, 10),
                top_p=_number(body, "top_p", 1.0, 0, 1),
                top_k=max(0, int(_number(body, "top_k", 0, -1, 1 << 31))),
                seed=seed,
            ),
            ends=frozenset() if free else self._model.eos,
            slo=lambda arrival_s: slo_from_wire(wire, arrival_s),
            predicted_output_tokens=predicted_length_from_wire(wire),
            priority=priority_from_wire(wire)
            or int(_number(body, "priority", 0, -(1 << 31), 1 << 31)),
            logprobs=logprobs,
            gave=tell("token"),
            ended=tell("end"),
            lost=tell("lost"),
        )
        stream = TextStream(self._model.text)
        return _Choice(index, self._echoes[prompt_index], request, stream)

    def _most_tokens(self, body: Mapping[str, Any], prompt: list[int]) -> int:
        room = self._model.most_tokens - len(prompt)
        name = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
        requested = body.get(name)
        max_tokens = requested if requested is not None else room if self._chat else _DEFAULT_TOKENS
        if type(max_tokens) is not int or (max_tokens < 1 and requested is not None):
            raise BadRequestError(
                f"{name} must be a whole number above 0 but is {max_tokens!r}", name
            )
        if max_tokens > room or max_tokens < 1:
            raise BadRequestError(
                f"{len(prompt)} prompt and {max(max_tokens, 1)} answer tokens are more than the "
                f"{self._model.most_tokens} that fit",
                name,
            )
        return max_tokens

    # ---------------------------------------------------------------- what is answered

    async def answer(self, reply: Reply) -> None:
        """Generate all answers and send them."""
        running = {choice.index: self._live.submit(choice.request) for choice in self._choices}
        try:
            while running:
                index, kind, value = await self._events.get()
                if index not in running:
                    continue  # cut by a stop text; its last tokens are still under way
                if kind == "lost":
                    del running[index]
                    self._lost(reply, value)
                    return
                choice = self._choices[index]
                self._grow(choice, kind, value)
                if self._stream:
                    self._send(reply, choice, value if kind == "token" else None)
                if choice.reason is not None:
                    r = running.pop(index)
                    if kind != "end":
                        self._live.cancel(r)
            if self._stream:
                if self._usage_at_end:
                    self._event(reply, {**self._frame([]), "usage": self._usage()})
                reply.pieces([b"data: [DONE]\n\n"])
                reply.end()
            else:
                choices = [self._whole(choice) for choice in self._choices]
                respond_json(reply, {**self._frame(choices), "usage": self._usage()})
        finally:
            for r in running.values():
                self._live.cancel(r)

    def _grow(self, choice: _Choice, kind: str, value: Any) -> None:
        """Add a token, or the rest of the text; cut at the first stop text."""
        if kind == "token":
            choice.tokens.append(value)
            if value not in choice.request.ends:
                choice.text += choice.stream.add(value)
        else:
            choice.text += choice.stream.rest()
            choice.reason = value
        cut = _first(choice.text, self._stop)
        if cut is not None:
            choice.text, choice.reason = choice.text[:cut], "stop"

    def _lost(self, reply: Reply, reason: ReleaseReason) -> None:
        message = REJECTED if reason is ReleaseReason.REJECT else DROPPED
        if not reply.begun:
            refuse(reply, 503, message)
            return
        self._event(reply, {"error": {"message": message, "code": 503}})
        reply.end()

    def _send(self, reply: Reply, choice: _Choice, token: int | None) -> None:
        if not reply.begun:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            reply.begin(200, b"OK", headers)
            for other in self._choices:
                if self._chat:
                    first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
                else:
                    first = {"text": other.echo, "logprobs": None}
                if self._chat or other.echo:
                    part = {"index": other.index, **first, "finish_reason": None}
                    self._event(reply, self._frame([part]))
        end = len(choice.text) - (self._hold if choice.reason is None else 0)
        piece = choice.text[choice.sent : max(choice.sent, end)]
        choice.sent += len(piece)
        if piece or token is not None:
            self._event(reply, self._frame([self._part(choice, piece, token, None)]))
        if choice.reason is not None:
            self._event(reply, self._frame([self._part(choice, "", None, choice.reason)]))

    def _part(
        self, choice: _Choice, piece: str, token: int | None, reason: str | None
    ) -> dict[str, Any]:
        """A choice of an event of a stream."""
        fields: dict[str, Any] = {"index": choice.index, "finish_reason": reason}
        last = [len(choice.tokens) - 1] if token is not None else []
        fields["logprobs"] = self._logprobs(choice, last) if last else None
        if self._chat:
            fields["delta"] = {"content": piece} if piece else {}
        else:
            fields["text"] = piece
        if token is not None:
            fields["token_ids"] = [token]
        return fields

    def _whole(self, choice: _Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": choice.index, "finish_reason": choice.reason}
        fields["logprobs"] = self._logprobs(choice, range(len(choice.tokens)))
        if self._chat:
            fields["message"] = {"role": "assistant", "content": choice.text}
        else:
            fields["text"] = choice.echo + choice.text
        fields["token_ids"] = choice.tokens
        return fields

    def _logprobs(self, choice: _Choice, places: Sequence[int]) -> dict[str, Any] | None:
        """Log-probabilities of these tokens, by the model's own distribution."""
        token_logprobs = choice.request.logprobs
        if token_logprobs is None:
            return None
        decoded = self._model.text.decoded
        rows = [(choice.tokens[position], *token_logprobs.entries[position]) for position in places]

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = decoded([token])
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        if self._chat:
            content = [
                {
                    **entry(token, logprob),
                    "top_logprobs": [entry(*alternative) for alternative in top],
                }
                for token, logprob, top in rows
            ]
            return {"content": content, "refusal": None}
        texts = [decoded([token]) for token in choice.tokens[: places[-1] + 1]] if places else []
        offsets = [sum(map(len, texts[:position])) for position in places]
        return {
            "tokens": [texts[position] for position in places],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [
                {decoded([alternative]): value for alternative, value in (*top, (token, logprob))}
                for token, logprob, top in rows
            ],
            "text_offset": offsets,
        }

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion" if self._chat else "text_completion"
        if self._chat and self._stream:
            kind += ".chunk"
        frame = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }
        if self._stream and self._usage_always and choices:
            frame["usage"] = self._usage()
        return frame

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._prompts))
        answers = sum(len(choice.tokens) for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
        }

    @staticmethod
    def _event(reply: Reply, content: Mapping[str, Any]) -> None:
        reply.pieces([b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"])


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with texts as their contents."""
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list with one message at least", "messages")
    return list(_plain_messages(messages))


def _plain_messages(messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError("messages must be objects with a role", "messages")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else None
                if kind != "text" or not isinstance(part.get("text"), str):
                    raise BadRequestError(
                        f"messages: content of type {kind!r:.100} is not supported by the torch "
                        "engine, only text",
                        "messages",
                    )
            content = "".join(part["text"] for part in content)
        if content is not None and not isinstance(content, str):
            raise BadRequestError("messages: content must be text", "messages")
        yield {**message, "content": content or ""}


def _top_logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """Number of alternatives to each token; None: no log-probabilities."""
    logprobs = body.get("logprobs")
    if chat:
        if not _flag(body, "logprobs"):
            if body.get("top_logprobs"):
                raise BadRequestError("top_logprobs go with logprobs=true", "top_logprobs")
            return None
        return int(_number(body, "top_logprobs", 0, 0, _MOST_LOGPROBS))
    if logprobs is None or logprobs is False:
        return None
    return int(_number(body, "logprobs", 0, 0, _MOST_LOGPROBS))


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequestError(f"{name} must be true or false but is {value!r:.100}", name)
    return bool(value)


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequestError(
            f"{name} must be a number from {low} to {high} but is {value!r:.100}", name
        )
    return value


def _stops(stop: object) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise BadRequestError("stop must be a text or a list of texts", "stop")
    return stops


def _first(text: str, stops: list[str]) -> int | None:
    """Position of the first stop text; None if there is none."""
    places = [position for stop in stops if (position := text.find(stop)) >= 0]
    return min(places, default=None)
