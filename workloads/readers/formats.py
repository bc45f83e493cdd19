"""Trace formats: each is recognised by its first line; CSV and timed JSON lines are read here.

- Azure LLM inference traces of 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`. Source:
  https://github.com/Azure/AzurePublicDataset (CC-BY-4.0).
- BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type` and, since
  release 2.0, `Session ID` and `Elapsed time`. Source: https://github.com/HPMLL/BurstGPT
  (CC-BY-4.0). Rows without response tokens are requests that failed at the origin and are left out.
- The plain CSV: `arrival_s,prompt_tokens,output_tokens` and any other column of a workload.
  `workload make` writes it, and the request records of a run have these columns too, so that both
  can be replayed. Other columns are ignored.
- Timed JSON lines with prefix block hashes of Mooncake (https://github.com/kvcache-ai/Mooncake,
  FAST25-release/traces, Apache-2.0): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`
  of 512-token blocks.
- Qwen-Bailian (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0): the same
  keys and `chat_id`, `turn` and others; `timestamp` in s, 16-token blocks.
- JSON lines with `arrival_s`, `prompt_tokens`, `output_tokens`, and `hash_ids` if there are any.

vLLM's `timed_trace` data set reads the forms of Mooncake and Bailian.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileFormatError, SloBenchError, UnknownNameError
from ..file_cache import depends_on
from ..request import SLO_COLUMNS, RequestType
from .table_reader import (
    FileTable,
    WorkloadTrace,
    in_order,
    lines,
    parse_object,
    read_csv,
    read_jsonl,
    served,
)
from .texts import read_custom_jsonl, read_json_array, read_lengths_jsonl, read_longbench
from .vllm_log import is_vllm_log, read_vllm_log

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
    values: dict[str, Any] = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    if any(table.columns["hash_ids"]):
        block_size = _block_size(table, prompt_tokens.tolist())
        values["prefix_block_size"] = block_size
        values["prefix_blocks"] = _full_blocks(table, prompt_tokens.tolist(), block_size)
    if any(table.columns.get("type", ())):
        values["class_index"], values["class_names"] = table.names("type")
    # Milliseconds are whole numbers: dividing is exact where multiplying by 0.001 is not.
    arrival_s = table.floats(time)
    arrival_s = (arrival_s - np.min(arrival_s)) / round(1 / unit_s)
    return in_order(table, format_name, arrival_s, values, kept)


def _block_size(table: FileTable, prompt_tokens: list[int]) -> int:
    """The block size under which each prompt has as many hashes as blocks."""
    hashes = table.columns["hash_ids"]
    for row, row_hashes in enumerate(hashes):
        if not isinstance(row_hashes, list) or not all(type(h) is int for h in row_hashes):
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


AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Columns of whole numbers in the plain CSV: the lowest, and what stands for an empty cell.
_WHOLE = {
    "max_output_tokens": (0, 0),
    "priority": (-(2**31), 0),
    "num_inputs": (1, 1),
    **dict.fromkeys(("session", "follows"), (-1, -1)),
}
BURSTGPT = ("Timestamp", "Model", "Request tokens", "Response tokens")


def read_azure(path: Path) -> WorkloadTrace:
    """Read the CSV; timestamps have up to seven decimal digits.

    Raises:
        FileFormatError: a row cannot be read.
    """
    table = read_csv(path)
    prompt_tokens, output_tokens = table.ints(AZURE[1]), table.ints(AZURE[2])
    kept = served(prompt_tokens, output_tokens, table)
    values = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    return in_order(table, "azure", table.times_s(AZURE[0]), values, kept)


def read_burstgpt(path: Path) -> WorkloadTrace:
    """Read the CSV; the log type becomes the class, the called model the model.

    Raises:
        FileFormatError: a row cannot be read.
    """
    table = read_csv(path)
    prompt_tokens, output_tokens = table.ints(BURSTGPT[2]), table.ints(BURSTGPT[3])
    kept = served(prompt_tokens, output_tokens, table)
    values: dict[str, Any] = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    values["model_index"], values["model_names"] = table.names("Model")
    if "Log Type" in table:
        values["class_index"], values["class_names"] = table.names("Log Type")
    return in_order(table, "burstgpt", table.floats(BURSTGPT[0]), values, kept)


def read_plain_csv(path: Path) -> WorkloadTrace:
    """Read the CSV; without `arrival_s` it has lengths only. An empty SLO cell asks nothing.

    Raises:
        FileFormatError: a row cannot be read.
    """
    table = read_csv(path)
    values: dict[str, Any] = {
        "prompt_tokens": table.ints("prompt_tokens", low=1),
        "output_tokens": table.ints(_lengths(table), low=1),
    }
    if "request_type" in table:
        values["request_type"] = _kinds(table)
    for name, (low, empty) in _WHOLE.items():
        if name in table:
            values[name] = table.ints(name, low=low, empty=empty)
    for name, absent in (*((name, np.inf) for name in SLO_COLUMNS.values()), ("think_s", 0.0)):
        if name in table:
            values[name] = table.floats(name, empty=absent)
    for column in ("class", "model"):
        if column in table:
            values[f"{column}_index"], values[f"{column}_names"] = table.names(column)
    if "prefix_blocks" in table:
        prompt_tokens = values["prompt_tokens"].tolist()
        values["prefix_blocks"] = [
            _blocks(table, row, cell, prompt_tokens[row])
            for row, cell in enumerate(table.columns["prefix_blocks"])
        ]
        if "prefix_block_size" in table:
            values["prefix_block_size"] = int(table.ints("prefix_block_size", low=1)[0])
    if "joins" in table:
        values["joins"] = [
            _joined(table, row, cell) for row, cell in enumerate(table.columns["joins"])
        ]
        values.setdefault("follows", np.full(len(table), -1))
    if "follows" in values and (values["follows"] >= np.arange(len(table))).any():
        row = int(np.flatnonzero(values["follows"] >= np.arange(len(table)))[0])
        raise table.fail(row, "follows must name an earlier row, counted from 0")
    has_arrivals = "arrival_s" in table
    arrival_s = table.floats("arrival_s") if has_arrivals else np.zeros(len(table))
    trace = in_order(table, "csv", arrival_s, values)
    return WorkloadTrace(trace.workload, trace.notes, trace.format, has_arrivals)


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
    cells = [str(cell).strip().lower() for cell in table.columns["request_type"]]
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


FORMATS: dict[str, Callable[[Path], WorkloadTrace]] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "csv": read_plain_csv,
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "jsonl": read_plain_jsonl,
    "lengths-jsonl": read_lengths_jsonl,
    "custom": read_custom_jsonl,
    "sharegpt": read_json_array,
    "alpaca": read_json_array,
    "longbench": read_longbench,
    "vllm-log": read_vllm_log,
}


def read(path: str | Path, format: str | None = None) -> WorkloadTrace:  # noqa: A002
    """Read a trace; without `format` its first line tells which it is.

    Raises:
        SloBenchError: there is no such file.
        FileFormatError: the file cannot be read as what it is, with the line.
        UnknownNameError: no such format.
    """
    path = Path(path)
    if path.is_dir():
        raise SloBenchError(f"{path} is a folder; name a trace file in it")
    depends_on(path)
    name = format or detect_format(path)
    if name not in FORMATS:
        raise UnknownNameError("trace format", name, FORMATS)
    return FORMATS[name](path)


def detect_format(path: Path) -> str:
    """The name in `FORMATS` that the first line with text on it speaks for.

    Raises:
        SloBenchError: there is no such file.
        FileFormatError: it is none of the known ones.
    """
    for number, line in enumerate(lines(path), 1):
        if not line.isspace():
            return _format_of(path, number, line)
    raise FileFormatError(path, None, "the trace is empty")


def _format_of(path: Path, number: int, line: str) -> str:
    text = line.lstrip()
    if text.startswith("["):
        return "sharegpt"
    if text.startswith("{"):
        keys = parse_object(path, number, line).keys()
        for needed, name in (
            ({"timestamp", "input_length", "chat_id"}, "bailian"),
            ({"timestamp", "input_length"}, "mooncake"),
            ({"arrival_s", "prompt_tokens"}, "jsonl"),
            ({"prompt"}, "custom"),
            ({"context", "answers"}, "longbench"),
            ({"prompt_tokens", "output_tokens"}, "lengths-jsonl"),
        ):
            if needed <= keys:
                return name
        raise FileFormatError(
            path,
            number,
            "the object has neither timestamp and input_length, nor arrival_s and prompt_tokens, "
            f"nor prompt, but {', '.join(keys)}",
        )
    if is_vllm_log(path):
        return "vllm-log"
    header = [name.strip() for name in next(csv.reader([line]))]
    if set(AZURE) <= set(header):
        return "azure"
    if set(BURSTGPT) <= set(header):
        return "burstgpt"
    require_columns(path, header)
    return "csv"
