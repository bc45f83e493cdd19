"""Where a study is kept: Optuna's journal file in the run folder, or any storage by its URL."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.storages.journal._file import BaseJournalFileLock
from sqlalchemy.exc import IntegrityError, InternalError, OperationalError, ProgrammingError

from ...harness.results.checkpoint import cut_half_a_line
from ...workloads.errors import SloBenchError
from .study_location import without_password

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
    return _Opening(url).storage() if "://" in url else _journal(Path(url))


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


class _Opening:
    """Opens a storage in a thread, with a time limit: drivers may wait for minutes without one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opened: BaseStorage | None = None
        self._problem: Exception | None = None

    def storage(self) -> BaseStorage:
        """The storage, or an error after 20 s."""
        thread = threading.Thread(target=self._open, daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        if self._opened is not None:
            return self._opened
        reason = f"it has not answered within {_PATIENCE_S:g} s"
        if self._problem is not None:
            lines = str(self._problem).strip().splitlines()
            reason = lines[0] if lines else type(self._problem).__name__
        raise SloBenchError(
            f"the storage {without_password(self._url)} cannot be used: {reason}; write {_FORMS}"
        ) from self._problem

    def _open(self) -> None:
        try:
            if self._url.startswith("redis://"):
                from optuna.storages.journal import JournalRedisBackend

                storage: BaseStorage = JournalStorage(JournalRedisBackend(self._url))
            else:
                storage = _database(self._url)
            storage.get_all_studies()
            self._opened = storage
        except Exception as error:  # every driver has exceptions of its own
            self._problem = error


def _database(url: str) -> BaseStorage:
    # A connection that was idle for a run of an hour may be gone: it is tried before it is used.
    options = {"pool_pre_ping": True}
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
        with contextlib.ExitStack() as taken:
            taken.enter_context(self._threads)
            file = taken.enter_context(self._path.open("r+b"))
            fcntl.flock(file, fcntl.LOCK_EX)
            cut_half_a_line(file)
            self._held = taken.pop_all()
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
