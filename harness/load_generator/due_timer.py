"""A timer that is exact to some ten microseconds, where event loops count whole milliseconds.

Linux has timers that are files (timerfd): the loop waits for one as it waits for sockets. Elsewhere
the loop's own timers serve, which fire up to half a millisecond early or late.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
from collections.abc import Callable
from time import perf_counter

_CLOCK_MONOTONIC = 1  # the clock of `perf_counter` on Linux
_AT_TIME = 1  # TFD_TIMER_ABSTIME


class _TimerSpec(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "due_s", "due_ns"))


class DueTimer:
    """Calls `fire` at the time that was set last, by `perf_counter`.

    Attributes:
        early_s: how much too early it may fire.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fire: Callable[[], None]) -> None:
        self._loop = loop
        self._fire = fire
        self._handle: asyncio.TimerHandle | None = None
        self._due_s = math.inf
        self._spec = _TimerSpec()
        self._file = _timer_file()
        self.early_s = 0.0005 if self._file is None else 1e-6
        if self._file is not None:
            self._settime = ctypes.CDLL(None).timerfd_settime
            loop.add_reader(self._file, fire)

    def set(self, due_s: float) -> None:
        """Fire once at `due_s`, at once if that has passed, and never if it is infinite."""
        if self._file is None:
            if self._handle is not None:
                self._handle.cancel()
            self._due_s = due_s
            wait_s = due_s - perf_counter()
            later = self._loop.call_later
            self._handle = None if due_s == math.inf else later(wait_s, self._fire_if_due)
            return
        spec = self._spec
        # Zero switches the timer off; setting it makes the file unreadable until it fires.
        due_ns = 0 if due_s == math.inf else max(1, int(due_s * 1e9))
        spec.due_s, spec.due_ns = divmod(due_ns, 1_000_000_000)
        self._settime(self._file, _AT_TIME, ctypes.byref(spec), None)

    def _fire_if_due(self) -> None:
        # A loop counts from when it last looked at its clock, which may be a while ago.
        if perf_counter() < self._due_s - self.early_s:
            self.set(self._due_s)
        else:
            self._fire()

    def close(self) -> None:
        """Fire no more."""
        if self._file is not None:
            self._loop.remove_reader(self._file)
            os.close(self._file)
        elif self._handle is not None:
            self._handle.cancel()


def _timer_file() -> int | None:
    """A new timer's file; None where the system has none."""
    if sys.platform != "linux":
        return None
    create = getattr(ctypes.CDLL(None), "timerfd_create", None)
    file: int = -1 if create is None else create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return None if file < 0 else file
