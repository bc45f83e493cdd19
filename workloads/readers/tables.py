"""Tables of requests: CSV or JSON lines with columns of a workload, under their names or others.

`workload make` writes the CSV, and the request records of a run have these columns too, so that
both can be replayed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Ints
from ..errors import FileFormatError
from ..request import SLO_COLUMNS, RequestType
from .columns import WHOLE, parse_columns, renamed
from .table_reader import (
    FileTable,
    WorkloadTrace,
    in_order,
    lines,
    read_csv,
    read_flat_jsonl,
    served,
)

BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024, 8, 4, 2, 1)
_USUAL = 6  # of them


def read_table(path: Path, columns: str | None = None) -> WorkloadTrace:
    """Read a CSV with a header, or a JSON object a line; without arrivals it has lengths only. An
    empty SLO cell asks nothing. Requests without an answer are left out.

    Args:
        path: of the file.
        columns: the file's names of a workload's columns (`parse_columns`).

    Raises:
        FileFormatError: a row cannot be read, or a column is not there.
    """
    first = next((line for line in lines(path) if not line.isspace()), "")
    as_read = read_flat_jsonl(path) if first.lstrip().startswith("{") else read_csv(path)
    table = renamed(as_read, parse_columns(columns))
    prompt_tokens = table.ints("prompt_tokens", empty=0)  # those that failed have none
    output_tokens = table.ints(_lengths(table), empty=0)
    kept = served(prompt_tokens, output_tokens, table)
    values: dict[str, Any] = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    if "request_type" in table:
        values["request_type"] = _kinds(table)
    for name, (low, empty) in WHOLE.items():
        if name in table:
            values[name] = table.ints(name, low=low, empty=empty)
    for name, absent in (*((name, np.inf) for name in SLO_COLUMNS.values()), ("think_s", 0.0)):
        if name in table:
            values[name] = table.floats(name, empty=absent)
    for column in ("class", "model"):
        if column in table:
            values[f"{column}_index"], values[f"{column}_names"] = table.names(column)
    if "prefix_blocks" in table:
        values["prefix_blocks"] = [
            _blocks(table, row, cell, max_blocks)
            for row, (cell, max_blocks) in enumerate(
                zip(table.cells("prefix_blocks"), prompt_tokens.tolist(), strict=True)
            )
        ]
        if "prefix_block_size" in table:
            values["prefix_block_size"] = int(table.ints("prefix_block_size", low=1)[0])
    if "joins" in table:
        values["joins"] = [
            _joined(table, row, cell) for row, cell in enumerate(table.cells("joins"))
        ]
        values.setdefault("follows", np.full(len(table), -1))
    if "follows" in values:
        _check_followed(table, values["follows"], output_tokens)
    values |= hashed_blocks(table, prompt_tokens)
    has_arrivals = "arrival_s" in table
    arrival_s = table.floats("arrival_s") if has_arrivals else np.zeros(len(table))
    return replace(in_order(table, arrival_s, values, kept), has_arrivals=has_arrivals)


def _check_followed(table: FileTable, follows: Ints, output_tokens: Ints) -> None:
    """Raise FileFormatError for a row that follows no earlier one, or one without an answer."""
    late = np.flatnonzero(follows >= np.arange(len(table)))
    if len(late):
        raise table.fail(int(late[0]), "follows must name an earlier row, counted from 0")
    for followed in follows[follows >= 0]:
        if output_tokens[followed] < 1:
            raise table.fail(
                int(followed), "a request that others follow must have an output token at least"
            )


def _joined(table: FileTable, row: int, cell: str) -> tuple[int, ...]:
    """Read `3 5`: rows before this one."""
    try:
        rows = tuple(map(int, cell.split()))
    except ValueError:
        raise table.fail(row, f"joins must look like '3 5' but is {cell!r:.40}") from None
    if not all(0 <= earlier < row for earlier in rows):
        raise table.fail(row, "joins must name earlier rows, counted from 0")
    return rows


def _kinds(table: FileTable) -> np.ndarray:
    """`generate` or `embed`, or their numbers; an empty cell generates."""
    kinds = {"": RequestType.GENERATE}
    for kind in RequestType:
        kinds[kind.name.lower()] = kinds[str(int(kind))] = kind
    cells = [str(cell).strip().lower() for cell in table.cells("request_type")]
    for row, cell in enumerate(cells):
        if cell not in kinds:
            raise table.fail(row, f"request_type must be generate or embed but is {cell!r}")
    return np.array([kinds[cell] for cell in cells], dtype=np.int64)


def _blocks(table: FileTable, row: int, cell: str, max_blocks: int) -> tuple[int, ...]:
    """Read `0-13 20 22-25`: at most `max_blocks` blocks, for none holds less than a token."""
    blocks: list[int] = []
    for piece in cell.split():
        first, _, last = piece.partition("-")
        try:
            span = range(int(first), int(last or first) + 1)
        except ValueError:
            raise table.fail(
                row, f"prefix_blocks must look like '0-13 20' but has {piece!r:.40}"
            ) from None
        if not 0 <= span.start < 2**62 or len(blocks) + span.stop - span.start > max_blocks:
            raise table.fail(
                row, f"prefix_blocks names more blocks than its {max_blocks} prompt tokens"
            )
        blocks.extend(span)
    return tuple(blocks)


def _lengths(table: FileTable) -> str:
    """The column of true lengths; in a run's records `output_tokens` is what came out."""
    expected = "expected_output_tokens"
    return expected if expected in table else "output_tokens"


