"""Timed JSON lines with prefix block hashes: Mooncake, Bailian, and the same with plain names.

- Mooncake (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0): `timestamp`
  in ms, `input_length`, `output_length`, `hash_ids` of 512-token blocks.
- Qwen-Bailian (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0): the same
  keys and `chat_id`, `turn` and others; `timestamp` in s, 16-token blocks.
- `arrival_s`, `prompt_tokens`, `output_tokens`, and `hash_ids` if there are any.

vLLM's `timed_trace` data set reads the first two forms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileFormatError
from .table import FileTable, WorkloadTrace, in_order, read_jsonl, served

BLOCK_SIZE = (512, 16, 32, 64, 128, 256, 1024, 8, 4, 2, 1)


def read_mooncake(path: Path) -> WorkloadTrace:
    """Read Mooncake's form, `timestamp` in milliseconds.

    Raises:
        FileFormatError: a row cannot be read.
    """
    table = read_jsonl(path, ("timestamp", "input_length", "output_length"), ("hash_ids",))
    return _trace(table, "mooncake", "timestamp", 1e-3, "input_length", "output_length")


def read_bailian(path: Path) -> WorkloadTrace:
    """Read Bailian's form, `timestamp` in seconds; the request type becomes the class.

    Raises:
        FileFormatError: a row cannot be read.
    """
    table = read_jsonl(path, ("timestamp", "input_length", "output_length"), ("hash_ids", "type"))
    return _trace(table, "bailian", "timestamp", 1.0, "input_length", "output_length")


def read_plain_jsonl(path: Path) -> WorkloadTrace:
    """Read `arrival_s`, `prompt_tokens`, `output_tokens`, and `hash_ids` if there are any.

    Raises:
        FileFormatError: a row cannot be read.
    """
    table = read_jsonl(path, ("arrival_s", "prompt_tokens", "output_tokens"), ("hash_ids",))
    return _trace(table, "jsonl", "arrival_s", 1.0, "prompt_tokens", "output_tokens")


def _trace(
    table: FileTable, format_name: str, time: str, unit_s: float, prompt: str, output: str
) -> WorkloadTrace:
    prompt_tokens, output_tokens = table.ints(prompt), table.ints(output)
    kept = served(prompt_tokens, output_tokens, table)
    columns = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    settings: dict[str, Any] = {}
    sequences: dict[str, Any] = {}
    if any(table.columns["hash_ids"]):
        block_size = _block_size(table, prompt_tokens.tolist())
        settings["prefix_block_size"] = block_size
        sequences["prefix_blocks"] = _full_blocks(table, prompt_tokens.tolist(), block_size)
    if any(table.columns.get("type", ())):
        columns["class_index"], settings["class_names"] = table.names("type")
    # Milliseconds are whole numbers: dividing is exact where multiplying by 0.001 is not.
    arrival_s = table.floats(time)
    arrival_s = (arrival_s - np.min(arrival_s)) / round(1 / unit_s)
    return in_order(
        table,
        format_name,
        arrival_s,
        kept.rows,
        columns,
        sequences,
        notes=kept.notes,
        settings=settings,
    )


def _block_size(table: FileTable, prompt_tokens: list[int]) -> int:
    """The block size under which each prompt has as many hashes as blocks."""
    hashes = table.columns["hash_ids"]
    for row, found in enumerate(hashes):
        if not isinstance(found, list) or not all(type(h) is int for h in found):
            raise table.fail(row, "hash_ids must be a list of whole numbers")
    rows = [row for row in range(min(len(table), 200)) if hashes[row]]
    for size in BLOCK_SIZE:
        if all(len(hashes[row]) == -(-prompt_tokens[row] // size) for row in rows):
            return size
    raise FileFormatError(
        table.path,
        table.line[rows[0]] if rows else None,
        "hash_ids fit no block size: a prompt of n tokens needs n / block size of them, rounded up",
    )


def _full_blocks(table: FileTable, prompt_tokens: list[int], size: int) -> list[tuple[int, ...]]:
    """The hashes of full blocks: a block that is only partly filled cannot be shared."""
    hashes = table.columns["hash_ids"]
    return [tuple(h[: n // size]) for h, n in zip(hashes, prompt_tokens, strict=True)]
