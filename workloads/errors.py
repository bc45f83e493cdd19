"""The one error root. A message says what was wrong and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class SloBenchError(Exception):
    """Something the user can mend; the command line prints it and exits with code 2."""


class UnknownNameError(SloBenchError):
    """A name that no catalogue holds, with the closest names that one does."""

    def __init__(self, kind: str, name: str, choices: Iterable[str]) -> None:
        names = sorted(choices)
        begin = [choice for choice in names if choice.startswith(name.lower())]
        close = begin[:3] or difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


def by_name(kind: str, name: str, catalogue: Mapping[str, T]) -> T:
    """The entry of that name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in catalogue:
        raise UnknownNameError(kind, name, catalogue)
    return catalogue[name]


class FileFormatError(SloBenchError):
    """A file that cannot be read as what it should be, with the line where that shows."""

    def __init__(self, path: Path | str, line: int | None, problem: str) -> None:
        where = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{problem} ({where})")
