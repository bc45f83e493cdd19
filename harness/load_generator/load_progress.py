"""What is known of a load while it is sent: how many requests have ended, and how they fared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadProgress:
    """Requests of a load so far, in counts and sums, so that those of several senders add up.

    Times are from the scheduled arrival. TTFT is to the first data of the answer, and the number of
    its tokens is taken to be the one asked for: answers are read after the load, when every figure
    is exact. `judged` counts the ended requests of which it is known whether they are within their
    SLO, `met` those that are.
    """

    ended: int = 0
    in_flight: int = 0
    judged: int = 0
    met: int = 0
    answered: int = 0  # of those that ended, whole and with status 200
    ttft_sum_s: float = 0.0
    timed: int = 0  # answered with more than one token
    tpot_sum_s: float = 0.0
    send_delay_s: float = 0.0  # the longest

    def __add__(self, other: LoadProgress) -> LoadProgress:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return LoadProgress(**sums | {"send_delay_s": max(self.send_delay_s, other.send_delay_s)})

    @property
    def mean_ttft_s(self) -> float | None:
        """Mean time to the first data of the answers so far; None without one."""
        return self.ttft_sum_s / self.answered if self.answered else None

    @property
    def mean_tpot_s(self) -> float | None:
        """Mean time per output token of the answers so far; None without one of several tokens."""
        return self.tpot_sum_s / self.timed if self.timed else None

    @property
    def attainment(self) -> float | None:
        """Share in SLO of the judged requests; None before the first."""
        return self.met / self.judged if self.judged else None


Progress = Callable[[LoadProgress, float], None]  # and the clock in seconds
