"""The events and bodies of answers, as vLLM words them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """A server-sent event with a JSON value."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class CompletionEvents:
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
        """A first event without text."""
        return event(self._choice("", None))

    def tokens(self, count: int, *, last: bool) -> bytes:
        """An event with `count` tokens."""
        if count == 1 and not last:
            return self._token
        return event(self._choice(" tok" * count, "length" if last else None))

    def usage(self, prompt_tokens: int, output_tokens: int) -> bytes:
        """The usage event of `stream_options.include_usage`."""
        counts = self._counts(prompt_tokens, output_tokens)
        return event({**self._base, "choices": [], "usage": counts})

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
        total = prompt_tokens + output_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": total,
        }


def embedding(model: str, inputs: int, prompt_tokens: int) -> dict[str, Any]:
    """The body of an answer of `/v1/embeddings`."""
    data = [{"object": "embedding", "index": k, "embedding": [0.0] * 8} for k in range(inputs)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "model": model, "data": data, "usage": usage}
