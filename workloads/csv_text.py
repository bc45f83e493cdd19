"""Words in CSV files that spreadsheets would take for formulas (CWE-1236).

Names come from traces, servers and files of strangers; one that begins like a formula gets an
apostrophe before it, which spreadsheets do not show, and loses it when we read it back.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

_BEGIN_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
_MARK = "'"


def guarded(word: str) -> str:
    """The word as it may stand in a CSV file. Numbers are no words: give none."""
    return f"{_MARK}{word}" if word.lstrip(_MARK).startswith(_BEGIN_FORMULAS) else word


def unguarded(cell: str) -> str:
    """The word without the apostrophe that `guarded` added."""
    begins = cell.startswith(_MARK) and cell.lstrip(_MARK).startswith(_BEGIN_FORMULAS)
    return cell[len(_MARK) :] if begins else cell


def csv_bytes(rows: Iterable[Iterable[object]]) -> bytes:
    """The rows as lines of CSV; None is an empty field."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