def hashed_blocks(table: FileTable, prompt_tokens: Ints) -> dict[str, Any]:
    """Prefix blocks by the column `hash_ids`, and those of the answer by `answer_hash_ids`, which
    begin with the block that the prompt does not fill; nothing if it is not there.

    Raises:
        FileFormatError: the hashes are no whole numbers, or fit no size of blocks.
    """
    if "hash_ids" not in table or not any(table.cells("hash_ids")):
        return {}
    size = _block_size(table, prompt_tokens.tolist())
    return {
        "prefix_block_size": size,
        "prefix_blocks": _full_blocks(table, prompt_tokens.tolist(), size),
    }


def _block_size(table: FileTable, prompt_tokens: list[int]) -> int:
    """The block size under which each prompt has as many hashes as blocks, or as full ones."""
    hashes = table.cells("hash_ids")
    for row, row_hashes in enumerate(hashes):
        if not isinstance(row_hashes, list) or not all(type(h) is int for h in row_hashes):
            raise table.fail(row, "hash_ids must be a list of whole numbers")
    rows = [row for row in range(len(table)) if hashes[row]]
    for sizes in (BLOCK_SIZES[:_USUAL], BLOCK_SIZES[_USUAL:]):
        for up in (True, False):
            for size in sizes:
                rest = size - 1 if up else 0
                if all(len(hashes[row]) == (prompt_tokens[row] + rest) // size for row in rows):
                    return size
    raise FileFormatError(
        table.path,
        table.line[rows[0]] if rows else None,
        "hash_ids fit no block size: a prompt of n tokens needs n / block size of them, rounded",
    )


def _full_blocks(table: FileTable, prompt_tokens: list[int], size: int) -> list[tuple[int, ...]]:
    """The hashes of full blocks: a block that is only partly filled cannot be shared."""
    hashes = table.cells("hash_ids")
    blocks = [tuple(h[: n // size]) for h, n in zip(hashes, prompt_tokens, strict=True)]
    if "answer_hash_ids" not in table:
        return blocks
    return [(*b, *(more or ())) for b, more in zip(blocks, _answer_hashes(table), strict=True)]


def _answer_hashes(table: FileTable) -> list[list[int]]:
    cells = table.cells("answer_hash_ids")
    for row, hashes in enumerate(cells):
        if hashes is not None and not (
            isinstance(hashes, list) and all(type(h) is int for h in hashes)
        ):
            raise table.fail(row, "answer_hash_ids must be a list of whole numbers")
    return cells
