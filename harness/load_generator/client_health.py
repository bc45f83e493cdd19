"""Accuracy of the load generator: of the whole client and of each sending process.

A level in which the client was late says more about the client than about the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...workloads.workload import Workload
from .http.columns import FAULTS, RequestColumns, SenderResult
from .http.faults import RequestFault
from .send_job import SendResult, Share, rows_of

Floats = NDArray[np.float64]
_FEW_REQUESTS = 20  # a rate over fewer says little


@dataclass(frozen=True)
class Client:
    """A sending process; seconds, NaN where nothing is known.

    `requests`: number in its share of the workload. `machine`: host name, empty for this machine.
    `offset_s`: seconds that the machine's clock was ahead of ours; `clock_error_s`: bound on the
    error of that offset.
    """

    machine: str
    requests: int
    send_delay_p50_s: float
    send_delay_p99_s: float
    send_delay_max_s: float
    event_loop_lag_p99_s: float
    cpu_s: float
    offset_s: float
    clock_error_s: float
    died: bool


def clients_of(workload: Workload, sent: Sequence[SendResult]) -> tuple[Client, ...]:
    """Return the timing statistics of each sending process, in order of their shares."""
    return tuple(
        _client(one, len(rows_of(workload, Share(index, len(sent)))))
        for index, one in enumerate(sent)
    )


def _client(sent: SendResult, requests: int) -> Client:
    nothing = np.empty(0)
    part = sent.part
    late_s, lag_s = nothing, nothing
    if part is not None:
        late_s = np.maximum(0.0, part.columns.started_s - part.columns.arrival_s)
        lag_s = part.lag_s
    return Client(
        machine=sent.machine,
        requests=requests,
        send_delay_p50_s=quantile(late_s, 0.5),
        send_delay_p99_s=quantile(late_s, 0.99),
        send_delay_max_s=quantile(late_s, 1.0),
        event_loop_lag_p99_s=quantile(lag_s, 0.99),
        cpu_s=float("nan") if part is None else part.cpu_s,
        offset_s=sent.offset_s,
        clock_error_s=sent.clock_error_s,
        died=part is None,
    )


def untrusted_because(clients: Sequence[Client], *, send_delay_limit_s: float) -> str | None:
    """Return why a level sent by these processes must not be used, or None."""
    for number, client in enumerate(clients, 1):
        who = f"client {number} of {len(clients)}"
        if client.machine:
            who += f", on {client.machine},"
        if client.died:
            return f"{who} died: what became of its {client.requests:,} requests is unknown"
        if client.clock_error_s == float("inf"):
            return f"{who} did not tell its clock after the level, so its times are uncertain"
        if client.clock_error_s > send_delay_limit_s:
            return (
                f"{who} has a clock that is known to ±{client.clock_error_s * 1e3:.1f} ms alone, "
                f"{send_delay_limit_s * 1e3:g} ms is the limit"
            )
        if client.machine and client.send_delay_p99_s > send_delay_limit_s:
            return (
                f"{who} sent late: {client.send_delay_p99_s * 1e3:.1f} ms at p99, "
                f"{send_delay_limit_s * 1e3:g} ms is the limit"
            )
    return None


@dataclass(frozen=True)
class ClientFigures:
    """Accuracy of the load generator in seconds; NaN if nothing was measured."""

    send_delay_p50_s: float
    send_delay_p99_s: float
    event_loop_lag_p99_s: float
    offered_rps: float
    sent_rps: float
    cpu_s: float
    peak_rss_bytes: int
    processes: int
    client_errors: int


def client_figures(
    columns: RequestColumns, parts: Sequence[SenderResult], processes: int
) -> ClientFigures:
    """Sum up one cell from its requests and the results of its sending processes."""
    sent = ~np.isnan(columns.started_s)
    due_s, started_s = columns.arrival_s[sent], columns.started_s[sent]
    late_s = np.maximum(0.0, started_s - due_s)
    lag_s = np.concatenate([part.lag_s for part in parts])
    return ClientFigures(
        send_delay_p50_s=quantile(late_s, 0.5),
        send_delay_p99_s=quantile(late_s, 0.99),
        event_loop_lag_p99_s=quantile(lag_s, 0.99),
        offered_rps=_rate(due_s),
        sent_rps=_rate(started_s),
        cpu_s=sum(part.cpu_s for part in parts),
        peak_rss_bytes=max(part.peak_rss_bytes for part in parts),
        processes=processes,
        client_errors=int((columns.fault == FAULTS.index(RequestFault.CLIENT)).sum()),
    )


def invalid_because(
    figures: ClientFigures, requests: int, *, send_delay_limit_s: float, rate_limit_share: float
) -> str | None:
    """Return why the level must not be used, or None."""
    reasons: Sequence[tuple[bool, str]] = (
        (figures.client_errors > 0, f"{figures.client_errors} requests failed on our side"),
        (
            figures.send_delay_p99_s > send_delay_limit_s,
            f"requests were sent late: {figures.send_delay_p99_s * 1e3:.1f} ms at p99, "
            f"{send_delay_limit_s * 1e3:g} ms is the limit",
        ),
        (
            figures.event_loop_lag_p99_s > send_delay_limit_s,
            f"the client was busy: its event loop lagged {figures.event_loop_lag_p99_s * 1e3:.1f} "
            f"ms at p99, {send_delay_limit_s * 1e3:g} ms is the limit",
        ),
        (
            requests >= _FEW_REQUESTS
            and figures.sent_rps < (1 - rate_limit_share) * figures.offered_rps,
            f"{figures.sent_rps:.4g} req/s were sent where {figures.offered_rps:.4g} were due",
        ),
    )
    return next((reason for wrong, reason in reasons if wrong), None)


def quantile(values: Floats, q: float) -> float:
    """Quantile `q` of `values`, in their unit; NaN if there are none."""
    return float(np.quantile(values, q)) if len(values) else float("nan")


def _rate(times_s: Floats) -> float:
    span_s = float(times_s.max() - times_s.min()) if len(times_s) > 1 else 0.0
    return (len(times_s) - 1) / span_s if span_s > 0 else float("nan")
