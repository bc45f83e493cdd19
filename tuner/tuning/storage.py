"""Where a study is kept: Optuna's journal file in the run folder, or any storage by its URL."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import SQLAlchemyError

from ...workloads.errors import SloBenchError

JOURNAL = "study.journal"
_AGAIN_S = 0.5
_FORMS = (
    "sqlite:///study.db, postgresql://USER@HOST/NAME, mysql://…, redis://HOST:6379, or the path of "
    "a journal file"
)


def open_storage(url: str | None, folder: Path) -> BaseStorage:
    """The storage, reached and ready.

    Args:
        url: as SQLAlchemy has it, `redis://…`, or a journal file; None: the folder's own journal.
        folder: the run folder; it exists.

    Raises:
        SloBenchError: there is no such storage, or it cannot be reached.
    """
    if url is None:
        return _journal(folder / JOURNAL)
    try:
        if url.startswith("redis://"):
            from optuna.storages.journal import JournalRedisBackend

            storage: BaseStorage = JournalStorage(JournalRedisBackend(url))
        elif "://" in url:
            storage = _database(url)
        else:
            return _journal(Path(url))
        storage.get_all_studies()
    except SloBenchError:
        raise
    except Exception as error:  # every driver has exceptions of its own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SloBenchError(
            f"the storage {_without_password(url)} cannot be used: {reason}; write {_FORMS}"
        ) from error
    return storage


def _database(url: str) -> BaseStorage:
    try:
        return RDBStorage(url)
    except SQLAlchemyError:
        time.sleep(_AGAIN_S)  # another process may have been making the very same tables
        return RDBStorage(url)


def _journal(path: Path) -> BaseStorage:
    try:
        if not path.parent.is_dir():
            raise FileNotFoundError(2, f"there is no folder {path.parent}")
        if path.exists() and not path.is_file():
            raise IsADirectoryError(21, "is no file")
        storage = JournalStorage(JournalFileBackend(str(path)))
        storage.get_all_studies()
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SloBenchError(
            f"the storage {path} cannot be used: {reason}; write {_FORMS}"
        ) from error
    return storage


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}{at}{host}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Optuna says what it does on stderr; a progress bar says it better."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
