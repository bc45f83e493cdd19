"""Trace formats (`FORMATS`): names, how a file is recognised, readers. CSV and timed JSON lines of
known origin are read here.

- Azure LLM inference traces of 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`. Source:
  https://github.com/Azure/AzurePublicDataset (CC-BY-4.0).
- BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type` and, since
  release 2.0, `Session ID` and `Elapsed time`. Source: https://github.com/HPMLL/BurstGPT
  (CC-BY-4.0). Rows without response tokens are requests that failed at the origin and are left out.
- Tables of requests (`tables`), CSV or a JSON object a line: `arrival_s`, `prompt_tokens`,
  `output_tokens`, or other names for them (`columns`), and any other column of a workload.
- Timed JSON lines with prefix block hashes of Mooncake (https://github.com/kvcache-ai/Mooncake,
  FAST25-release/traces, Apache-2.0): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`
  of 512-token blocks; in traces of several turns `session_id` and `delay` (AIPerf, Dynamo).
- LLMServingSim (https://github.com/casys-kaist/LLMServingSim, workloads/README.md, MIT): rows of
  requests are tables of requests; a row with `sub_requests` is a session of calls, each
  `tool_duration_ns` after the answer before.
- Qwen-Bailian (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0): the same
  keys and `chat_id`, `turn` and others; `timestamp` in s, 16-token blocks.

vLLM's `timed_trace` data set reads the forms of Mooncake and Bailian.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import numpy as np

from ..arrays import Floats, Ints
from ..errors import FileFormatError, SloBenchError, UnknownNameError
from ..file_cache import depends_on
from .agents import RecordedTasks, first_object, read_otel, read_weka
from .columns import UNITS, epoch_unit, roles
from .table_reader import (
    FileTable,
    WorkloadTrace,
    delimiter,
    flat,
    in_order,
    lines,
    objects,
    parse_object,
    read_csv,
    read_jsonl,
    served,
)
from .tables import hashed_blocks, read_table
from .texts import (
    read_batch,
    read_conversations,
    read_custom_jsonl,
    read_json_array,
    read_longbench,
)
from .vllm_log import is_vllm_log, read_vllm_log


def timed_jsonl(unit: str, *, strangers: Sequence[str] = ()) -> Callable[[Path], WorkloadTrace]:
    """A reader of `timestamp`, `input_length`, `output_length` a line, and what else there is of
    `hash_ids`, `session_id` and `delay`.

    `timestamp` and `delay` are in `unit`; times since 1970 in that of their size. A line of a
    session without a timestamp arrives `delay` after the answer to the session's line before. The
    column `type`, if there is one, becomes the class. A key of `strangers` shows that the file has
    another format.
    """

    def read_timed(path: Path) -> WorkloadTrace:
        optional = (_TIMED[0], "hash_ids", "session_id", "delay", "type")
        table = read_jsonl(path, _TIMED[1:], optional)
        if stranger := next((name for name in strangers if name in table.unread), None):
            raise FileFormatError(path, None, f"some lines have {stranger}: give --format bailian")
        prompt_tokens, output_tokens = table.ints(_TIMED[1]), table.ints(_TIMED[2])
        values: dict[str, Any] = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        values |= hashed_blocks(table, prompt_tokens)
        if any(table.columns["type"]):
            values["class_index"], values["class_names"] = table.names("type")
        kept = None
        if None in table.cells(_TIMED[0]):
            arrival, values["follows"] = _turns(table)
            values["session"] = table.names("session_id")[0]
            values["think_s"] = table.floats("delay", empty=0) / UNITS[unit]
        else:
            arrival = table.floats(_TIMED[0])
            kept = served(prompt_tokens, output_tokens, table)
        first = float(np.min(arrival))
        read_as = _timed_unit(table, arrival, unit)
        table = replace(table, notes=(f"arrival_s is read from {_TIMED[0]} ({read_as})",))
        return in_order(table, (arrival - first) / UNITS[read_as], values, kept)

    return read_timed


def _timed_unit(table: FileTable, arrival: Floats, unit: str) -> str:
    """The unit of times that are in `unit`, or since 1970 in the unit of their size.

    Raises:
        FileFormatError: whole ones may be ms of a long trace, or seconds of few requests.
    """
    first = float(np.min(arrival))
    read_as = epoch_unit(first) or unit
    if unit != "ms" or read_as != "s":
        return read_as
    if first < _YEAR_2015_S:  # 12 to 16 days
        return unit
    if np.ptp(arrival) > len(arrival) and not (arrival % 1).any():
        change = (
            f"gzip -dcf {quote(str(table.path))} | jq -c '(.{_TIMED[0]} | numbers) %s' > "
            f"{quote(f'{table.path.stem}.new')}"
        )
        raise FileFormatError(
            table.path,
            None,
            f"{_TIMED[0]}s from {first:.15g} on may be ms of a trace or seconds since 1970; for ms "
            f"run {change % f'-= {first:.15g}'}, for seconds {change % '*= 1000'}",
        )
    return read_as


def _turns(table: FileTable) -> tuple[Floats, Ints]:
    """Arrivals of the lines, and the line that each follows (-1: none); a line that follows has
    the arrival of its session's first.

    Raises:
        FileFormatError: a line has no time and its session no line before it.
    """
    stamps = table.floats(_TIMED[0], empty=np.inf)
    arrival, follows = stamps.copy(), np.full(len(table), -1)
    last: dict[Any, int] = {}
    for row, session in enumerate(table.cells("session_id")):
        if np.isinf(stamps[row]):
            if session is None or session not in last:
                raise table.fail(
                    row, f"the object lacks {_TIMED[0]!r}, and no line before it has its session_id"
                )
            follows[row] = last[session]
            arrival[row] = arrival[last[session]]
        if session is not None:
            last[session] = row
    return arrival, follows


_TIMED = ("timestamp", "input_length", "output_length")
_YEAR_2015_S = 1_420_070_400
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# `request_type` 2 generates, an answer has `token_size` tokens; `batch_size` is 1.
SPLITWISE = ("request_type", "application_id", "arrival_timestamp", "prompt_size", "token_size")
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


def read_splitwise(path: Path) -> WorkloadTrace:
    """Read the CSV of splitwise-sim (https://github.com/Mutinifni/splitwise-sim).

    Raises:
        FileFormatError: a row cannot be read.
    """
    return read_table(path, "arrival_s=arrival_timestamp,request_type=")


_CALLS = "sub_requests"


def read_llmservingsim(path: Path) -> WorkloadTrace:
    """Read sessions of calls, and single requests among them; prompts are whole.

    Raises:
        FileFormatError: a line cannot be read.
    """
    names = ("arrival_time_ns", "input_toks", "output_toks", "tool_duration_ns")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    numbers: list[int] = []
    session: list[int] = []
    follows: list[int] = []
    unread: dict[str, None] = {}
    for number, row in objects(path):
        calls = row.get(_CALLS, [row])
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise FileFormatError(path, number, f"{_CALLS} must be a list of objects")
        for place, call in enumerate(calls):
            follows.append(len(numbers) - 1 if place else -1)
            session.append(number)
            numbers.append(number)
            for name in names:
                columns[name].append((row if name == names[0] else call).get(name))
            unread |= dict.fromkeys(key for key in call if key not in names)
    if not numbers:
        raise FileFormatError(path, None, "the trace is empty; it has no call")
    table = FileTable(path, columns, numbers, tuple(unread))
    arrival_s = table.floats(names[0]) / 1e9
    after_s = np.append(0.0, table.floats(names[3], empty=0) / 1e9)
    values = {
        "prompt_tokens": table.ints(names[1], 1),
        "output_tokens": table.ints(names[2], 1),
        "session": np.array(session),
        "follows": np.array(follows),
        "think_s": after_s[np.array(follows) + 1],
    }
    return in_order(table, arrival_s - np.min(arrival_s), values)


_NAME_THEM = (
    "name them, say in a file with sent,in,out by --columns "
    "arrival_s=sent:ms,prompt_tokens=in,output_tokens=out"
)


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
        """Keys of the JSON object on this line, and what they stand for."""
        if self.begins != "{":
            return ()
        row = parse_object(self.path, self.number, self.text)
        return {**row, **roles(flat(row))}

    @property
    def log(self) -> Collection[str]:
        """`vllm` if a request of vLLM's is logged."""
        return ("vllm",) if self.begins not in "[{" and is_vllm_log(self.path) else ()

    @cached_property
    def columns(self) -> Collection[str]:
        """Columns of a CSV header, and what they stand for."""
        if self.begins in "[{":
            return ()
        header = [
            name.strip() for name in next(csv.reader([self.text], delimiter=delimiter(self.text)))
        ]
        return {**dict.fromkeys(header), **roles(header)}

    def unknown(self) -> FileFormatError:
        """The error for a file of no format: what it has, and what it lacks."""
        if self.begins == "{":
            return FileFormatError(
                self.path,
                self.number,
                "the object has neither timestamp and input_length, nor arrival_s and "
                f"prompt_tokens, nor prompt, but {', '.join(self._literal(self.keys))}; "
                f"{_NAME_THEM}",
            )
        missing = [name for name in ("prompt_tokens", "output_tokens") if name not in self.columns]
        return FileFormatError(
            self.path,
            1,
            f"the header lacks {' and '.join(missing)}; a workload needs "
            "arrival_s,prompt_tokens,output_tokens (or Azure's or BurstGPT's header), not "
            f"{','.join(self._literal(self.columns))[:80]!r}; {_NAME_THEM}",
        )

    def _literal(self, names: Collection[str]) -> list[str]:
        """Those of the names that stand in the line."""
        return [name for name in names if name in self.text]


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


_PLAIN = ("arrival_s", "prompt_tokens", "output_tokens")
_FORMATS = (
    Format("weka", read_weka, "tasks of agents (AgentX)", "document", ("requests", "block_size")),
    Format("otel", read_otel, "OpenTelemetry spans, OTLP/JSON", "document", ("resourceSpans",)),
    Format(
        "bailian",
        timed_jsonl("s"),
        "Qwen-Bailian",
        "keys",
        (*_TIMED[:2], "chat_id"),
    ),
    Format(
        "mooncake",
        timed_jsonl("ms", strangers=("chat_id", "parent_chat_id")),
        "Mooncake",
        "keys",
        _TIMED[:2],
    ),
    Format("llmservingsim", read_llmservingsim, "sessions of calls", "keys", (_CALLS,)),
    Format("jsonl", read_table, "JSON lines with arrivals", "keys", _PLAIN),
    Format("custom", read_custom_jsonl, "vLLM's prompts, JSON lines", "keys", ("prompt",)),
    Format("batch", read_batch, "OpenAI's batch API, JSON lines", "keys", ("custom_id", "body")),
    Format("longbench", read_longbench, "a task of LongBench", "keys", ("context", "answers")),
    Format("lengths-jsonl", read_table, "JSON lines of lengths", "keys", _PLAIN[1:]),
    Format("sharegpt", read_json_array, "ShareGPT, a JSON array", "begins", ("[",)),
    Format(
        "conversations",
        read_conversations,
        "ShareGPT, a JSON object a line",
        "keys",
        ("conversations",),
    ),
    Format("lmsys", read_conversations, "LMSYS, WildChat", "keys", ("conversation",)),
    Format("messages", read_conversations, "chats, a JSON object a line", "keys", ("messages",)),
    Format("alpaca", read_json_array, "Alpaca, a JSON array"),
    Format("vllm-log", read_vllm_log, "vLLM's log of requests", "log", ("vllm",)),
    Format("azure", read_azure, "Azure 2023 and 2024", "columns", AZURE),
    Format("burstgpt", read_burstgpt, "BurstGPT", "columns", BURSTGPT),
    Format("splitwise", read_splitwise, "splitwise-sim", "columns", SPLITWISE),
    Format("csv", read_table, "CSV of requests, records of a run", "columns", _PLAIN[1:]),
)
FORMATS = {trace_format.name: trace_format for trace_format in _FORMATS}


def read(
    path: str | Path,
    format: str | None = None,  # noqa: A002
    columns: str | None = None,
) -> WorkloadTrace | RecordedTasks:
    """Read a trace; without `format` its first line tells which it is. With `columns`
    (`parse_columns`) it is a table of requests, CSV or JSON lines.

    Raises:
        SloBenchError: there is no such file.
        FileFormatError: the file cannot be read as what it is, with the line.
        UnknownNameError: no such format.
    """
    path = Path(path)
    if path.is_dir():
        raise SloBenchError(f"{path} is a folder; name a trace file in it")
    depends_on(path)
    if columns is not None:
        if format not in (None, "csv", "jsonl", "lengths-jsonl"):
            raise SloBenchError(f"columns are of a CSV or JSON lines, not of format {format}")
        return read_table(path, columns)
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
