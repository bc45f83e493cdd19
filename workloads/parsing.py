"""JSON and TOML that somebody else wrote: whatever is wrong with it, there is one kind of error.

The standard parsers also raise RecursionError (brackets without end) and a plain ValueError
(a number of thousands of digits), which readers would let through as tracebacks.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any

_TOO_DEEP = "the brackets are nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """The value.

    Raises:
        json.JSONDecodeError: it is no JSON, no UTF-8, or more than the parser can take.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError(_TOO_DEEP, "", 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table.

    Raises:
        tomllib.TOMLDecodeError: it is no TOML, or more than the parser can take.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError(_TOO_DEEP) from None
    except (ValueError, OverflowError) as error:
        raise tomllib.TOMLDecodeError(str(error)) from None
