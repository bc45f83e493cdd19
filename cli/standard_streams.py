"""Standard streams as a terminal, a pipe or a full disk has them: a command never ends by them."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
import unicodedata
from typing import Any

from ..workloads.masking import masked

_PLAIN = {"–": "-", "—": "-", "…": "...", "≥": ">=", "≤": "<=", "×": "x", "·": "-", "µ": "u",
          "→": "->", "±": "+-", "−": "-", "’": "'", "“": '"', "”": '"', "\xa0": " ",
          "─": "-", "✓": "+", "✗": "x", "≈": "~", "∞": "inf"}  # fmt: skip

_MOST_COLUMNS = 9999


def prepare() -> None:
    """Replace closed standard streams by the null device; degrade characters that cannot be shown.

    A closed stream's number would be given to the next file that is opened, and what is printed
    would end in that file.
    """
    codecs.register_error("plain", _plain)
    _narrow()
    for number, mode in ((0, "r"), (1, "w"), (2, "w")):
        name = ("stdin", "stdout", "stderr")[number]
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            setattr(sys, name, None)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    global _output
    _output = _Output(1, "w", closefd=False)
    sys.stdout = _text(_output, sys.stdout.encoding)
    sys.stderr = _text(_Diagnostics(2, "w", closefd=False), sys.stderr.encoding)


def _narrow() -> None:
    """Take no more columns from the environment than a screen has: lines are filled up to them."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and len(columns) > len(str(_MOST_COLUMNS)):
        os.environ["COLUMNS"] = str(_MOST_COLUMNS)


def _text(raw: io.FileIO, encoding: str) -> io.TextIOWrapper:
    buffered = io.BufferedWriter(raw)
    lines = raw.isatty() or raw.fileno() == 2
    return _Masked(buffered, encoding, errors="plain", line_buffering=lines)


class _Masked(io.TextIOWrapper):
    """A stream that shows no secret: the last look at what is printed."""

    def write(self, text: str, /) -> int:
        super().write(masked(text))
        return len(text)


class _Output(io.FileIO):
    """Standard output, with the error that ended it."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.lost = error
            raise


_output: _Output | None = None


class _Diagnostics(io.FileIO):
    """Standard error: a full disk or a closed pipe behind it does not end a command."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace what an encoding lacks: `≥` by `>=`, `ü` by `u`, others by a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    replacements = []
    for character in error.object[error.start : error.end]:
        bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
        replacements.append(_PLAIN.get(character) or bare or "?")
    return "".join(replacements), error.end


def lost_output() -> OSError | None:
    """Flush standard output; return why it could not be written, and give it up."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if _output is None or _output.lost is None:
        return None
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python's own flush succeeds
    lost, _output.lost = _output.lost, None
    return lost


def exit_code_of(lost: OSError) -> int:
    """Return the exit code after a lost output; a pipe that nobody reads ends as by SIGPIPE."""
    if lost.errno == errno.EPIPE:
        return 141
    with contextlib.suppress(OSError):
        os.write(2, f"error: cannot write the output: {lost.strerror}\n".encode())
    return 2
