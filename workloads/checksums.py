"""Checksums that show whether files and tables are unchanged. CRC-32 finds damage and mix-ups; it
does not protect against deliberate changes. Files without a checksum, written by hand, are
accepted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import FileFormatError
from .input_files import check_ends

FIELD = "crc32"
_ASKED = "asked_crc32"
CHANGED = "is not what was written: it was damaged or changed since"
_AT_ONCE_BYTES = 1 << 20


def crc32_of(data: bytes) -> str:
    """CRC-32 of the bytes, as eight hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def crc32_of_file(path: Path) -> str:
    """CRC-32 of a file's bytes, as eight hexadecimal digits.

    Raises:
        SloBenchError: it is a device, named pipe or socket.
        FileFormatError: it is missing or cannot be read.
    """
    check_ends(path)
    checksum = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_AT_ONCE_BYTES):
                checksum = zlib.crc32(block, checksum)
    except FileNotFoundError as error:
        raise FileFormatError(path, None, "is missing") from error
    except OSError as error:
        raise FileFormatError(path, None, f"cannot be read: {error.strerror or error}") from error
    return f"{checksum:08x}"


def crc32_of_fields(fields: Iterable[tuple[str, str]]) -> str:
    """CRC-32 of a row given as (column, text), in any order; empty fields do not count."""
    return crc32_of("\n".join(sorted(f"{name}={text}" for name, text in fields if text)).encode())


def sealed(plain: Mapping[str, Any], inputs: Path | None = None) -> dict[str, Any]:
    """Content of a JSON file with its own checksum, and with that of the file with the inputs
    (`inputs`), if any.
    """
    whole = {**plain} if inputs is None else {**plain, _ASKED: crc32_of_file(inputs)}
    return {**whole, FIELD: _of_json(whole)}


def unsealed(path: Path, plain: dict[str, Any], inputs: Path | None = None) -> dict[str, Any]:
    """Check and remove the checksums that `sealed` added to the content of `path`.

    Raises:
        FileFormatError: it is something else, or answers something else.
    """
    checksum = plain.pop(FIELD, None)
    if checksum is not None and checksum != _of_json(plain):
        raise FileFormatError(path, None, CHANGED)
    answers = plain.pop(_ASKED, None)
    if answers is not None and inputs is not None and answers != crc32_of_file(inputs):
        if answers == crc32_of(inputs.read_bytes().replace(b"\r\n", b"\n")):
            problem = "has Windows line ends, as git's core.autocrlf makes them: write \\n again"
            raise FileFormatError(inputs, None, problem)
        raise FileFormatError(path, None, f"does not belong to the {inputs.name} in its folder")
    return plain


def _of_json(plain: Mapping[str, Any]) -> str:
    return crc32_of(json.dumps(plain, sort_keys=True).encode())
