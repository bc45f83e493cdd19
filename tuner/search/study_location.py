"""The storage of a folder's study, recorded in `study.json`.

Passwords are not recorded: give `--storage` with it again, or use the driver's configuration.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optuna.exceptions import StorageInternalError
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from ...harness.results.run_folder import write_whole
from ...workloads.errors import FileFormatError, SloBenchError

FILE = "study.json"
_SECRET = re.compile("pass|pwd|secret|token|key", re.IGNORECASE)  # in the name of a query's field


@dataclass(frozen=True)
class StudyLocation:
    """A storage by its URL (None: a journal file in the folder) and the name of a study in it."""

    storage: str | None
    study: str

    def write(self, folder: Path) -> None:
        """Write `study.json`, without the password."""
        kept = None if self.storage is None else without_password(self.storage)
        text = json.dumps({"storage": kept, "study": self.study}, ensure_ascii=False, indent=1)
        write_whole(folder / FILE, [text.encode(), b"\n"])


def study_location(
    folder: Path, storage: str | None, study: str | None, *, resume: bool
) -> StudyLocation:
    """The storage of a folder's study: as given or, with `resume`, as recorded.

    Raises:
        SloBenchError: the study is kept in another storage, or the file is damaged.
    """
    asked = None if storage is None else _anywhere(storage)
    path = folder / FILE
    if not resume or not path.is_file():
        return StudyLocation(asked, study or folder.resolve().name)
    try:
        kept = json.loads(path.read_text("utf-8"))
        before = StudyLocation(kept["storage"], kept["study"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
    if study is not None and study != before.study:
        raise SloBenchError(f"the study of {folder} is {before.study}, not {study}")
    if asked is not None and without_password(asked) != before.storage:
        where = before.storage or "a journal file in the folder"
        raise SloBenchError(
            f"the study of {folder} is kept in {where}, not in {without_password(asked)}: leave "
            "--storage out"
        )
    return StudyLocation(asked or before.storage, before.study)


def without_password(url: str) -> str:
    """An URL to show and to keep."""
    parsed = _parsed(url)
    if parsed is None:
        return url.rpartition("@")[2]
    secrets = [name for name in parsed.query if _SECRET.search(name)]
    bare = parsed._replace(password=None).difference_update_query(secrets)
    return bare.render_as_string(hide_password=False)


def _anywhere(url: str) -> str:
    """The same from whichever folder a command is given."""
    if "://" not in url:
        return str(Path(url).resolve())
    parsed = _parsed(url)
    if parsed is None or not parsed.drivername.startswith("sqlite"):
        return url
    if parsed.database in (None, "", ":memory:"):
        raise SloBenchError(
            f"the storage {url} is lost when the process ends: write sqlite:///study.db, or leave "
            "--storage out"
        )
    return parsed.set(database=str(Path(parsed.database).resolve())).render_as_string()


def _parsed(url: str) -> URL | None:
    try:
        return make_url(url) if "://" in url else None
    except (ArgumentError, ValueError):
        return None


@contextlib.contextmanager
def within_reach(place: StudyLocation, folder: Path) -> Iterator[None]:
    """Turn errors of the storage or the disk into a SloBenchError.

    Raises:
        SloBenchError: the storage was lost, or a file cannot be written.
    """
    how = f"continue with slo-bench tune --resume --out {folder}"
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        raise SloBenchError(f"cannot write to {where}: {error.strerror or error}; {how}") from error
    except Exception as error:
        if place.storage is None or not _of_a_storage(error):
            raise
        first = str(error.__cause__ or error).strip().partition("\n")[0]
        raise SloBenchError(
            f"the storage {without_password(place.storage)} was lost: {first}; finished "
            f"trials are kept: {how}"
        ) from error


def _of_a_storage(error: Exception) -> bool:
    kinds: tuple[type[Exception], ...] = (SQLAlchemyError, StorageInternalError)
    if "redis" in sys.modules:
        kinds += (sys.modules["redis"].RedisError,)
    return isinstance(error, kinds)
