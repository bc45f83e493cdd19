"""JSON and TOML from outside the project: every defect raises the same kind of error.

The standard parsers also raise RecursionError (brackets without end) and a plain ValueError (a
number of thousands of digits), which would reach the user as tracebacks. JSON may also hold half of
a surrogate pair (U+D800), which cannot be written to a file or a terminal.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from .errors import FileFormatError

# The parser takes quadratic time and memory for these.
_LONG_KEY = re.compile(
    r"(?<![\w.'\"-])(?:(?:[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}"
)
_TOO_DEEP = "the brackets are nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """The value.

    Raises:
        json.JSONDecodeError: it is no JSON, no UTF-8, or more than the parser can take; or a text
            in it has half a character.
    """
    value = parse_event(text)
    escaped = ("\\ud", "\\uD") if isinstance(text, str) else (b"\\ud", b"\\uD")
    if any(escape in text for escape in escaped):  # type: ignore[operator]  # of its kind
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise json.JSONDecodeError("a text has half a character", "", 0) from None
    return value


def parse_event(text: str | bytes) -> Any:
    """The value, in which texts may end with half a character, as those of a stream of tokens.

    Raises:
        json.JSONDecodeError: it is no JSON, no UTF-8, or more than the parser can take.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text))
        return json.loads(text.removeprefix("\ufeff"))  # as editors on Windows write it
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError(_TOO_DEEP, "", 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
        FileFormatError: the file cannot be read, or holds something else.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(path, None, f"cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise FileFormatError(path, None, "must hold a JSON object")
    return content


def number(value: object) -> float:
    """A number of a foreign file; NaN where there is none, or none that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def parse_toml(text: str) -> dict[str, Any]:
    """The table. A byte order mark before it, as editors on Windows write it, is none of it.

    Raises:
        tomllib.TOMLDecodeError: it is no TOML, or more than the parser can take.
    """
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError("a key has more than 100 names joined by dots")
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError(_TOO_DEEP) from None
    except (ValueError, OverflowError) as error:
        raise tomllib.TOMLDecodeError(str(error)) from None


def finite(value: float) -> float | None:
    """The value for JSON, which has neither NaN nor infinity: None in their place."""
    return value if math.isfinite(value) else None


def plain_fields(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass for JSON: None in place of NaN and infinity."""
    fields = dataclasses.asdict(instance)
    return {k: finite(v) if isinstance(v, float) else v for k, v in fields.items()}
