"""Faults of a request, and the outcome of each."""

from __future__ import annotations

import asyncio
import errno
import ssl
from enum import StrEnum

from ...core.records import Outcome


class RequestFault(StrEnum):
    """Why a request has no whole answer. `NONE`: it has one."""

    NONE = ""
    CONNECT = "connect"  # refused, unreachable, no such host
    CONNECT_TIMEOUT = "connect-timeout"
    TLS = "tls"
    RESET = "reset"  # the connection broke in the middle of it
    CUT = "cut"  # it was closed before the answer's end
    STATUS = "status"  # an HTTP status other than 200
    ERROR_EVENT = "error-event"  # status 200, but the stream contains an error
    MALFORMED = "malformed"  # what came is no HTTP, no JSON, or no answer
    EMPTY = "empty"  # a whole answer without a token
    STALLED = "stalled"  # began, and then nothing came for too long
    ABORTED = "aborted"  # the server says that it gave the request up
    TIME_LIMIT = "time-limit"  # the cell's time was over
    CLIENT = "client"  # our own: no more sockets, no more ports


REFUSALS = (429, 503)  # statuses by which a server turns a request away


def outcome_of(fault: RequestFault, status: int, *, refused: bool = False) -> Outcome:
    """Return the outcome of a fault: refused is `REJECTED`, dropped by the server is `DROPPED`,
    any other `FAILED`.
    """
    if fault is RequestFault.NONE:
        return Outcome.FINISHED
    if fault is RequestFault.TIME_LIMIT:
        return Outcome.UNFINISHED
    if fault is RequestFault.ABORTED:
        return Outcome.REJECTED if refused else Outcome.DROPPED
    if fault is RequestFault.STATUS and status in REFUSALS:
        return Outcome.REJECTED
    return Outcome.FAILED


_OURS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)


def connect_fault(error: BaseException) -> RequestFault:
    """Return the fault of a failed connection attempt."""
    if isinstance(error, ssl.SSLError | ssl.CertificateError):
        return RequestFault.TLS
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return RequestFault.CONNECT_TIMEOUT
    if isinstance(error, OSError) and error.errno in _OURS:
        return RequestFault.CLIENT
    return RequestFault.CONNECT
