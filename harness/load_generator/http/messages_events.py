"""Events and answers of Anthropic's API `/v1/messages`, as those of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TYPES = (
    *("message", "message_start", "message_delta", "message_stop", "ping"),
    *("content_block_start", "content_block_delta", "content_block_stop"),
)
_STOPS = {"max_tokens": "length", "tool_use": "tool_calls", "refusal": "content_filter"}
# The fields of a delta or block that show something, and what chat calls them.
_SHOWN = {"text": "content", "thinking": "reasoning_content"}


def as_chat(payload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a chat that say what an event, or a whole answer, says."""
    kind = payload.get("type")
    if kind == "message":
        content = payload.get("content")
        for block in content if isinstance(content, list) else ():
            yield from _shown(block)
        yield from _end(payload, payload)
    elif kind == "message_start":
        message = payload.get("message")
        yield from _usage(message if isinstance(message, dict) else {})
    elif kind == "content_block_start":
        yield from _shown(payload.get("content_block"))
    elif kind == "content_block_delta":
        yield from _shown(payload.get("delta"))
    elif kind == "message_delta":
        yield from _end(payload.get("delta"), payload)


def _shown(part: object) -> Iterator[dict[str, Any]]:
    if not isinstance(part, dict):
        return
    arguments = part.get("partial_json")
    for name, chat_name in _SHOWN.items():
        if part.get(name):
            # A text stands in the event as it stands here, so that events like it are recognised.
            delta = {"text": part[name]} if name == "text" else {chat_name: part[name]}
            yield {"choices": [delta if name == "text" else {"delta": delta}]}
    if arguments or part.get("type") == "tool_use":
        function = {"name": part.get("name"), "arguments": arguments}
        yield {"choices": [{"delta": {"tool_calls": [{"function": function}]}}]}


def _end(delta: object, payload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    reason = delta.get("stop_reason") if isinstance(delta, dict) else None
    if isinstance(reason, str):
        yield {"choices": [{"delta": {}, "finish_reason": _STOPS.get(reason, "stop")}]}
    yield from _usage(payload)


def _usage(payload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Counts of tokens: those of the prompt come first, those of the answer last."""
    usage = payload.get("usage")
    if not isinstance(usage, dict):
        return
    counts: dict[str, Any] = {}
    if payload.get("type") != "message_start" and "output_tokens" in usage:
        counts["completion_tokens"] = usage["output_tokens"]
    if isinstance(usage.get("input_tokens"), int):
        read = usage.get("cache_read_input_tokens")
        written = usage.get("cache_creation_input_tokens")
        cached = [n for n in (read, written) if isinstance(n, int)]
        counts["prompt_tokens"] = usage["input_tokens"] + sum(cached)
        if isinstance(read, int):
            counts["prompt_tokens_details"] = {"cached_tokens": read}
    yield {"choices": [], "usage": counts}
