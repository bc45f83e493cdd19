"""Public originals by name: downloaded once, resumed, checked, and kept in a cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from platformdirs import user_cache_path

from .errors import SloBenchError, by_name

if TYPE_CHECKING:
    import httpx

CACHE_VARIABLE = "SLO_BENCH_CACHE"

Progress = Callable[[int, int | None], None]
"""Told the bytes on disk so far, and how many there will be where the server says."""


@dataclass(frozen=True)
class Original:
    """A public file. Without `sha256`, the first download's is kept and compared from then on."""

    name: str
    url: str
    licence: str
    about: str
    sha256: str | None = None

    @property
    def file_name(self) -> str:
        """The last part of the URL's path."""
        return PurePosixPath(urlsplit(self.url).path).name


@dataclass(frozen=True)
class Fetched:
    """A file in the cache. `pinned` says whether its checksum was known beforehand."""

    path: Path
    sha256: str
    pinned: bool
    downloaded: bool


@functools.cache
def originals() -> Mapping[str, Original]:
    """All files that can be fetched, by name."""
    text = resources.files(__package__).joinpath("fetch.toml").read_text("utf-8")
    return {name: Original(name, **table) for name, table in tomllib.loads(text).items()}


def find(name: str) -> Original:
    """A public file.

    Raises:
        UnknownNameError: there is none of this name.
    """
    return by_name("original", name, originals())


def cache_folder() -> Path:
    """`$SLO_BENCH_CACHE`, or the platform's folder for caches."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return user_cache_path("slo-bench", appauthor=False, opinion=False)


def fetch(
    original: Original, folder: Path | None = None, progress: Progress | None = None
) -> Fetched:
    """The file's place in the cache, downloaded if it is not there yet.

    A download that was interrupted goes on where it stopped, if the server allows it. The file
    appears under its name only when it is whole and its checksum is right.

    Raises:
        SloBenchError: the server does not deliver, the checksum is wrong, or the folder cannot be
            written.
    """
    folder = folder or cache_folder()
    path = folder / original.name / original.file_name
    recorded = path.with_name(path.name + ".sha256")
    expected = original.sha256 or _recorded(recorded)
    if path.exists():
        digest = sha256_of(path)
        if expected is not None and digest != expected:
            raise SloBenchError(
                f"{path} has sha256 {digest}, not {expected}; delete it to fetch it again"
            )
        return Fetched(path, digest, original.sha256 is not None, downloaded=False)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(original.url, part, progress)
        digest = sha256_of(part)
        if expected is not None and digest != expected:
            part.unlink()
            raise SloBenchError(
                f"{original.url} has sha256 {digest}, not {expected}: the original has changed, "
                "or the download is damaged; it was thrown away, so try again"
            )
        recorded.write_text(f"{digest}  {path.name}\n", "utf-8")
        part.replace(path)
    except OSError as error:
        raise SloBenchError(f"cannot write to {path.parent}: {error.strerror or error}") from error
    return Fetched(path, digest, original.sha256 is not None, downloaded=True)


def sha256_of(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _recorded(path: Path) -> str | None:
    return path.read_text("utf-8").split()[0] if path.exists() else None


def _download(url: str, part: Path, progress: Progress | None) -> None:
    import httpx

    with _opened(url, part.stat().st_size if part.exists() else 0) as answer:
        if answer is None:  # nothing is missing from the part
            return
        resumed = answer.status_code == 206
        total = _total_bytes(answer, part.stat().st_size if resumed else 0)
        with part.open("ab" if resumed else "wb") as file:
            try:
                for chunk in answer.iter_bytes():
                    file.write(chunk)
                    if progress is not None:
                        progress(file.tell(), total)
            except httpx.TransportError as error:
                raise _interrupted(url, file.tell(), error) from error
            # A server that closes early without saying so must not pass for a whole file.
            if total is not None and file.tell() != total:
                raise _interrupted(url, file.tell(), f"{total:,} were announced")


def _interrupted(url: str, size: int, why: object) -> SloBenchError:
    return SloBenchError(
        f"the download of {url} was interrupted after {size:,} bytes ({why}); "
        "run it again to go on from there"
    )


@contextlib.contextmanager
def _opened(url: str, have_bytes: int) -> Iterator[httpx.Response | None]:
    """The answer to a GET from `have_bytes` on; None if the server says that nothing is missing."""
    import httpx

    # Bytes must come as they are stored: offsets into a packed stream could not be resumed.
    headers = {"Accept-Encoding": "identity"}
    if have_bytes:
        headers["Range"] = f"bytes={have_bytes}-"
    try:
        with (
            httpx.Client(follow_redirects=True, timeout=30.0) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            if have_bytes and answer.status_code == 416:
                if _size_of_range(answer) != have_bytes:
                    raise SloBenchError(
                        f"{url} differs from the partial download in the cache; delete the .part "
                        "file and fetch it again"
                    )
                yield None
                return
            if answer.status_code not in (200, 206):
                raise SloBenchError(
                    f"{url} answered {answer.status_code} {answer.reason_phrase}; "
                    "see whether the original has moved"
                )
            yield answer
    except httpx.HTTPError as error:
        raise SloBenchError(f"cannot fetch {url}: {error}; check the network") from error


def _size_of_range(answer: httpx.Response) -> int | None:
    size = answer.headers.get("Content-Range", "").rpartition("/")[2]
    return int(size) if size.isdigit() else None


def _total_bytes(answer: httpx.Response, have_bytes: int) -> int | None:
    length = answer.headers.get("Content-Length")
    return None if length is None else have_bytes + int(length)
