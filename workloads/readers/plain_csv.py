"""The plain CSV: `arrival_s,prompt_tokens,output_tokens` and any other column of a workload.

`workload make` writes it, and the request records of a run have these columns too, so that both
can be replayed. Columns that mean nothing here are left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileFormatError
from ..request import RequestType
from .table import FileTable, read_csv
from .trace import WorkloadTrace, in_order

SLO_COLUMNS = ("ttft_slo_s", "tpot_slo_s", "e2e_slo_s", "deadline_s")


def read_plain_csv(path: Path) -> WorkloadTrace:
    """Read the CSV; without `arrival_s` it has lengths only. An empty SLO cell asks nothing.

    Raises:
        FileFormatError: a row cannot be read.
    """
    table = read_csv(path)
    columns = {
        "prompt_tokens": table.ints("prompt_tokens", low=1),
        "output_tokens": table.ints(_lengths(table), low=1),
    }
    if "request_type" in table:
        columns["request_type"] = _kinds(table)
    for name, empty in (("max_output_tokens", 0), ("priority", 0)):
        if name in table:
            low = -(2**31) if name == "priority" else 0
            columns[name] = table.ints(name, low=low, empty=empty)
    if "num_inputs" in table:
        columns["num_inputs"] = table.ints("num_inputs", low=1, empty=1)
    for name in ("session", "follows"):
        if name in table:
            columns[name] = table.ints(name, low=-1, empty=-1)
    floats = {name: table.floats(name, empty=np.inf) for name in SLO_COLUMNS if name in table}
    if "think_s" in table:
        floats["think_s"] = table.floats("think_s", empty=0.0)
    settings: dict[str, Any] = {}
    for column, index, names in (
        ("class", "class_index", "class_names"),
        ("model", "model_index", "model_names"),
    ):
        if column in table:
            columns[index], settings[names] = table.names(column)
    sequences: dict[str, Any] = {}
    if "prefix_blocks" in table:
        sequences["prefix_blocks"] = [
            _blocks(table, row, cell, most)
            for row, (cell, most) in enumerate(
                zip(table.columns["prefix_blocks"], columns["prompt_tokens"].tolist(), strict=True)
            )
        ]
        if "prefix_block_size" in table:
            settings["prefix_block_size"] = int(table.ints("prefix_block_size", low=1)[0])
    if "follows" in columns and (columns["follows"] >= np.arange(len(table))).any():
        row = int(np.flatnonzero(columns["follows"] >= np.arange(len(table)))[0])
        raise table.fail(row, "follows must name an earlier row, counted from 0")
    has_arrivals = "arrival_s" in table
    arrival_s = table.floats("arrival_s") if has_arrivals else np.zeros(len(table))
    trace = in_order(
        path.name,
        "csv",
        arrival_s,
        np.arange(len(table)),
        {**columns, **floats},
        sequences,
        settings=settings,
    )
    return WorkloadTrace(trace.workload, trace.notes, trace.format, has_arrivals)


def _kinds(table: FileTable) -> np.ndarray:
    """`generate` or `embed`, or their numbers; an empty cell generates."""
    known = {"": RequestType.GENERATE}
    for kind in RequestType:
        known[kind.name.lower()] = known[str(int(kind))] = kind
    cells = [str(cell).strip().lower() for cell in table.columns["request_type"]]
    for row, cell in enumerate(cells):
        if cell not in known:
            raise table.fail(row, f"request_type must be generate or embed but is {cell!r}")
    return np.array([known[cell] for cell in cells], dtype=np.int64)


def _blocks(table: FileTable, row: int, cell: str, most: int) -> tuple[int, ...]:
    """Read `0-13 20 22-25`: `most` blocks, for none holds less than a token."""
    blocks: list[int] = []
    for piece in cell.split():
        first, _, last = piece.partition("-")
        try:
            span = range(int(first), int(last or first) + 1)
        except ValueError:
            raise table.fail(
                row, f"prefix_blocks must look like '0-13 20' but has {piece!r:.40}"
            ) from None
        if not 0 <= span.start < 2**62 or len(blocks) + span.stop - span.start > most:
            raise table.fail(row, f"prefix_blocks names more blocks than its {most} prompt tokens")
        blocks.extend(span)
    return tuple(blocks)


def _lengths(table: FileTable) -> str:
    """The column of true lengths; in a run's records `output_tokens` is what came out."""
    expected = "expected_output_tokens"
    return expected if expected in table else "output_tokens"


def require_columns(path: Path, header: list[str]) -> None:
    """Say what a CSV lacks to be a workload.

    Raises:
        FileFormatError: `prompt_tokens` or `output_tokens` is missing.
    """
    missing = [name for name in ("prompt_tokens", "output_tokens") if name not in header]
    if missing:
        raise FileFormatError(
            path,
            1,
            f"the header lacks {' and '.join(missing)}; a workload needs "
            "arrival_s,prompt_tokens,output_tokens (or Azure's or BurstGPT's header), not "
            f"{','.join(header)[:80]!r}",
        )
