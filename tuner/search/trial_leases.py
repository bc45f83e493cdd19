"""Leases of trials and configurations: no trial is lost, and no configuration is run twice.

Every process writes its name to its trials and a heartbeat to the study, through the storage, so
leases work with any storage and from any machine. An interrupted trial is queued again with its
parameters. Before a worker runs a configuration it claims it, because another trial may have the
same one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from .study_results import BEGUN, KEY, OWNER, note, noted, unlike

if sys.platform != "win32":
    import fcntl

_SIGN = "slo_bench:alive "
_SIGN_EVERY_S = 15.0
_SILENT_S = 90.0  # for longer: it is gone, or has lost the storage
_LOOK_EVERY_S = 0.02

_ALIVE: set[str] = set()  # workers of this process
# Other machines' workers: the last heartbeat, and when it was first seen.
_SEEN: dict[str, tuple[float, float]] = {}


def new_name() -> str:
    """A new name for a worker of this process: host, process number, start time of the process
    (process numbers are reused) and a random word.
    """
    pid = os.getpid()
    return f"{socket.gethostname()}/{pid}/{_began(pid)}/{secrets.token_hex(3)}"


def _began(pid: int) -> str:
    """Start time of a process in kernel ticks; empty where it is unknown."""
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[19]
    return ""


@contextlib.contextmanager
def alive(study: Study, name: str) -> Iterator[None]:
    """Write heartbeats of a worker to the study while the block runs."""
    ended = threading.Event()

    def sign() -> None:
        while not ended.wait(_SIGN_EVERY_S):
            with contextlib.suppress(Exception):  # a storage that is away may come back
                _sign(study, name, time.time())

    _sign(study, name, time.time())
    _ALIVE.add(name)
    thread = threading.Thread(target=sign, daemon=True)
    thread.start()
    try:
        yield
    finally:
        _ALIVE.discard(name)
        ended.set()
        thread.join()
        with contextlib.suppress(Exception):
            _sign(study, name, 0.0)


def _sign(study: Study, name: str, now_s: float) -> None:
    study._storage.set_study_system_attr(study._study_id, _SIGN + name, now_s)


def working(study: Study, name: str) -> bool:
    """Whether the worker of that name is alive, as far as can be determined.

    On another machine: whether its heartbeat changed within 90 s of this process's clock. Only the
    first heartbeat is compared to the wall clock.
    """
    machine, pid, began, _ = name.split("/")
    if machine == socket.gethostname() and began:
        is_this_process = int(pid) == os.getpid()
        return _began(int(pid)) == began and (not is_this_process or name in _ALIVE)
    signs = study._storage.get_study_system_attrs(study._study_id)
    signed_s = float(signs.get(_SIGN + name, 0.0))
    if not signed_s:
        return False
    seen_sign_s, new_at_s = _SEEN.get(name, (0.0, 0.0))
    if signed_s != seen_sign_s:
        age_s = 0.0 if seen_sign_s else max(time.time() - signed_s, 0.0)
        new_at_s = time.monotonic() - age_s
        _SEEN[name] = signed_s, new_at_s
    return time.monotonic() - new_at_s < _SILENT_S


def cut_trials(study: Study, *, unsigned: bool) -> list[FrozenTrial]:
    """Trials in the state running whose process has ended.

    `unsigned`: trials without a worker's name were interrupted too, since a worker holds the lock
    while it signs.
    """
    return [
        trial
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        if (noted(trial, OWNER) is None and unsigned) or not _in_hand(study, trial)
    ]


def _in_hand(study: Study, trial: FrozenTrial) -> bool:
    """Whether a live worker has the trial."""
    if trial.state is not TrialState.RUNNING:
        return False
    owner = noted(trial, OWNER)
    if owner is not None:
        return working(study, owner)
    # Cut before it was signed, unless it is being signed just now.
    assert trial.datetime_start is not None
    return time.time() - trial.datetime_start.timestamp() < 2 * _SIGN_EVERY_S


def claim(study: Study, trial: Trial, key: str) -> FrozenTrial | None:
    """Claim a configuration for a trial.

    The trial with the lower number gets it, unless the other has started. As in Lamport's bakery
    algorithm (Communications of the ACM 17(8), 1974), later trials wait until earlier ones have
    chosen, and no trial waits before its own choice is published, so there is no deadlock.
    """
    note(trial, KEY, key)
    if noted(trial.storage.get_trial(trial._trial_id), BEGUN):  # before it was cut
        return None
    while True:
        must_wait = False
        for other in unlike(study.get_trials(deepcopy=False)):
            theirs = noted(other, KEY)
            if other.number == trial.number or theirs not in (key, None):
                continue
            before = other.number < trial.number
            if theirs == key and (before or noted(other, BEGUN)):
                return other
            if theirs == key or before:  # it is choosing, or has not seen this one yet
                must_wait = must_wait or _in_hand(study, other)
        if not must_wait:
            note(trial, BEGUN, True)
            return None
        time.sleep(_LOOK_EVERY_S)


def wait_again(study: Study, trial: FrozenTrial) -> None:
    """Put an interrupted trial back into the queue."""
    study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder: one process at a time runs such a block."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder / "study.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
