"""Lines and columns of a trace file, plain or gzip, and the workload that a reader makes of them.

Errors name the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Floats, Ints
from ..csv_text import unguarded
from ..errors import FileFormatError, SloBenchError
from ..input_files import FIRST_BYTES, check_form, check_input, open_bounded, to_utf8
from ..parsing import parse_json
from ..workload import MOST_S, Workload, renumbered, too_late

NAMED_COLUMNS = 6  # of those that are not used
_USUAL_RPS = (0.005, 2000.0)  # others are more often times that were taken for another unit


def lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, unpacked if it is gzip.

    Raises:
        SloBenchError: there is no such file, or it cannot be read.
        FileFormatError: the gzip stream is broken, a line is not UTF-8, the file has another form
            than text, or the text is larger than the limit (`max_input_bytes`).
    """
    number = 0
    check_input(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with open_bounded(path, packed=packed) as unpacked:
            check_form(path, unpacked.peek(FIRST_BYTES), packed=packed)
            with io.TextIOWrapper(unpacked, encoding="utf-8-sig", newline="") as text:
                for line in text:
                    number += 1
                    yield line
    except UnicodeDecodeError as error:
        # The decoder reads ahead of the lines, so only a lower bound is known.
        place = f"after line {number}" if number else "at its beginning"
        problem = f"the text is not UTF-8 {place}; run, say, {to_utf8(path, 'ISO-8859-1')}"
        raise FileFormatError(path, None, problem) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileFormatError(
            path, number, f"the gzip file is cut short or damaged after this line: {error}"
        ) from error
    except FileNotFoundError:
        raise SloBenchError(f"there is no file {path}") from None
    except OSError as error:
        raise SloBenchError(f"cannot read {path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class FileTable:
    """Columns of a file as they were read, with the line each row began on.

    `unread` are keys of the file that have no column here; `used` the columns that a reader took.
    """

    path: Path
    columns: dict[str, list[Any]]
    line: list[int]
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.line)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def unused(self) -> tuple[str, ...]:
        """A note on what was not used, if anything was not."""
        names = [*(name for name in self.columns if name not in self.used), *self.unread]
        names = [name for name in names if name]  # the numbers of rows have none
        if not names:
            return ()
        more = f" and {len(names) - NAMED_COLUMNS} more" if len(names) > NAMED_COLUMNS else ""
        return (f"not used: {', '.join(names[:NAMED_COLUMNS])}{more}",)

    def fail(self, row: int, problem: str) -> FileFormatError:
        """Error for a row, with its place."""
        return FileFormatError(self.path, self.line[row], problem)

    def cells(self, name: str) -> list[Any]:
        """A column as it was read.

        Raises:
            FileFormatError: the file has no such column.
        """
        if name not in self.columns:
            has = f"{', '.join(self.columns)[:80]}"
            raise FileFormatError(self.path, 1, f"the header lacks {name}; it has {has}")
        self.used.add(name)
        return self.columns[name]

    def floats(self, name: str, low: float = 0.0, empty: float | None = None) -> Floats:
        """A column of numbers from `low` on; `empty` stands for an empty cell.

        Raises:
            FileFormatError: a cell is no number, not a number (NaN) or below `low`.
        """
        cells = self.cells(name)
        if empty is not None:
            cells = [empty if cell in ("", None) else cell for cell in cells]
        values = self._convert(name, cells)
        bad = np.flatnonzero(~(values >= low))
        if len(bad):
            raise self.fail(
                int(bad[0]), f"{name} must be a number from {low:g} on but is {cells[bad[0]]!r}"
            )
        if empty is None or np.isfinite(empty):
            infinite = np.flatnonzero(np.isinf(values))
            if len(infinite):
                raise self.fail(int(infinite[0]), f"{name} must be finite")
        return values

    def ints(self, name: str, low: int = 0, empty: int | None = None) -> Ints:
        """A column of whole numbers from `low` on; `empty` stands for an empty cell.

        Raises:
            FileFormatError: a cell is no whole number or below `low`.
        """
        values = self.floats(name, low, empty)
        # Beyond 2**53 a float no longer tells one whole number from the next.
        bad = np.flatnonzero(~((values == np.floor(values)) & (np.abs(values) <= 2**53)))
        if len(bad):
            raise self.fail(
                int(bad[0]), f"{name} must be a whole number but is {self.columns[name][bad[0]]}"
            )
        whole: Ints = values.astype(np.int64)
        return whole

    def _convert(self, name: str, cells: list[Any]) -> Floats:
        try:
            values = np.array(cells, dtype=np.float64)
            if values.ndim == 1 and bool not in set(map(type, cells)):  # lists make more
                return values
        except (TypeError, ValueError, OverflowError):
            pass
        for row, cell in enumerate(cells):
            try:
                float(str(cell) if isinstance(cell, bool) else cell)
            except (TypeError, ValueError, OverflowError):
                raise self.fail(row, f"{name} must be a number but is {cell!r:.40}") from None
        raise self.fail(0, f"{name} must hold numbers")

    def times_s(self, name: str) -> Floats:
        """A column of dates and times (UTC) as seconds from the first row's.

        Raises:
            FileFormatError: a cell is no date and time.
        """
        cells = [
            str(cell).removesuffix("Z").removesuffix("+00:00").removesuffix(" UTC")
            for cell in self.cells(name)
        ]
        try:
            stamps = _moments(cells)
        except ValueError:
            for row, cell in enumerate(cells):
                try:
                    _moments([cell])
                except ValueError:
                    raise self.fail(
                        row, f"{name} must be a date and time (UTC) but is {cell!r}"
                    ) from None
            raise
        if np.isnat(stamps).any():
            row = int(np.flatnonzero(np.isnat(stamps))[0])
            raise self.fail(row, f"{name} must be a date and time but is {cells[row]!r}")
        since: Floats = (stamps - stamps[0]) / np.timedelta64(1, "s")
        return since

    def names(self, name: str) -> tuple[Ints, tuple[str, ...]]:
        """A column of names as indices into the distinct names, in order of appearance."""
        indices: dict[str, int] = {}
        words = (unguarded(str(cell or "")) for cell in self.cells(name))
        index = [indices.setdefault(word, len(indices)) for word in words]
        return np.array(index, dtype=np.int64), tuple(indices)


def _moments(cells: list[str]) -> NDArray[np.datetime64]:
    """Dates and times; one with a zone is a ValueError, for numpy would drop the zone."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return np.array(cells, dtype="datetime64[ns]")
        except Warning as warning:
            raise ValueError(str(warning)) from None


def delimiter(header: str) -> str:
    """What stands between the columns of a header: a tab or semicolon where there is no comma."""
    return next((mark for mark in ",\t;" if mark in header), ",")


def read_csv(path: Path) -> FileTable:
    """A CSV file with a header.

    Raises:
        FileFormatError: there is no header, no row, a row of another width, or two columns of one
            name.
    """
    text = lines(path)
    first = next(text, "")
    reader = csv.reader(chain([first], text), strict=True, delimiter=delimiter(first))
    rows: list[list[str]] = []
    line: list[int] = []
    try:
        header = [name.strip() for name in next(reader, [])]
        if twice := next((name for name in header if name and header.count(name) > 1), None):
            raise FileFormatError(path, reader.line_num, f"the header has {twice!r} twice")
        for row in reader:
            if not any(row):  # spreadsheets end with rows of commas
                continue
            if len(row) != len(header):
                raise FileFormatError(
                    path, reader.line_num, f"the row has {len(row)} cells, the header {len(header)}"
                )
            rows.append(row)
            line.append(reader.line_num)
    except csv.Error as error:
        raise FileFormatError(path, reader.line_num, f"not readable as CSV: {error}") from error
    if not rows:
        raise FileFormatError(
            path, None, "the trace is empty; it needs a header and a row at least"
        )
    cells = zip(*rows, strict=True)
    return FileTable(path, {name: list(c) for name, c in zip(header, cells, strict=True)}, line)


def read_jsonl(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> FileTable:
    """The named keys of a file with a JSON object a line; a missing optional one is None.

    Raises:
        FileFormatError: a line is no JSON object or lacks a key, or there is none.
    """
    columns: dict[str, list[Any]] = {key: [] for key in (*required, *optional)}
    unread: dict[str, None] = {}
    numbers: list[int] = []
    for number, row in objects(path):
        for key in required:
            if key not in row:
                raise FileFormatError(path, number, f"the object lacks {key!r}")
            columns[key].append(row[key])
        for key in optional:
            columns[key].append(row.get(key))
        if row.keys() - columns.keys():
            unread |= dict.fromkeys(key for key in row if key not in columns)
        numbers.append(number)
    if not numbers:
        raise FileFormatError(path, None, "the trace is empty; it needs a JSON object at least")
    table = FileTable(path, columns, numbers, tuple(unread))
    table.used.update(key for key in optional if not any(columns[key]))  # it is not there
    return table


def read_flat_jsonl(path: Path) -> FileTable:
    """All keys of a file with a JSON object a line, those of inner objects as `usage.tokens`; None
    where an object lacks one.

    Raises:
        FileFormatError: a line is no JSON object.
    """
    numbered = {number: flat(row) for number, row in objects(path)}
    names = dict.fromkeys(name for row in numbered.values() for name in row)
    columns = {name: [row.get(name) for row in numbered.values()] for name in names}
    return FileTable(path, columns, list(numbered))


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """An object with the keys of inner objects as `usage.tokens`."""
    plain: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict) and value:
            plain |= {f"{key}.{inner}": cell for inner, cell in flat(value).items()}
        else:
            plain[key] = value
    return plain


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON object of each line that is not blank, with its number.

    Raises:
        FileFormatError: a line is no JSON object.
    """
    for number, text in enumerate(lines(path), 1):
        if not text.isspace():
            yield number, parse_object(path, number, text)


def parse_object(path: Path, number: int, text: str) -> dict[str, Any]:
    """A JSON object on one line.

    Raises:
        FileFormatError: it is none.
    """
    try:
        row = parse_json(text)
    except ValueError as error:
        raise FileFormatError(path, number, f"not readable as JSON: {error}") from error
    if not isinstance(row, dict):
        raise FileFormatError(path, number, f"each line must be a JSON object, not {text[:40]!r}")
    return row


@dataclass(frozen=True)
class WorkloadTrace:
    """A file as a workload; the first arrival is 0.

    `notes` say what was dropped, assumed or approximated. Without `has_arrivals` the file has
    lengths only, and all arrivals are 0.
    """

    workload: Workload
    notes: tuple[str, ...]
    has_arrivals: bool = True


@dataclass(frozen=True)
class Kept:
    """Rows that were served, and a note on those that were not."""

    rows: Ints
    notes: tuple[str, ...]


def served(prompt_tokens: Ints, output_tokens: Ints, table: FileTable) -> Kept:
    """Drop requests without any output: they failed at the origin.

    Raises:
        FileFormatError: a request got an answer without a prompt, or none got any.
    """
    for row in np.flatnonzero((prompt_tokens < 1) & (output_tokens > 0)):
        raise table.fail(int(row), "a request with an answer must have a prompt token at least")
    rows = np.flatnonzero(output_tokens > 0)
    if not len(rows):
        raise table.fail(0, "no request in the trace has an output token")
    dropped = len(output_tokens) - len(rows)
    share = f"{dropped} of {len(output_tokens)} requests with no output token left out"
    return Kept(rows, (share,) if dropped else ())


def in_order(
    table: FileTable,
    arrival_s: Floats,
    values: Mapping[str, Any],
    kept: Kept | None = None,
) -> WorkloadTrace:
    """A trace of the rows that were kept, or all, sorted by arrival (ties in file order), from 0
    on.

    `values` have names of `Workload`: arrays and lists have all rows of the file, everything else
    holds for all of them.

    Raises:
        FileFormatError: the last arrival is more than `MOST_S` after the first.
    """
    rows, notes = (np.arange(len(table)), ()) if kept is None else (kept.rows, kept.notes)
    order = rows[np.argsort(arrival_s[rows], kind="stable")]
    span_s = float(arrival_s[order[-1]] - arrival_s[order[0]])
    if span_s > MOST_S:
        raise table.fail(int(order[-1]), too_late(span_s))
    if span_s and not _USUAL_RPS[0] < (rate_rps := len(order) / span_s) < _USUAL_RPS[1]:
        notes = (*notes, f"{rate_rps:.3g} req/s in the mean: are the times in another unit?")
    if (np.diff(order) < 0).any():
        notes = (*notes, "the rows were not in order of arrival and have been sorted")
    notes = (*table.notes, *notes, *table.unused())
    picked = {name: _picked(value, order) for name, value in values.items()}
    if "follows" in values:
        where = np.full(len(arrival_s) + 1, -1, dtype=np.int64)
        where[order] = np.arange(len(order))
        picked["follows"] = where[picked["follows"]]
        if "joins" in values:
            picked["joins"] = renumbered(values["joins"], order, where, picked["follows"])
    arrival_s = arrival_s[order]
    workload = Workload(arrival_s=arrival_s - arrival_s[0], name=table.path.name, **picked)
    return WorkloadTrace(workload, notes)


def _picked(value: Any, order: Ints) -> Any:
    if isinstance(value, np.ndarray):
        return value[order]
    return [value[row] for row in order] if isinstance(value, list) else value
