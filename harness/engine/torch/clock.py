"""Real time, and the time that one thread computes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable


class Clock(ABC):
    """Seconds of `elapsed_s` since the clock was made or set to zero."""

    def __init__(self, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self.begin()

    def begin(self) -> None:
        """Set the clock to zero."""
        self._zero_s = self._elapsed_s()

    def now_s(self) -> float:
        """Seconds since the clock was set to zero."""
        return self._elapsed_s() - self._zero_s

    @abstractmethod
    def wait_until(self, time_s: float) -> None:
        """Return then, or at once if it is past."""


class RealClock(Clock):
    """The machine's own, which never goes back."""

    def __init__(self) -> None:
        super().__init__(time.perf_counter)

    def wait_until(self, time_s: float) -> None:
        while (left_s := time_s - self.now_s()) > 0:
            time.sleep(left_s)


class TurnClock(Clock):
    """The clock of one of several instances that take turns: it stands at the time of the instance
    when its iteration begins, and goes on with `elapsed_s` from there. So every instance has the
    time that it takes by itself, whoever computed meanwhile.
    """

    def wait_until(self, time_s: float) -> None:
        self._zero_s = self._elapsed_s() - time_s


class CpuClock(Clock):
    """CPU time of the thread that made it; waits are skipped.

    What a run would take on a machine with nothing else to do, and no more than that: time in which
    others have the core does not count.
    """

    def __init__(self) -> None:
        super().__init__(time.thread_time)

    def wait_until(self, time_s: float) -> None:
        self._zero_s -= max(0.0, time_s - self.now_s())
