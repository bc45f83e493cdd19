"""The events of every API in one form: the chunks of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from . import messages_events, responses_events


def as_chat(payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what an event, or a whole answer, says as chunks of a chat.

    Those of completions, chat and embeddings are yielded as they are.
    """
    if is_other_api(payload):
        kind = payload.get("type")
        module = messages_events if kind in messages_events.TYPES else responses_events
        yield from module.as_chat(payload)
    else:
        yield payload


def is_other_api(payload: Mapping[str, Any]) -> bool:
    """Whether an event or answer is one of `/v1/responses` or `/v1/messages`."""
    if "choices" in payload:
        return False
    kind = payload.get("type")
    if payload.get("object") == "response":
        return True
    return isinstance(kind, str) and (
        kind in messages_events.TYPES or kind.startswith(responses_events.PREFIX)
    )
