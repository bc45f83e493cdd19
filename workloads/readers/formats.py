"""Trace formats (`FORMATS`): names, how a file is recognised, readers. CSV and timed JSON lines are
read here.

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import FileFormatError, SloBenchError, UnknownNameError
from ..file_cache import depends_on
from ..request import SLO_COLUMNS, RequestType
from .agents import RecordedTasks, first_object, read_otel, read_weka
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

BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024, 8, 4, 2, 1)


def timed_jsonl(
    time: str, prompt: str, output: str, unit_s: float = 1.0, kind: Sequence[str] = ()
) -> Callable[[Path], WorkloadTrace]:
    """A reader of a JSON object a line with these keys, and `hash_ids` if there are any.

    `time` is in units of `unit_s`; the column `kind`, if there is one, becomes the class.
    """

    def read_timed(path: Path) -> WorkloadTrace:
        table = read_jsonl(path, (time, prompt, output), ("hash_ids", *kind))
        prompt_tokens, output_tokens = table.ints(prompt), table.ints(output)
        kept = served(prompt_tokens, output_tokens, table)
        values: dict[str, Any] = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        if any(table.columns["hash_ids"]):
            block_size = _block_size(table, prompt_tokens.tolist())
            values["prefix_block_size"] = block_size
            values["prefix_blocks"] = _full_blocks(table, prompt_tokens.tolist(), block_size)
        if kind and any(table.columns[kind[0]]):
            values["class_index"], values["class_names"] = table.names(kind[0])
        # Milliseconds are whole numbers: dividing is exact where multiplying by 0.001 is not.
        arrival_s = table.floats(time)
        arrival_s = (arrival_s - np.min(arrival_s)) / round(1 / unit_s)
        return in_order(table, arrival_s, values, kept)

    return read_timed


def _block_size(table: FileTable, prompt_tokens: list[int]) -> int:
    """The block size under which each prompt has as many hashes as blocks."""
    hashes = table.columns["hash_ids"]
    for row, row_hashes in enumerate(hashes):
        if not isinstance(row_hashes, list) or not all(type(h) is int for h in row_hashes):
            raise table.fail(row, "hash_ids must be a list of whole numbers")
    rows = [row for row in range(min(len(table), 200)) if hashes[row]]
    for size in BLOCK_SIZES:
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
    return in_order(table, table.times_s(AZURE[0]), values, kept)


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
    return in_order(table, table.floats(BURSTGPT[0]), values, kept)


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
    return replace(in_order(table, arrival_s, values), has_arrivals=has_arrivals)


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


@dataclass(frozen=True)
class FirstLine:
    """The first line of a file with text on it, as what it may be; empty where it is not."""

    path: Path
    number: int
    text: str

    @property
    def begins(self) -> str:
        """The first character after space."""
        return self.text.lstrip()[0]

    @cached_property
    def document(self) -> Collection[str]:
        """Keys of the JSON object that begins here, over any number of lines."""
        return first_object(self.path, self.text) if self.begins == "{" else ()

    @cached_property
    def keys(self) -> Collection[str]:
        """Keys of the JSON object on this line."""
        return parse_object(self.path, self.number, self.text) if self.begins == "{" else ()

    @property
    def log(self) -> Collection[str]:
        """`vllm` if a request of vLLM's is logged."""
        return ("vllm",) if self.begins not in "[{" and is_vllm_log(self.path) else ()

    @cached_property
    def columns(self) -> Collection[str]:
        """Columns of a CSV header."""
        if self.begins in "[{":
            return ()
        return [name.strip() for name in next(csv.reader([self.text]))]

    def unknown(self) -> FileFormatError:
        """The error for a file of no format: what it has, and what it lacks."""
        if self.begins == "{":
            return FileFormatError(
                self.path,
                self.number,
                "the object has neither timestamp and input_length, nor arrival_s and "
                f"prompt_tokens, nor prompt, but {', '.join(self.keys)}",
            )
        missing = [name for name in ("prompt_tokens", "output_tokens") if name not in self.columns]
        return FileFormatError(
            self.path,
            1,
            f"the header lacks {' and '.join(missing)}; a workload needs "
            "arrival_s,prompt_tokens,output_tokens (or Azure's or BurstGPT's header), not "
            f"{','.join(self.columns)[:80]!r}",
        )


@dataclass(frozen=True)
class Format:
    """A trace format: recognised by all words of `header` in what `part` reads of the first line.

    Without a header it is read only by its name.
    """

    name: str
    read: Callable[[Path], WorkloadTrace | RecordedTasks]
    help: str
    part: Literal["begins", "document", "keys", "log", "columns"] = "begins"
    header: tuple[str, ...] = ()

    def recognises(self, first: FirstLine) -> bool:
        """Whether a file that begins so is of this format."""
        return bool(self.header) and {*self.header} <= {*getattr(first, self.part)}


_TIMED = ("timestamp", "input_length", "output_length")
_PLAIN = ("arrival_s", "prompt_tokens", "output_tokens")
_FORMATS = (
    Format("weka", read_weka, "tasks of agents (AgentX)", "document", ("requests", "block_size")),
    Format("otel", read_otel, "OpenTelemetry spans, OTLP/JSON", "document", ("resourceSpans",)),
    Format(
        "bailian",
        timed_jsonl(*_TIMED, 1.0, ("type",)),
        "Qwen-Bailian",
        "keys",
        (*_TIMED[:2], "chat_id"),
    ),
    Format("mooncake", timed_jsonl(*_TIMED, 1e-3), "Mooncake", "keys", _TIMED[:2]),
    Format("jsonl", timed_jsonl(*_PLAIN), "JSON lines with arrivals", "keys", _PLAIN[:2]),
    Format("custom", read_custom_jsonl, "vLLM's prompts, JSON lines", "keys", ("prompt",)),
    Format("longbench", read_longbench, "a task of LongBench", "keys", ("context", "answers")),
    Format("lengths-jsonl", read_lengths_jsonl, "JSON lines of lengths", "keys", _PLAIN[1:]),
    Format("sharegpt", read_json_array, "ShareGPT, a JSON array", "begins", ("[",)),
    Format("alpaca", read_json_array, "Alpaca, a JSON array"),
    Format("vllm-log", read_vllm_log, "vLLM's log of requests", "log", ("vllm",)),
    Format("azure", read_azure, "Azure 2023 and 2024", "columns", AZURE),
    Format("burstgpt", read_burstgpt, "BurstGPT", "columns", BURSTGPT),
    Format("csv", read_plain_csv, "workload CSV, records of a run", "columns", _PLAIN[1:]),
)
FORMATS = {trace_format.name: trace_format for trace_format in _FORMATS}


def read(path: str | Path, format: str | None = None) -> WorkloadTrace | RecordedTasks:  # noqa: A002
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
    return FORMATS[name].read(path)


def detect_format(path: Path) -> str:
    """The name in `FORMATS` that the first line with text on it speaks for.

    Raises:
        SloBenchError: there is no such file.
        FileFormatError: it is none of the known ones.
    """
    for number, line in enumerate(lines(path), 1):
        if not line.isspace():
            first = FirstLine(path, number, line)
            for name, trace_format in FORMATS.items():
                if trace_format.recognises(first):
                    return name
            raise first.unknown()
    raise FileFormatError(path, None, "the trace is empty")
