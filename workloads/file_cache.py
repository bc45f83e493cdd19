"""Keeps results made of files for as long as those files stay as they are.

A reader of a file calls `depends_on` before it reads. A function under `file_cache` collects these
calls, also those of cached functions that it calls itself, and its result is made again once one
of the files changes, appears or disappears.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from hashlib import blake2b
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from .input_files import check_input

P = ParamSpec("P")
R = TypeVar("R")
_FRESH_S = 2.0  # a file system's clock may be this coarse: FAT's is


@dataclass(frozen=True, slots=True)
class _FileState:
    """What tells one content of a file from another.

    Two contents written within one tick of the file system's clock have the same times, so what
    changed only lately is told by its content as well.
    """

    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    digest: bytes | None

    @classmethod
    def of(cls, path: Path) -> _FileState | None:
        """The state of a file or folder (its own entries); None: there is none."""
        try:
            status = path.stat()
            fresh = abs(time.time() - max(status.st_mtime, status.st_ctime)) < _FRESH_S
            digest = _digest(path) if fresh else None
        except (OSError, ValueError):
            return None
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, digest)


# By the function that tells a state, and what it is asked of.
_States = dict[tuple[Callable[[Any], object], Hashable], object]
_collecting: ContextVar[_States | None] = ContextVar("states_read", default=None)


def depends_on(path: Path) -> None:
    """Say that what is being made depends on this file, or on the entries of this folder.

    Raises:
        SloBenchError: it is no file to read (`check_input`).
    """
    check_input(path)
    _note(_FileState.of, path)


def depends_on_variable(name: str) -> None:
    """Say that what is being made depends on an environment variable."""
    _note(os.getenv, name)


@contextmanager
def files_read() -> Iterator[list[Path]]:
    """Collect the files that readers name with `depends_on`, also through cached results.

    The list, in order of name and without folders, is complete once the block ends.
    """
    states: _States = {}
    files: list[Path] = []
    token = _collecting.set(states)
    try:
        yield files
    finally:
        _collecting.reset(token)
        outer = _collecting.get()
        if outer is not None:
            outer.update(states)
        paths = {
            Path(str(argument)).resolve()
            for state_of, argument in states
            if state_of == _FileState.of
        }
        files += sorted(path for path in paths if path.is_file())


def _note(state_of: Callable[[Any], object], argument: Hashable) -> None:
    states = _collecting.get()
    if states is not None and (state_of, argument) not in states:
        states[state_of, argument] = state_of(argument)


def file_cache(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keep the last `maxsize` results of a function by its arguments, which must be hashable, until
    a file changes that was read for them. Errors are not kept.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kept: OrderedDict[Hashable, tuple[R, _States]] = OrderedDict()

        @wraps(function)
        def cached(*args: P.args, **kwargs: P.kwargs) -> R:
            key = (args, tuple(sorted(kwargs.items())))
            entry = kept.pop(key, None)
            if entry is None or _changed(entry[1]):
                states: _States = {}
                token = _collecting.set(states)
                try:
                    entry = function(*args, **kwargs), states
                finally:
                    _collecting.reset(token)
            kept[key] = entry
            if len(kept) > maxsize:
                kept.popitem(last=False)
            outer = _collecting.get()
            if outer is not None:
                outer.update(entry[1])
            return entry[0]

        return cached

    return decorate


def _changed(states: _States) -> bool:
    return any(state_of(argument) != state for (state_of, argument), state in states.items())


def _digest(path: Path) -> bytes:
    hashed = blake2b(digest_size=16)
    if path.is_dir():
        for name in sorted(entry.name for entry in path.iterdir()):
            hashed.update(name.encode("utf-8", "surrogateescape") + b"\0")
        return hashed.digest()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hashed.update(block)
    return hashed.digest()
