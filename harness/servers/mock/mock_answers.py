"""Handler of the mock server: requests, and their answers in the format of vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from ...core.wire import OFFLOADED
from ..http.http_server import (
    ClientReply,
    Headers,
    HttpRequest,
    error_body,
    refuse,
    respond,
    respond_json,
)
from ..http.prometheus import CONTENT_TYPE
from .mock_config import InjectedFault
from .service import MockJob, Service, Truth

_AT_ONCE = {
    InjectedFault.REFUSED_IN_STREAM: (400, "cannot be served"),
    InjectedFault.OFFLOADED: (503, f"{OFFLOADED} by the policy"),
}
_REFUSALS = {
    InjectedFault.TOO_LONG: (400, "the prompt is too long"),
    InjectedFault.TOO_MANY: (429, "too many requests"),
    InjectedFault.BROKEN: (500, "out of order"),
}
_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
_DONE = b"data: [DONE]\n\n"
_TOKEN_ID = 7  # of each token, where ids are asked for
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")


class MockHandler:
    """Answers requests by a `Service`. `die` ends the whole server."""

    def __init__(self, service: Service, die: Callable[[], None]) -> None:
        self.die = die
        self._service = service

    async def answer(self, request: HttpRequest, reply: ClientReply) -> None:
        """Answer one HTTP request."""
        if request.method == "GET":
            self._look(request.path, reply)
            return
        body = request.json()
        if body is None:
            refuse(reply, 400, "the body is no JSON object")
        elif request.path not in _PATHS:
            refuse(reply, 404, f"no {request.path} here")
        else:
            await self._generate(request, body, reply)

    def _look(self, path: str, reply: ClientReply) -> None:
        service = self._service
        if path == "/health":
            respond(reply, b"", "text/plain")
        elif path == "/v1/models":
            entry = {"id": service.config.model, "object": "model", "owned_by": "slo-bench"}
            respond_json(reply, {"object": "list", "data": [entry]})
        elif path == "/metrics":
            gauges = {"running": service.running, "waiting": len(service.waiting)}
            lines = [f"vllm:num_requests_{name} {float(n)}\n" for name, n in gauges.items()]
            respond(reply, "".join(lines).encode(), CONTENT_TYPE)
        elif path == "/truth":  # of this mock only: the true times
            respond_json(reply, [dataclasses.asdict(truth) for truth in service.truths])
        else:
            refuse(reply, 404, f"no {path} here")

    async def _generate(
        self, request: HttpRequest, body: dict[str, Any], reply: ClientReply
    ) -> None:
        service = self._service
        fault = service.next_fault()
        refused = _REFUSALS.get(fault) if fault else None
        if fault is InjectedFault.OFFLOADED and not body.get("stream"):
            refused = _AT_ONCE[fault]
        if refused is not None:
            refuse(reply, *refused)
            return
        streamed = Streamed(reply, body, request.path, service, self.die)
        if fault in _AT_ONCE:
            streamed.refuse(*_AT_ONCE[fault])
            return
        ids = [v.decode("latin-1") for n, v in request.headers if n.lower() == b"x-request-id"]
        truth = Truth("".join(ids[-1:]), request.received_s, streamed.prompt_tokens)
        streamed.job = job = MockJob(streamed, truth, streamed.output_tokens, fault)
        try:
            service.submit(job)
            await streamed.over
        finally:
            if not reply.complete or fault is InjectedFault.MALFORMED:
                service.cancel(job)


class Streamed:
    """One answer on its way out."""

    job: MockJob

    def __init__(
        self,
        reply: ClientReply,
        body: dict[str, Any],
        path: str,
        service: Service,
        die: Callable[[], None],
    ) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reply = reply
        self._die = die
        self._chat = path == "/v1/chat/completions"
        self._embeds = path == "/v1/embeddings"
        self._streams = bool(body.get("stream")) and not self._embeds
        self._with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._model = service.config.model
        self._answer = _CompletionEvents(
            self._model,
            service.arrived,
            chat=self._chat,
            token_ids=bool(body.get("return_token_ids")),
        )
        prompt = body.get("messages") or body.get("input") or body.get("prompt") or ""
        self._inputs = len(prompt) if isinstance(prompt, list) and _nested(prompt) else 1
        self.prompt_tokens = _count_tokens(prompt)
        allowed = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        self.output_tokens = 1 if self._embeds else service.config.answer_tokens or allowed

    def refuse(self, status: int, message: str) -> None:
        """Send an error as the first event of a stream."""
        if self._streams:
            self._write(_event(error_body(status, message)) + _DONE)
            self._reply.end()

    def _write(self, events: bytes) -> None:
        if not self._reply.begun:
            self._reply.begin(200, b"OK", _STREAM)
        self._reply.pieces([events])

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def tokens(self, first: int, count: int) -> None:
        """Send an event with `count` tokens, of which `first` is the first."""
        if not self._streams:
            return
        events = b""
        if first == 0 and self._chat:
            events = self._answer.role()
        if first == 0 and self.job.fault is InjectedFault.EMPTY_FIRST:
            events += self._answer.empty()
        last = first + count == self.output_tokens
        self._write(events + self._answer.tokens(count, last=last))

    def finished(self) -> None:
        """Send the end of the answer."""
        reply, tokens = self._reply, self.output_tokens
        if self._embeds:
            respond_json(reply, _embedding(self._model, self._inputs, self.prompt_tokens))
        elif self._streams:
            end = b"" if self.job.fault is InjectedFault.NO_DONE else _DONE
            usage = self._answer.usage(self.prompt_tokens, tokens) if self._with_usage else b""
            if usage + end:
                self._write(usage + end)
            reply.end()
        else:
            respond_json(reply, self._answer.complete(self.prompt_tokens, tokens))
        self._end()

    def failed(self, fault: InjectedFault) -> None:
        """Perform a fault in the middle of the answer."""
        if fault is InjectedFault.MALFORMED:
            self._write(b'data: {"choices": [{"text": \n\n' + _DONE)
            self._reply.end()
            self._reply.stays = False
        elif fault is InjectedFault.RESET:
            self._reply.reset()
        elif fault is InjectedFault.DIE:
            self._die()
            return
        self._end()  # CUT: the connection is closed without the end of the answer


def _nested(contents: list[Any]) -> bool:
    return bool(contents) and not isinstance(contents[0], int)


def _count_tokens(prompt: Any) -> int:
    """Token ids are counted; of text, each word is a token."""
    if isinstance(prompt, str):
        return len(prompt.split())
    if isinstance(prompt, dict):
        return _count_tokens(prompt.get("content") or "")
    if isinstance(prompt, list):
        return sum(1 if isinstance(part, int) else _count_tokens(part) for part in prompt)
    return 0


def _event(value: object) -> bytes:
    """A server-sent event with a JSON value."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class _CompletionEvents:
    """The events of one answer, for completions or chat."""

    def __init__(self, model: str, number: int, *, chat: bool, token_ids: bool) -> None:
        self._chat = chat
        self._token_ids = token_ids
        self._base: Mapping[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1_700_000_000,
            "model": model,
        }
        # Drawn once: all tokens but the last differ by nothing.
        self._token = _event(self._choice(" tok", None, tokens=1))

    def _choice(
        self, text: str, finish: str | None, tokens: int = 0, **more: Any
    ) -> dict[str, Any]:
        content: dict[str, Any]
        content = {"delta": {"content": text, **more}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        if self._token_ids:
            choice["token_ids"] = [_TOKEN_ID] * tokens
        return {**self._base, "choices": [choice]}

    def role(self) -> bytes:
        """The first event of a chat, which holds no token."""
        return _event(self._choice("", None, role="assistant"))

    def empty(self) -> bytes:
        """A first event without text."""
        return _event(self._choice("", None))

    def tokens(self, count: int, *, last: bool) -> bytes:
        """An event with `count` tokens."""
        if count == 1 and not last:
            return self._token
        return _event(self._choice(" tok" * count, "length" if last else None, tokens=count))

    def usage(self, prompt_tokens: int, output_tokens: int) -> bytes:
        """The usage event of `stream_options.include_usage`."""
        counts = self._counts(prompt_tokens, output_tokens)
        return _event({**self._base, "choices": [], "usage": counts})

    def complete(self, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        """The whole answer as one JSON body."""
        text = " tok" * output_tokens
        content: dict[str, Any]
        content = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **(content if self._chat else {"text": text})}
        counts = self._counts(prompt_tokens, output_tokens)
        return {**self._base, "choices": [{**choice, "finish_reason": "length"}], "usage": counts}

    @staticmethod
    def _counts(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
        return {**counts, "total_tokens": prompt_tokens + output_tokens}


def _embedding(model: str, inputs: int, prompt_tokens: int) -> dict[str, Any]:
    """The body of an answer of `/v1/embeddings`."""
    data = [{"object": "embedding", "index": k, "embedding": [0.0] * 8} for k in range(inputs)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "model": model, "data": data, "usage": usage}
