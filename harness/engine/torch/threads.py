"""The CPU threads of the torch engine: how many, on which cores, and how long they wait for one.

The threads of one operation wait for each other at its end, so a core that another program takes
from one of them stops them all. They are pinned to the least busy cores, and a core is left for
the client where there is one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....workloads.errors import SloBenchError

_LOOK_S = 0.1  # how long cores are watched to find those that are least busy
_NANOSECOND_S = 1e-9
_PINS = hasattr(os, "sched_setaffinity")


def available_cores() -> list[int]:
    """The cores that this thread may use."""
    return sorted(os.sched_getaffinity(0)) if _PINS else list(range(os.cpu_count() or 1))


_ALL = available_cores()  # before any thread is pinned


def thread_count(threads: int | None, workers: int = 0) -> int:
    """Number of threads that compute in the engine's process: those asked for; else all cores but
    one for the client and one for each worker, at most OMP_NUM_THREADS, at least one.

    Raises:
        SloBenchError: more are asked for than there are cores.
    """
    cores = len(available_cores())
    if threads is None:
        limit = os.environ.get("OMP_NUM_THREADS", "")
        max_threads = int(limit) if limit.isdecimal() and int(limit) else cores
        return max(1, min(cores - workers - 1, max_threads))
    if threads > cores:
        raise SloBenchError(
            f"server.threads is {threads}, but this process may use {cores} cores; set it to "
            f"{cores} or less"
        )
    return threads


@dataclass(frozen=True)
class ThreadLayout:
    """Where the engine computes.

    `cores`: of the threads of the engine's process; empty where the system cannot pin threads.
    `worker_cores`: one of each worker process, likewise.
    """

    threads: int
    cores: tuple[int, ...]
    worker_cores: tuple[int, ...] = ()

    @classmethod
    def choose(cls, threads: int | None = None, workers: int = 0) -> ThreadLayout:
        """The least busy cores. Workers share cores where there are too few.

        Raises:
            SloBenchError: as `thread_count`.
        """
        count = thread_count(threads, workers)
        if not _PINS:
            return cls(count, ())
        cores = _least_busy_first()
        others = cores[count:] or cores
        return cls(
            count,
            tuple(sorted(cores[:count])),
            tuple(others[place % len(others)] for place in range(workers)),
        )

    @property
    def text(self) -> str:
        """`torch computes with 1 thread, pinned to core 0`."""
        text = f"torch computes with {self.threads} thread{'s' if self.threads > 1 else ''}"
        if not self.cores:
            return f"{text}, which this system cannot pin"
        return f"{text}, pinned to core{'s' if self.threads > 1 else ''} " + ", ".join(
            map(str, self.cores)
        )

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Compute so in this thread, and in the threads that torch starts from it."""
        import torch

        threads, cores = torch.get_num_threads(), available_cores()
        with contextlib.suppress(RuntimeError):  # it was set before; the engine uses none
            torch.set_num_interop_threads(1)
        torch.set_num_threads(self.threads)
        pin(self.cores)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            if self.cores:
                pin(cores)


def pin(cores: Sequence[int]) -> None:
    """Pin this thread; without cores nothing happens."""
    if cores:
        os.sched_setaffinity(0, cores)


def unpin() -> None:
    """Let this thread use all cores again: one that copies beside the computation, and was started
    by a pinned one.
    """
    if _PINS:
        pin(_ALL)


class CpuWait:
    """How long threads were ready to compute and waited for a core, since this object was made.

    The times are Linux's own (`schedstat`: time on a core, time in the run queue), so idle threads
    wait for nothing. Counted are the threads of this process that are pinned as the engine's are,
    and all threads of `processes`.
    """

    def __init__(self, layout: ThreadLayout, processes: Sequence[int] = ()) -> None:
        self._layout = layout
        self._processes = processes
        self._before = self._times_s()

    def seconds(self) -> tuple[float, float]:
        """Seconds on a core, and seconds of waiting for one; of all threads together."""
        ran_s = waited_s = 0.0
        for thread, (ran, waited) in self._times_s().items():
            ran_before, waited_before = self._before.get(thread, (0.0, 0.0))
            ran_s += ran - ran_before
            waited_s += waited - waited_before
        return ran_s, waited_s

    def share(self) -> float | None:
        """Waiting as a share of waiting and computing; None: the system does not tell."""
        ran_s, waited_s = self.seconds()
        return waited_s / (ran_s + waited_s) if ran_s + waited_s > 0 else None

    def _times_s(self) -> dict[int, tuple[float, float]]:
        times_s, cores = {}, set(self._layout.cores)
        for process in (os.getpid(), *self._processes):
            for task in Path(f"/proc/{process}/task").glob("[0-9]*"):
                thread = int(task.name)
                with contextlib.suppress(OSError, ValueError):  # it has ended
                    if process == os.getpid() and os.sched_getaffinity(thread) != cores:
                        continue
                    ran, waited, *_ = (task / "schedstat").read_text().split()
                    times_s[thread] = int(ran) * _NANOSECOND_S, int(waited) * _NANOSECOND_S
        return times_s


def _least_busy_first() -> list[int]:
    """The cores that this thread may use; equally busy ones in another order in each process."""
    before = _busy_ticks()
    time.sleep(_LOOK_S)
    ticks, cores = _busy_ticks(), available_cores()
    return sorted(
        cores,
        key=lambda core: (
            ticks.get(core, 0) - before.get(core, 0),
            (core - os.getpid()) % len(cores),
        ),
    )


def _busy_ticks() -> dict[int, int]:
    """Clock ticks for which each core was busy since the system started; empty if not known."""
    ticks_of = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name != "cpu":
                user, nice, system, _idle, _wait, *interrupts = map(int, ticks[:8])
                ticks_of[int(name[3:])] = user + nice + system + sum(interrupts)
    return ticks_of
