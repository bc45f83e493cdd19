"""The bytes of answers, as vLLM words them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests"}
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: slo-bench-mock\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
END_OF_BODY = b"0\r\n\r\n"


def chunked(body: bytes) -> bytes:
    """One chunk of a body of unknown length."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def whole(status: int, body: object, content_type: str = "application/json") -> bytes:
    """A whole response; text as it is, all else as JSON."""
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    reason = _REASONS.get(status, "Internal Server Error")
    head = (
        f"HTTP/1.1 {status} {reason}\r\nserver: slo-bench-mock\r\n"
        f"content-type: {content_type}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def error(status: int, message: str) -> dict[str, Any]:
    """The body of a refusal."""
    kind = {429: "RateLimitError", 404: "NotFoundError", 400: "BadRequestError"}
    return {"error": {"message": message, "type": kind.get(status, "ServerError"), "code": status}}


class Answer:
    """The events of one answer, for completions or chat."""

    def __init__(self, model: str, number: int, *, chat: bool) -> None:
        self._chat = chat
        self._base: Mapping[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1_700_000_000,
            "model": model,
        }
        # Drawn once: all tokens but the last differ by nothing.
        self._token = event(self._choice(" tok", None))

    def _choice(self, text: str, finish: str | None, **more: Any) -> dict[str, Any]:
        content: dict[str, Any]
        content = {"delta": {"content": text, **more}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**self._base, "choices": [choice]}

    def role(self) -> bytes:
        """The first event of a chat, which holds no token."""
        return event(self._choice("", None, role="assistant"))

    def empty(self) -> bytes:
        """An event without text."""
        return event(self._choice("", None))

    def tokens(self, count: int, *, last: bool) -> bytes:
        """So many tokens in one event."""
        if count == 1 and not last:
            return self._token
        return event(self._choice(" tok" * count, "length" if last else None))

    def usage(self, prompt_tokens: int, output_tokens: int) -> bytes:
        """The event that `stream_options.include_usage` asks for."""
        counts = self._counts(prompt_tokens, output_tokens)
        return event({**self._base, "choices": [], "usage": counts})

    def complete(self, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        """The answer in one piece."""
        text = " tok" * output_tokens
        content: dict[str, Any]
        content = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **(content if self._chat else {"text": text})}
        counts = self._counts(prompt_tokens, output_tokens)
        return {**self._base, "choices": [{**choice, "finish_reason": "length"}], "usage": counts}

    @staticmethod
    def _counts(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
        total = prompt_tokens + output_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": total,
        }


def embedding(model: str, inputs: int, prompt_tokens: int) -> dict[str, Any]:
    """The answer of `/v1/embeddings`."""
    data = [{"object": "embedding", "index": k, "embedding": [0.0] * 8} for k in range(inputs)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "model": model, "data": data, "usage": usage}
