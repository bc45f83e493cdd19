"""Resources of this machine: cores, for the load generator and for servers, and open files."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_CORES_PER_CLIENT_CORE = 8
Found = TypeVar("Found")
_RESERVED_FILES = 48  # imports, results, pipes
_CLIENT_NICE = -10  # priority of the load generator's thread


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@dataclass(frozen=True)
class CoreShare:
    """Cores of servers that are started on this machine, and those left to the load generator.

    Both are empty where there is one core, or where the system cannot pin processes.
    """

    server: tuple[int, ...] = ()
    client: tuple[int, ...] = ()


def core_share() -> CoreShare:
    """Leave one core of eight to the load generator, at least one, and the others to servers."""
    if sys.platform != "linux" or cores() < 2:
        return CoreShare()
    core_ids = sorted(os.sched_getaffinity(0))
    n_client_cores = max(1, len(core_ids) // _CORES_PER_CLIENT_CORE)
    return CoreShare(tuple(core_ids[:-n_client_cores]), tuple(core_ids[-n_client_cores:]))


@contextlib.contextmanager
def started_on(chosen: Sequence[int]) -> Iterator[None]:
    """Processes that this thread starts in the block run on these cores; on any, if none."""
    if sys.platform != "linux" or not chosen:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def before_other_programs() -> Iterator[None]:
    """Give this thread a higher priority in the block, where the system allows it (root, or
    CAP_SYS_NICE): a client that waits for a core measures its own wait.
    """
    if sys.platform != "linux":  # elsewhere it would be the whole process
        yield
        return
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(before, _CLIENT_NICE))
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def run_event_loop(main: Coroutine[Any, Any, Found]) -> Found:
    """Run a coroutine on uvloop, or on asyncio's loop on Windows."""
    if sys.platform == "win32":
        import asyncio

        return asyncio.run(main)
    import uvloop

    outcome: Found = uvloop.run(main)
    return outcome


def sockets_left() -> float:
    """Raise the limit of open files to the hard limit, and return how many sockets it leaves beside
    the files that are open and those that the program may still need.
    """
    if sys.platform == "win32":  # counts them otherwise
        return math.inf
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return math.inf
    try:
        n_open = len(list(Path("/dev/fd").iterdir()))
    except OSError:
        n_open = _RESERVED_FILES
    return max(1, soft - n_open - _RESERVED_FILES)
