"""Input files: regular files of a bounded size, also after they are unpacked.

A limit is set by `slo-bench --max-input-size`; by default it is a share of the memory that is
available, because what is read is kept in memory.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Protocol

from .errors import FileFormatError, SloBenchError
from .machine_memory import available_bytes, gib

SIZE_VARIABLE = "SLO_BENCH_MAX_INPUT_SIZE"  # read by worker processes too
OBJECTS, TABLE = 32, 8  # bytes in memory for a byte of text: rows of Python objects, columns
_LEAST_BYTES = 64 << 20
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)

_TO_CSV = (
    'python -c "import sys, pandas; pandas.read_parquet(sys.argv[1])'
    '.to_csv(sys.stdout, index=False)"'
)
# Files that are no text by their first bytes: what they are, and the command that makes them text.
_OTHER_FORMS = (
    (b"\x28\xb5\x2f\xfd", "packed by Zstandard", "zstd -dc"),
    (b"\xfd7zXZ\x00", "packed by xz", "xz -dc"),
    (b"BZh", "packed by bzip2", "bzip2 -dc"),
    (b"PK\x03\x04", "a ZIP archive", "unzip -p"),
    (b"PAR1", "a Parquet table", _TO_CSV),
    (b"\xff\xfe", "text in UTF-16", ""),
    (b"\xfe\xff", "text in UTF-16", ""),
    (b"\x1f\x8b", "packed by gzip", ""),  # once more
)
FIRST_BYTES = 8  # of a file, by which its form is seen


def check_form(path: Path, begin: bytes, *, packed: bool) -> None:
    """Raise FileFormatError for a file that is no UTF-8 text by its first bytes, unpacked where it
    is `packed` by gzip; it says what to run.
    """
    for magic, form, command in _OTHER_FORMS:
        if begin.startswith(magic):
            if packed:
                form, command = f"{form}, within gzip", "gzip -dc"
            elif not command:
                raise FileFormatError(path, None, f"is {form}; run {to_utf8(path, 'UTF-16')}")
            out = path.with_suffix(".csv" if command == _TO_CSV else "")
            out = path.with_name(f"{path.name}.txt") if out == path else out
            raise FileFormatError(
                path, None, f"is {form}; run {command} {quote(str(path))} > {quote(str(out))}"
            )


def to_utf8(path: Path, encoding: str) -> str:
    """The command that writes a text file in UTF-8."""
    out = path.with_suffix(f".utf8{path.suffix}")
    return f"iconv -f {encoding} -t UTF-8 {quote(str(path))} > {quote(str(out))}"


def check_input(path: Path, growth: int = OBJECTS) -> None:
    """Check a file before it is opened; a path without a file, or with a folder, is accepted.

    Raises:
        SloBenchError: `check_ends` refuses it, or it is too large (`max_input_bytes`).
    """
    size = check_ends(path)
    if size and size > max_input_bytes(growth):
        raise too_large(path, growth)


def check_ends(path: Path) -> int:
    """The bytes of a regular file; 0 of a path without a file, or with a folder.

    Raises:
        SloBenchError: it is a device, named pipe or socket, whose reading may never end.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return 0  # its reader says what is wrong
    for is_one, name in _KINDS:
        if is_one(status.st_mode):
            raise SloBenchError(f"{path} is {name}; copy its content into a regular file")
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def max_input_bytes(growth: int = OBJECTS) -> int:
    """The most bytes of an input file, which takes `growth` times as much in memory."""
    limit = os.environ.get(SIZE_VARIABLE)
    return parse_size(limit) if limit else max(_LEAST_BYTES, available_bytes() // growth)


def parse_size(text: str) -> int:
    """Bytes of `300M`, `2GiB` or `1000000`.

    Raises:
        SloBenchError: it is no size.
    """
    word = text.strip().lower().removesuffix("b").removesuffix("i")
    number, unit = (word[:-1], word[-1]) if word[-1:] in _UNITS and word[-1:] else (word, "")
    if not number.isdecimal() or len(number) > 15 or int(number) == 0:
        raise SloBenchError(f"cannot read the size {text!r}; write 300M or 2G")
    return int(number) * _UNITS[unit]


def too_large(path: Path, growth: int = OBJECTS) -> FileFormatError:
    """Error for a file above the limit."""
    return FileFormatError(
        path,
        None,
        f"has more than {gib(max_input_bytes(growth))} of text, of which memory may not hold the "
        "content; if it is meant so, allow more: slo-bench --max-input-size 8G …",
    )


@contextmanager
def open_bounded(path: Path, *, packed: bool, growth: int = OBJECTS) -> Iterator[io.BufferedReader]:
    """Open a file to read its bytes up to the limit, unpacked where it is `packed` by gzip.

    Raises:
        OSError: it cannot be opened.
        FileFormatError: on reading, it has more.
    """
    with path.open("rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if packed else raw
        yield io.BufferedReader(Bounded(stream, path, growth))


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""


class Bounded(io.RawIOBase):
    """Bytes of a stream, up to the limit.

    Raises:
        FileFormatError: on reading, the stream has more.
    """

    def __init__(self, stream: Readable, path: Path, growth: int = OBJECTS) -> None:
        self._stream, self._path, self._growth = stream, path, growth
        self._left_bytes = max_input_bytes(growth)

    def readable(self) -> bool:
        """Return True: the file can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into `buffer`; the number of bytes."""
        data = self._stream.read(len(buffer))
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise too_large(self._path, self._growth)
        buffer[: len(data)] = data
        return len(data)
