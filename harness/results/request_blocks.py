"""Prefix hashes of the requests of a log: those of its prompts where they are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import FileFormatError
from ...workloads.prefixes import BLOCK_SIZE, PrefixRows
from ...workloads.readers.table_reader import read_jsonl

Ints = NDArray[np.int64]

HASH_IDS = "hash_ids.jsonl"


@dataclass(frozen=True)
class RequestBlocks(PrefixRows):
    """Blocks of each request: the shared ones of its prompt first, then its own.

    Attributes:
        blocks: full blocks of prompt and answer, by request.
        shared: hashes (negative) of the leading blocks of each prompt; None: requests share nothing
            and find only blocks that they computed themselves, for example after a preemption.
    """

    blocks: Ints
    shared: Sequence[tuple[int, ...]] | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    def row(self, row: int) -> tuple[int, ...]:
        """Hashes of one request's full blocks."""
        shared = () if self.shared is None else self.shared[row]
        begin = row << 32
        return (*shared, *range(begin + len(shared), begin + int(self.blocks[row])))


def read_hash_ids(
    log: Path, request_ids: Sequence[Any] | None, prompt_tokens: Ints
) -> list[tuple[int, ...]] | None:
    """Shared blocks of the log's prompts from `hash_ids.jsonl` beside it; None without the file.

    A line a request: `request_id`, and `hash_ids` of the full 16-token blocks of its prompt. Equal
    leading ids are equal leading tokens. `request_ids` and `prompt_tokens` are those of the log.

    Raises:
        FileFormatError: the file cannot be read, or lacks a request of the log.
    """
    path = log.parent / HASH_IDS
    if not path.is_file():
        return None
    if request_ids is None:
        raise FileFormatError(log, None, f"has no request_id, which {HASH_IDS} beside it needs")
    table = read_jsonl(path, ("request_id", "hash_ids"))
    blocks_by_request: dict[str, list[int]] = {}
    numbers: dict[int, int] = {}
    for row, (name, hashes) in enumerate(
        zip(table.columns["request_id"], table.columns["hash_ids"], strict=True)
    ):
        if not isinstance(hashes, list) or not all(type(h) is int for h in hashes):
            raise table.fail(row, "hash_ids must be a list of whole numbers")
        if str(name) in blocks_by_request:
            raise table.fail(row, f"request {name!r} has a line before")
        blocks_by_request[str(name)] = [numbers.setdefault(h, -1 - len(numbers)) for h in hashes]
    missing = [str(name) for name in request_ids if str(name) not in blocks_by_request]
    if missing:
        raise FileFormatError(path, None, f"has no line for request {missing[0]!r} of {log.name}")
    return [
        tuple(blocks_by_request[str(name)][: int(tokens) // BLOCK_SIZE])
        for name, tokens in zip(request_ids, prompt_tokens, strict=True)
    ]
