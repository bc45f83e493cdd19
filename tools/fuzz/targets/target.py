"""What a target is: a reader that takes bytes, and good files to begin from.

It must return or raise `SloBenchError`; anything else is a find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Read = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """A reader; `seeds` are files that it accepts."""

    name: str
    seeds: Sequence[bytes] = field(repr=False)
    read: Read
    slow: bool = False  # a report is built for each: fewer examples


def from_file(folder: Path, name: str, read_path: Callable[[Path], object]) -> Read:
    """What reads the bytes from a file of that name."""
    path = folder / name

    def read_bytes(data: bytes) -> object:
        path.write_bytes(data)
        return read_path(path)

    path.parent.mkdir(parents=True, exist_ok=True)
    return read_bytes


def beside(folder: Path, path: Path, read_folder: Callable[[Path], object], owner: str) -> Target:
    """The reader of a folder in which one file is another."""
    good = path.read_bytes()

    def read_bytes(data: bytes) -> object:
        path.write_bytes(data)
        try:
            return read_folder(folder)
        finally:
            path.write_bytes(good)

    return Target(f"{path.name} of {owner}", [good], read_bytes)
