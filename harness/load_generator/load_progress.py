"""What is known of a load while it is sent: how many requests have ended, and how they fared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...workloads.request import SLO_COLUMNS
from ...workloads.workload import Workload
from ..core.records.judging import judge_times
from ..core.records.request_records import time_per_output_token_s
from .http.faults import RequestFault

if TYPE_CHECKING:
    from .http.connection import Exchange


@dataclass(frozen=True)
class LoadProgress:
    """Requests of a load so far, in counts and sums, so that those of several senders add up.

    Times are from the scheduled arrival. TTFT is to the first data of the answer, and the number of
    its tokens is taken to be the one asked for: answers are read after the load, when every figure
    is exact. `judged` counts the ended requests of which it is known whether they are within their
    SLO, `met` those that are.

    `served` is above 0 once a request was served. Until then `failed_first` counts the requests
    that have failed, from the first one sent on without a gap; `refused_first` are those of them
    with a status that means no at any time, `busy_first` those with one of a server that is busy.
    They went on for `failing_s`. `first_fault` is the fault of the very first one if that was
    refused. `refused_connections` in a row, for `lost_s` since the first; `answering` requests are
    on open connections.
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
    served: int = 0
    failed_first: int = 0
    refused_first: int = 0
    busy_first: int = 0
    failing_s: float = 0.0
    first_fault: str = ""
    refused_connections: int = 0
    lost_s: float = 0.0
    answering: int = 0

    def __add__(self, other: LoadProgress) -> LoadProgress:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        whole = {
            "send_delay_s": max(self.send_delay_s, other.send_delay_s),
            "lost_s": max(self.lost_s, other.lost_s),
            "failing_s": max(self.failing_s, other.failing_s),
            "first_fault": self.first_fault or other.first_fault,
        }
        return LoadProgress(**sums | whole)

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
Watch = Callable[[LoadProgress, float], bool]  # the same; True ends the level


class LoadWatch:
    """Collects the times of exchanges as they end, and judges them when it is asked."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._new: list[tuple[int, float, float, float, float, bool]] = []
        self._known = LoadProgress()

    def ended(self, exchange: Exchange, start_s: float) -> None:
        """Note an exchange that still has its stamps; `start_s` is the workload's time zero."""
        stamps = exchange.stamps
        due_s = start_s + exchange.arrival_s
        answered = exchange.fault is RequestFault.NONE and exchange.status == 200 and bool(stamps)
        first_s, last_s = (stamps[0] - due_s, stamps[-1] - due_s) if answered else (0.0, 0.0)
        delay_s = exchange.started_s - due_s
        arrival_s = exchange.arrival_s
        self._new.append((exchange.row, arrival_s, first_s, last_s, delay_s, answered))

    def progress(self, failures: LoadProgress) -> LoadProgress:
        """All exchanges that ended so far, with those in flight and the `failures` so far."""
        new, self._new = self._new, []
        if new:
            row, arrival_s, first_s, last_s, delay_s, whole = np.array(new).T
            rows, answered = row.astype(np.int64), whole.astype(bool)
            work = self._workload
            tokens = work.output_tokens[rows]
            untimed_tokens = np.where(last_s > first_s, 1, tokens)
            tpot_s = time_per_output_token_s(first_s, last_s, tokens, untimed_tokens)
            seconds = {"ttft": first_s, "tpot": tpot_s, "e2e": last_s}
            seconds["deadline"] = arrival_s + last_s
            bounds_s = {key: getattr(work, column)[rows] for key, column in SLO_COLUMNS.items()}
            timed = answered & np.isfinite(tpot_s)
            self._known += LoadProgress(
                ended=len(new),
                judged=len(new),
                answered=int(answered.sum()),
                met=int(judge_times(answered, seconds, bounds_s).met.sum()),
                ttft_sum_s=float(first_s[answered].sum()),
                timed=int(timed.sum()),
                tpot_sum_s=float(tpot_s[timed].sum()),
                send_delay_s=float(delay_s.max()),
            )
        return self._known + failures
