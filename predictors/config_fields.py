"""Fields of a foreign JSON object, with errors that name the file, the entry and the field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..workloads.errors import FileFormatError


class Fields:
    """The fields of one file or entry, with errors that name the file, the entry and the field."""

    def __init__(self, path: Path | str, fields: Mapping[str, Any], entry: str = "") -> None:
        self.path = path
        self.fields = fields
        self.entry = entry
        self.read: set[str] = set()

    def fail(self, problem: str) -> FileFormatError:
        return FileFormatError(
            self.path, None, f"{self.entry}: {problem}" if self.entry else problem
        )

    def get(self, name: str) -> Any:
        """The value of a field, which counts as read; None: it is not there."""
        self.read.add(name)
        return self.fields.get(name)

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of the fields `names` that is there; a whole number of at least one."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise self.fail(f"field {name!r} must be a whole number above 0 but is {value!r}")
            return value
        if default is None:
            raise self.fail(f"field {' or '.join(map(repr, names))} is missing")
        return default

    def size(self, *names: str) -> int:
        """As `count`, but 0 where no field says a number above 0."""
        held = [name for name in names if self.get(name) not in (None, 0)]
        return self.count(*held) if held else 0

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if name not in self.fields:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"field {name!r} must be true or false but is {value!r}")
        return value
