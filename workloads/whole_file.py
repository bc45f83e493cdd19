"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import SloBenchError

UNFINISHED_SUFFIX = ".part"


def write_whole(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a file atomically: it is complete or absent, also after a crash."""
    with whole_file(path) as file:
        file.writelines(blocks)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file; it appears under its name once the block ends without an error.

    A link is followed, and a file that is replaced leaves its mode to the new one. A device or a
    FIFO is written as it stands.

    Raises:
        SloBenchError: the file cannot be written.
    """
    unfinished: Path | None = None
    try:
        mode = _mode(path)
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            with path.open("wb") as file:
                yield file
            return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        # The name has the process id: a worker of a killed run may still write the same file.
        unfinished = target.with_name(f".{target.name}.{os.getpid()}{UNFINISHED_SUFFIX}")
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # not through a link that somebody placed there
            if mode is not None:
                unfinished.chmod(stat.S_IMODE(mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except OSError as error:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
        raise SloBenchError(f"cannot write {path}: {error.strerror or error}") from error
    except BaseException:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def whole_file_packed(path: Path) -> Iterator[Any]:
    """As `whole_file`; what is written to FILE.gz is packed by gzip.

    The header has no name and no time, so the same content gives the same bytes.
    """
    with whole_file(path) as raw:
        if path.suffix != ".gz":
            yield raw
            return
        with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
            yield packed


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
