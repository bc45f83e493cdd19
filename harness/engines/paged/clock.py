"""Real time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since it began."""

    def now_s(self) -> float:
        """Now."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Return then, or at once if it is past."""
        ...


class RealClock:
    """The machine's own, which never goes back."""

    def __init__(self) -> None:
        self._begin_s = time.perf_counter()

    def now_s(self) -> float:
        """See `Clock`."""
        return time.perf_counter() - self._begin_s

    def wait_until(self, time_s: float) -> None:
        """See `Clock`."""
        while (left_s := time_s - self.now_s()) > 0:
            time.sleep(left_s)
