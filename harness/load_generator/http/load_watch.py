"""Collects how the requests of a load fare while it is sent."""

from __future__ import annotations

import numpy as np

from ....workloads.request import SLO_COLUMNS
from ....workloads.workload import Workload
from ...core.judging import judge_times
from ...core.records import time_per_output_token_s
from ..load_progress import LoadProgress
from .connection import Exchange
from .faults import RequestFault


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

    def progress(self, in_flight: int) -> LoadProgress:
        """All exchanges that ended so far, with `in_flight` others."""
        new, self._new = self._new, []
        if new:
            row, arrival_s, first_s, last_s, delay_s, whole = np.array(new).T
            rows, answered = row.astype(np.int64), whole.astype(bool)
            work = self._workload
            tpot_s = time_per_output_token_s(first_s, last_s, work.output_tokens[rows])
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
        return self._known + LoadProgress(in_flight=in_flight)
