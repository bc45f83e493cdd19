"""Faults of a request, and the outcome of each."""

from __future__ import annotations

import errno
from enum import StrEnum

from ...core.records.request_records import Outcome


class RequestFault(StrEnum):
    """Reason why a request has no complete answer; `NONE` if it has one."""

    NONE = ""
    CONNECT = "connect"  # refused, unreachable, no such host
    CONNECT_TIMEOUT = "connect-timeout"
    TLS = "tls"
    RESET = "reset"  # the connection was reset during the exchange
    CUT = "cut"  # the connection was closed before the end of the answer
    STATUS = "status"  # an HTTP status other than 200
    ERROR_EVENT = "error-event"  # status 200, but the stream contains an error
    MALFORMED = "malformed"  # not HTTP, not JSON, or not an answer of the API
    EMPTY = "empty"  # a complete answer without a token
    STALLED = "stalled"  # the answer began, then no data until the stall limit
    ABORTED = "aborted"  # the server reports that it aborted the request
    TIME_LIMIT = "time-limit"  # the time limit of the cell was reached
    CLIENT = "client"  # the client's own: no sockets or ports left


REFUSALS = (429, 503, 529)  # statuses with which a server refuses a request
OVERLOAD = (408, *REFUSALS)  # those that a lower rate may avoid


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
    if fault in (RequestFault.STATUS, RequestFault.ERROR_EVENT) and status in REFUSALS:
        return Outcome.REJECTED
    return Outcome.FAILED


_OURS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)


def connect_fault(error: BaseException) -> RequestFault:
    """Return the fault of a failed connection attempt."""
    import ssl  # for a simulation, a hundredth of a second of start-up

    if isinstance(error, ssl.SSLError | ssl.CertificateError):
        return RequestFault.TLS
    if isinstance(error, TimeoutError):
        return RequestFault.CONNECT_TIMEOUT
    if isinstance(error, OSError) and error.errno in _OURS:
        return RequestFault.CLIENT
    return RequestFault.CONNECT


def connect_detail(error: BaseException) -> str:
    """Return what is said of a failed connection attempt, with the option that mends it."""
    import ssl

    detail = str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        mend = _CERTIFICATE_MENDS.get(error.verify_code, _AUTHORITY)
        message = error.verify_message.rstrip(".")
        return f"the server's certificate is not trusted ({message}): {mend}, or --insecure"
    if isinstance(error, ssl.SSLError) and "WRONG_VERSION_NUMBER" in detail:
        return "the server speaks no TLS there: http:// in place of https://"
    return detail


_AUTHORITY = "--ca-file FILE with the authority's certificate"
_NAME = "give the name that is in the certificate as address"
_CERTIFICATE_MENDS = {  # by OpenSSL's code of the problem (X509_V_ERR_…)
    10: "it has expired, the server needs another one",
    20: f"{_AUTHORITY}, or of the intermediate one that the server does not send",
    62: _NAME,
    64: _NAME,
}
