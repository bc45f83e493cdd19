"""`capacity.json`: what a capacity search has written beside `cells.csv`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...workloads.checksums import unsealed
from ...workloads.errors import FileFormatError
from ...workloads.parsing import parse_json
from .run_folder import EXPERIMENT

FILE = "capacity.json"


def check_rows(folder: Path, rows: int) -> None:
    """Hold the number of rows in `cells.csv` against the runs, which are written after them.

    Raises:
        FileFormatError: there are fewer, or the file of the runs is no capacity.json.
    """
    runs = sum(len(search.get("runs") or ()) for search in read_searches(folder / FILE)["searches"])
    if rows < runs:
        raise FileFormatError(folder / "cells.csv", None, f"lacks rows of runs that {FILE} has")


def read_searches(path: Path) -> dict[str, Any]:
    """The whole file.

    Raises:
        FileFormatError: it is no capacity.json.
    """
    try:
        kept: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
    searches = kept.get("searches") if isinstance(kept, dict) else None
    if not isinstance(searches, list) or not all(
        isinstance(one, dict) and _are_rows(one.get("found") or []) for one in searches
    ):
        raise FileFormatError(path, None, "is not what a capacity search writes")
    return unsealed(path, kept, path.with_name(EXPERIMENT))


def _are_rows(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(row, dict) for row in found)
