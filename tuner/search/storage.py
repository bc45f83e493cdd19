"""Storage of a study: Optuna's journal file in the run folder, or any storage by its URL.

`study.json` in the folder records the URL and the name of the study, without the password: give
`--storage` with it again, or use the driver's configuration.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.storages.journal._file import BaseJournalFileLock
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    IntegrityError,
    InternalError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)

from ...harness.results.run_checkpoint import cut_half_a_line
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.extras import import_failure
from ...workloads.trust import check as check_trust
from ...workloads.whole_file import write_whole

STUDY_FILE = "study.json"
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
        write_whole(folder / STUDY_FILE, [text.encode(), b"\n"])


def study_location(
    folder: Path, storage: str | None, study: str | None, *, resume: bool
) -> StudyLocation:
    """The storage of a folder's study: as given or, with `resume`, as recorded.

    Raises:
        SloBenchError: the study is kept in another storage, or the file is damaged.
    """
    url = None if storage is None else _anywhere(storage)
    path = folder / STUDY_FILE
    if not resume or not path.is_file():
        return StudyLocation(url, study or folder.resolve().name)
    try:
        kept = json.loads(path.read_text("utf-8"))
        before = StudyLocation(kept["storage"], kept["study"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
    if study is not None and study != before.study:
        raise SloBenchError(f"the study of {folder} is {before.study}, not {study}")
    if url is not None and without_password(url) != before.storage:
        where = before.storage or "a journal file in the folder"
        raise SloBenchError(
            f"the study of {folder} is kept in {where}, not in {without_password(url)}: leave "
            "--storage out"
        )
    if url is None and before.storage is not None:
        check_trust(
            before.storage,
            f"{path} keeps the study in {before.storage}, outside the folder; --storage with the "
            "same storage says that it is yours",
        )
    return StudyLocation(url or before.storage, before.study)


def without_password(url: str) -> str:
    """The URL without its password and other secrets."""
    parsed = _parsed(url)
    if parsed is None:
        return url.rpartition("@")[2]
    secrets = [name for name in parsed.query if _SECRET.search(name)]
    bare = parsed._replace(password=None).difference_update_query(secrets)
    return bare.render_as_string(hide_password=False)


def _anywhere(url: str) -> str:
    """The URL with an absolute path, so that it holds in every working directory."""
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


if sys.platform != "win32":
    import fcntl

JOURNAL = "study.journal"
_AGAIN_S = 0.5
_TRIES = 10
_PATIENCE_S = 20.0
_FORMS = (
    "sqlite:///study.db, postgresql+psycopg://USER@HOST/NAME (needs the extra postgres), "
    "mysql://…, redis://HOST:6379, or the path of a journal file"
)


def open_storage(url: str | None, folder: Path) -> BaseStorage:
    """The storage, reached and ready.

    Args:
        url: as SQLAlchemy has it, `redis://…`, or a journal file; None: the folder's own journal.
        folder: the run folder.

    Raises:
        SloBenchError: there is no such storage, or it cannot be reached within 20 s.
    """
    if url is None:
        folder.mkdir(parents=True, exist_ok=True)
        return _journal(folder / JOURNAL)
    return _open_in_time(url) if "://" in url else _journal(Path(url))


@contextlib.contextmanager
def opened(url: str | None, folder: Path) -> Iterator[BaseStorage]:
    """`open_storage` as a context: connections are closed at its end."""
    storage = open_storage(url, folder)
    try:
        yield storage
    finally:
        if isinstance(storage, RDBStorage):
            storage.scoped_session.remove()
            storage.engine.dispose()


def _open_in_time(url: str) -> BaseStorage:
    """Open a storage in a thread, with a time limit: drivers may wait for minutes without one."""
    opened: Future[BaseStorage] = Future()

    def connect() -> None:
        try:
            if url.startswith("redis://"):
                from optuna.storages.journal import JournalRedisBackend

                storage: BaseStorage = JournalStorage(JournalRedisBackend(url))
            else:
                storage = _database(url)
            storage.get_all_studies()
            opened.set_result(storage)
        except Exception as error:  # every driver has exceptions of its own
            opened.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        return opened.result(_PATIENCE_S)
    except Exception as error:
        if isinstance(error, ImportError) and (failure := import_failure(error)) is not None:
            raise failure from None
        late = isinstance(error, TimeoutError) and not opened.done()
        lines = [f"it has not answered within {_PATIENCE_S:g} s"] if late else []
        lines += str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise SloBenchError(
            f"the storage {without_password(url)} cannot be used: {reason}; write {_FORMS}"
        ) from (None if late else error)


def _database(url: str) -> BaseStorage:
    # A connection that was idle for a run of an hour may be gone: it is tried before it is used.
    options = {"pool_pre_ping": True}
    make_url(url).get_dialect().import_dbapi()  # Optuna does not say which module is missing
    for _ in range(_TRIES):
        try:
            return RDBStorage(url, options)
        except (IntegrityError, InternalError, ProgrammingError, OperationalError) as error:
            if isinstance(error, OperationalError) and "already exists" not in str(error):
                raise
            time.sleep(_AGAIN_S)  # another process may be making the very same tables
    return RDBStorage(url, options)


def _journal(path: Path) -> BaseStorage:
    try:
        if not path.parent.is_dir():
            raise FileNotFoundError(2, f"there is no folder {path.parent}")
        if path.exists() and not path.is_file():
            raise IsADirectoryError(21, "is no file")
        lock = JournalFileSymlinkLock(str(path)) if sys.platform == "win32" else _WholeLines(path)
        storage = JournalStorage(JournalFileBackend(str(path), lock))
        storage.get_all_studies()
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SloBenchError(
            f"the storage {path} cannot be used: {reason}; write {_FORMS}"
        ) from error
    return storage


class _WholeLines(BaseJournalFileLock):
    """A lock for appending to the journal. The kernel releases it when a process is killed.

    An incomplete last line is cut off, since a line appended to it would be lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = threading.Lock()
        self._held = contextlib.ExitStack()

    def acquire(self) -> bool:
        """Wait for the lock and cut off an incomplete last line."""
        with contextlib.ExitStack() as resources:
            resources.enter_context(self._threads)
            file = resources.enter_context(self._path.open("r+b"))
            fcntl.flock(file, fcntl.LOCK_EX)
            cut_half_a_line(file)
            self._held = resources.pop_all()
        return True

    def release(self) -> None:
        """Release the lock."""
        self._held.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna's log and warnings."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
