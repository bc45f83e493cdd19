"""Events and answers of OpenAI's API `/v1/responses`, as those of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = "response."  # of the types of events
_REASONING = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")
_ARGUMENTS = (
    "response.function_call_arguments.delta",
    "response.custom_tool_call_input.delta",
    "response.mcp_call_arguments.delta",
    "response.code_interpreter_call_code.delta",
)
_TEXTS = ("response.output_text.delta", "response.refusal.delta")
_ENDS = ("response.completed", "response.incomplete", "response.failed")


def as_chat(payload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a chat that say what an event, or a whole answer, says."""
    kind, delta = payload.get("type"), payload.get("delta")
    if kind in _TEXTS:
        yield _chunk({"content": delta})
    elif kind in _REASONING:
        yield _chunk({"reasoning_content": delta})
    elif kind in _ARGUMENTS:
        yield _chunk({"tool_calls": [{"function": {"arguments": delta}}]} if delta else {})
    elif kind in _ENDS:
        yield from _end(payload.get("response"))
    elif payload.get("object") == "response":
        output = payload.get("output")
        for item in output if isinstance(output, list) else ():
            yield from _item(item)
        yield from _end(payload)


def _chunk(delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"choices": [{"delta": delta}]}


def _item(item: object) -> Iterator[dict[str, Any]]:
    """What a part of a whole answer shows: a message, reasoning or a call of a tool."""
    if not isinstance(item, dict):
        return
    if item.get("type") == "function_call":
        yield _chunk({"tool_calls": [{"function": {"arguments": item.get("arguments")}}]})
    name = "reasoning_content" if item.get("type") == "reasoning" else "content"
    parts = [*(item.get("summary") or []), *(item.get("content") or [])]
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield _chunk({name: part["text"]})


def _end(response: object) -> Iterator[dict[str, Any]]:
    if not isinstance(response, dict):
        return
    if response.get("status") == "failed" or response.get("error"):
        yield {"error": response.get("error") or {"message": "the response failed"}}
        return
    finish = "length" if response.get("status") == "incomplete" else "stop"
    yield {"choices": [{"delta": {}, "finish_reason": finish}]}
    usage = response.get("usage")
    if isinstance(usage, dict):
        details = usage.get("input_tokens_details")
        yield {
            "choices": [],
            "usage": {
                "prompt_tokens": usage.get("input_tokens"),
                "completion_tokens": usage.get("output_tokens"),
                "prompt_tokens_details": details,
                "completion_tokens_details": usage.get("output_tokens_details"),
            },
        }
