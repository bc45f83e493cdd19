"""Properties of a request for routers and controllers, read from its body."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ...core.state import RequestState
from ...core.wire import VLLM_FIELD, slo_from_wire, waited_s

# Blocks of the prompt as sent; a router compares prompts with each other only, so the server's own
# tokens are not needed.
BLOCK_IDS = 16
BLOCK_CHARACTERS = 64
MOST_BLOCKS = 4096
CHARACTERS_PER_TOKEN = 4  # of text, roughly: a gateway has no tokenizer
_DEFAULT_TOKENS = 16  # of an answer, where a client does not say


def state_of(
    body: Mapping[str, Any],
    number: int,
    now_s: float,
    prefix_blocks: tuple[int, ...] = (),
) -> RequestState:
    """State of the request numbered `number`, which arrives now, or arrived earlier at the gateway
    that forwarded it.
    """
    output = body.get("max_completion_tokens") or body.get("max_tokens")
    tokens = output if isinstance(output, int) else _DEFAULT_TOKENS
    wire = wire_of(body)
    arrival_s = now_s - waited_s(wire)
    slo = slo_from_wire(wire, arrival_s)
    return RequestState(number, arrival_s, prompt_tokens(body), tokens, tokens, slo, prefix_blocks)


def wire_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inputs of the policy in a request's body (`core.wire`)."""
    inputs = body.get(VLLM_FIELD)
    return inputs if isinstance(inputs, Mapping) else {}


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Number of prompt tokens, at least 1: token ids are counted, text is estimated from its
    length.
    """
    return max(1, _tokens(body.get("prompt", body.get("messages", body.get("input")))))


def _tokens(prompt: object) -> int:
    if isinstance(prompt, str):
        return -(-len(prompt) // CHARACTERS_PER_TOKEN)
    if isinstance(prompt, Mapping):
        return _tokens(prompt.get("content", prompt.get("text")))
    if isinstance(prompt, list):
        ids = sum(isinstance(part, int) for part in prompt)
        return ids + sum(_tokens(part) for part in prompt if not isinstance(part, int))
    return 0


def last_said(body: Mapping[str, Any]) -> str:
    """Text to be answered: the prompt, or the last message of the user; empty if there is none."""
    messages = body.get("messages")
    if isinstance(messages, list):
        users = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
        return _text(users[-1].get("content")) if users else ""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else ""


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))


def prefix_blocks(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Hashes of the blocks of a prompt or of messages, each with all blocks before; of several
    prompts, of the first. Empty if unknown.
    """
    prompt = body.get("prompt", body.get("messages", body.get("input")))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int | dict):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        prompt = json.dumps(prompt, ensure_ascii=False)
    if isinstance(prompt, str):
        return _chained(body, prompt, BLOCK_CHARACTERS)
    if isinstance(prompt, list) and all(isinstance(token_id, int) for token_id in prompt):
        return _chained(body, prompt, BLOCK_IDS)
    return ()


def _chained(body: Mapping[str, Any], whole: Sequence[Any], size: int) -> tuple[int, ...]:
    """Hashes of full blocks. The model and salt are the root: others share nothing."""
    before = hash((str(body.get("model")), str(body.get("cache_salt"))))
    hashes = []
    for start in islice(range(0, len(whole) - size + 1, size), MOST_BLOCKS):
        block = whole[start : start + size]
        before = hash((before, block if isinstance(block, str) else tuple(block)))
        hashes.append(before)
    return tuple(hashes)
