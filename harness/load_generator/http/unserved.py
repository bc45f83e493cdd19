"""Levels of which no request is served, or none any more: when to end them early, and what is said.

A refusal by a policy of ours is a result: that request counts as served. A server's own refusals
(429, 503) are none unless it serves another request of the level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np

from ...core.records.request_records import Outcome
from ...core.wire import DROPPED, REJECTED
from ..load_progress import LoadProgress
from .answers import Raw, read_answer
from .connection import Exchange
from .faults import OVERLOAD, RequestFault
from .request_columns import FAULTS, RequestColumns

_ENOUGH_REFUSED = 20  # requests: a client error (4xx) does not pass
_ENOUGH_FAILED = 20  # requests, of which no other failure may still pass,
_ENOUGH_S = 10.0  # once it has lasted so long
_ENOUGH_LOST, _LOST_S = 3, 3.0  # connections refused; a server that starts again takes longer
# How requests end whose server goes; they do not show that one is there.
_OF_LOST = (
    RequestFault.RESET,
    RequestFault.CUT,
    RequestFault.STALLED,
    RequestFault.TIME_LIMIT,
    RequestFault.CLIENT,
)
_FEW_FAILED, _LONG_S = 5, 60.0  # where requests are rare, or the server says that it is busy


def is_hopeless(load: LoadProgress, failed_before: str = "") -> bool:
    """Return True if a level has failed from its first requests on, and would go on so.

    `failed_before`: the first fault of the level before, if all of that one failed. A level whose
    first request is refused with the same client error is taken to meet the same fault.
    """
    if load.served or not load.failed_first:
        return False
    return (
        (failed_before != "" and load.first_fault == failed_before)
        or load.refused_first >= _ENOUGH_REFUSED
        or (load.failed_first - load.busy_first >= _ENOUGH_FAILED and load.failing_s >= _ENOUGH_S)
        or (load.failed_first >= _FEW_FAILED and load.failing_s >= _LONG_S)
    )


def is_lost(load: LoadProgress) -> bool:
    """Return True if all servers have gone: only refused connections for a while."""
    enough = load.refused_connections >= _ENOUGH_LOST and load.lost_s >= _LOST_S
    return enough and not load.answering


class LostServers:
    """Counts the connections of one sender that were refused since a server last answered."""

    def __init__(self) -> None:
        self._refused = 0
        self._since_s = 0.0

    def ended(self, exchange: Exchange) -> None:
        """Note an exchange that has ended."""
        if exchange.fault is RequestFault.CONNECT:
            if not self._refused:
                self._since_s = exchange.end_s
            self._refused += 1
        elif exchange.fault not in _OF_LOST:
            self._refused = 0

    def progress(self, answering: int) -> LoadProgress:
        """The connections refused so far, with the number of requests on open connections."""
        lost_s = perf_counter() - self._since_s if self._refused else 0.0
        return LoadProgress(refused_connections=self._refused, lost_s=lost_s, answering=answering)


class FirstFailures:
    """Counts the failures of one sender's first requests, until one is served.

    A request that was too slow for the stall limit ends the count: the server may be overloaded.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = exchanges  # in the order in which they were sent
        self.serves = False  # whether a request was served
        self._ended = 0  # the first that have all ended
        self._refused = self._busy = 0
        self._failing_s = 0.0
        self._first_fault = ""

    def ended(self, exchange: Exchange, raw: Raw) -> None:
        """Note an exchange that has ended; once one was served, nothing more is read."""
        if self.serves:
            return
        answer = read_answer(raw)
        self.serves = answer.outcome is Outcome.FINISHED or _is_decision(answer.detail)
        if exchange is self._exchanges[0] and _is_refused(exchange):
            self._first_fault = fault_code(answer.fault, exchange.status)

    def progress(self, in_flight: int) -> LoadProgress:
        """The failures so far, with the requests in flight."""
        if self.serves:
            return LoadProgress(in_flight=in_flight, served=1)
        while self._ended < len(self._exchanges):
            exchange = self._exchanges[self._ended]
            in_flight_yet = exchange.end_s != exchange.end_s  # NaN
            if in_flight_yet or exchange.fault is RequestFault.STALLED:
                break
            self._ended += 1
            self._refused += _is_refused(exchange)
            self._busy += exchange.status in OVERLOAD
            lasted_s = exchange.end_s - self._exchanges[0].started_s
            self._failing_s = max(self._failing_s, lasted_s)
        return LoadProgress(
            in_flight=in_flight,
            failed_first=self._ended,
            refused_first=self._refused,
            busy_first=self._busy,
            failing_s=self._failing_s,
            first_fault=self._first_fault,
        )


def _is_refused(exchange: Exchange) -> bool:
    return exchange.status // 100 == 4 and exchange.status not in OVERLOAD


def _is_decision(detail: str) -> bool:
    return detail.startswith((REJECTED, DROPPED))


def fault_code(fault: RequestFault, status: int) -> str:
    """A fault without its words, which may name the request: `status 404`."""
    return f"{fault.value} {status}"


def first_fault(columns: RequestColumns) -> str:
    """The fault of the request that was sent first; empty if none was sent."""
    if np.isnan(columns.started_s).all():
        return ""
    row = int(np.nanargmin(columns.started_s))
    return fault_code(FAULTS[columns.fault[row]], int(columns.status[row]))


def most_common_detail(columns: RequestColumns, details: Mapping[int, str]) -> str | None:
    """What was said of the first request with the most common fault; None without a fault."""
    counts = np.bincount(columns.fault, minlength=len(FAULTS))
    counts[FAULTS.index(RequestFault.NONE)] = 0
    if not counts.any():
        return None
    fault = int(counts.argmax())
    row = int(np.argmax(columns.fault == fault))
    return f"{FAULTS[fault].value}: {details[row]}" if row in details else None


def unserved_because(
    columns: RequestColumns, details: Mapping[int, str], *, ended_early: bool = False
) -> str | None:
    """Return why a level has no result: not one of its requests was served; None if one was.

    A request that brought tokens until the level's time limit was served, but not one until the
    level was `ended_early`. Where requests failed on our side, nothing is known of the servers.
    """
    slow = (columns.outcome == Outcome.UNFINISHED) & np.isfinite(columns.first_token_s)
    slow &= not ended_early
    if (slow | (columns.outcome == Outcome.FINISHED)).any():
        return None
    if any(_is_decision(detail) for detail in details.values()):
        return None
    if (columns.fault == FAULTS.index(RequestFault.CLIENT)).any():
        return None
    requests, sent = len(columns.started_s), int(np.isfinite(columns.started_s).sum())
    common_detail = most_common_detail(columns, details)
    why = "" if common_detail is None else f" ({common_detail})"
    if sent == requests:
        return f"not one of {requests:,} requests was served{why}"
    return f"not one of the first {sent:,} of {requests:,} requests was served{why}"
