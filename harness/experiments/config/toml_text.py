"""TOML for people: written plainly, and errors that name the line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from ....workloads.errors import FileFormatError
from ....workloads.parsing import parse_toml

_HEADER = re.compile(r"\s*\[\[?([^\]]+)\]\]?")
_ASSIGNMENT = re.compile(r"\s*((?:[A-Za-z0-9_.-]|\"[^\"]*\"|'[^']*')+)\s*=")
_KEY_PART = re.compile(r"\"([^\"]*)\"|'([^']*)'|([^.\s]+)")


def read_toml(path: Path) -> tuple[dict[str, object], str]:
    """The table in a file, and the file's text.

    Raises:
        FileFormatError: it cannot be read or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(path, None, f"cannot be read: {error.strerror or error}") from error
    except UnicodeError as error:
        raise FileFormatError(path, None, f"is not UTF-8 text: {error}") from error
    try:
        return parse_toml(text), text
    except tomllib.TOMLDecodeError as error:
        found = re.match(r"(.*) \(at line (\d+), column \d+\)", str(error))
        line = int(found[2]) if found else None
        raise FileFormatError(path, line, f"is not TOML: {found[1] if found else error}") from error


def line_of(text: str, location: Sequence[str | int]) -> int | None:
    """The line that sets `location`, say ("parameters", "vllm", "max_num_seqs"), or the one above
    it.
    """
    wanted = [str(part) for part in location if isinstance(part, str)]
    best, best_line = 0, None
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            here = table
        elif assignment := _ASSIGNMENT.match(line):
            here = table + _parts(assignment[1])
        else:
            continue
        depth = min(len(here), len(wanted))
        if depth > best and here[:depth] == wanted[:depth] and len(here) <= len(wanted):
            best, best_line = depth, number
    return best_line


def _parts(key: str) -> list[str]:
    return [a or b or c for a, b, c in _KEY_PART.findall(key)]


def to_toml(table: Mapping[str, object]) -> str:
    """`table` as TOML: values first, then its tables. None has no word in TOML; it is left out."""
    return tomli_w.dumps(_without_none(table))


def _without_none(table: Mapping[str, object]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in table.items()
        if value is not None
    }
