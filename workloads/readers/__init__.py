"""Trace files: one file per format, plain or gzip, recognised by their first line."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from ..errors import FileFormatError, SloBenchError, UnknownNameError
from . import azure, burstgpt
from .azure import read_azure
from .burstgpt import read_burstgpt
from .plain_csv import read_plain_csv, require_columns
from .table import lines, parse_object
from .texts import read_custom_jsonl, read_json_array, read_lengths_jsonl, read_longbench
from .timed_jsonl import read_bailian, read_mooncake, read_plain_jsonl
from .trace import WorkloadTrace

__all__ = ["FORMATS", "WorkloadTrace", "detect_format", "read"]

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
    header = [name.strip() for name in next(csv.reader([line]))]
    if set(azure.HEADER) <= set(header):
        return "azure"
    if set(burstgpt.HEADER) <= set(header):
        return "burstgpt"
    require_columns(path, header)
    return "csv"
