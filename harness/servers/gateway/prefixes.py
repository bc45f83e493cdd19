"""Hashes of prompt blocks for routers that compare prefixes; each includes all blocks before.

Blocks are of token ids or characters, as the client sent them; exact blocks of the server's own
tokens are not needed, for a router only compares prompts with each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

BLOCK_IDS = 16
BLOCK_CHARACTERS = 64
MOST_BLOCKS = 4096


def prefix_blocks(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Hashes of the prompt or messages; of several prompts, the first. Empty if unknown."""
    prompt = body.get("prompt", body.get("messages", body.get("input")))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int | dict):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        prompt = json.dumps(prompt, ensure_ascii=False)
    if isinstance(prompt, str):
        return _chained(body, prompt, BLOCK_CHARACTERS)
    if isinstance(prompt, list) and all(isinstance(one, int) for one in prompt):
        return _chained(body, prompt, BLOCK_IDS)
    return ()


def _chained(body: Mapping[str, Any], whole: Sequence[Any], size: int) -> tuple[int, ...]:
    """Hashes of full blocks. The model and salt are the root: others share nothing."""
    before = hash((str(body.get("model")), str(body.get("cache_salt"))))
    found = []
    for start in islice(range(0, len(whole) - size + 1, size), MOST_BLOCKS):
        block = whole[start : start + size]
        before = hash((before, block if isinstance(block, str) else tuple(block)))
        found.append(before)
    return tuple(found)
