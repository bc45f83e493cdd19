"""Real time, and the time that one thread computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class WallClock(Protocol):
    """Real time in seconds since its start."""

    def now_s(self) -> float:
        """Seconds since the clock was started."""

    def wait_until(self, time_s: float) -> None:
        """Return then, or at once if it is past."""


class RealClock:
    """The machine's own, which never goes back."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Set the clock to zero."""
        self._begin_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._begin_s

    def wait_until(self, time_s: float) -> None:
        while (left_s := time_s - self.now_s()) > 0:
            time.sleep(left_s)


class TurnClock:
    """The clock of one of several instances that take turns: it stands at the time of the instance
    when its iteration begins, and goes on with `elapsed_s` from there. So every instance has the
    time that it takes by itself, whoever computed meanwhile.
    """

    def __init__(self, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self.begin()

    def begin(self) -> None:
        """Set the clock to zero."""
        self._offset_s = -self._elapsed_s()

    def now_s(self) -> float:
        return self._elapsed_s() + self._offset_s

    def wait_until(self, time_s: float) -> None:
        self._offset_s = time_s - self._elapsed_s()


class CpuClock:
    """CPU time of the thread that made it; waits are skipped.

    What a run would take on a machine with nothing else to do, and no more than that: time in which
    others have the core does not count.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Set the clock to zero."""
        self._skipped_s = -time.thread_time()

    def now_s(self) -> float:
        return time.thread_time() + self._skipped_s

    def wait_until(self, time_s: float) -> None:
        self._skipped_s += max(0.0, time_s - self.now_s())
