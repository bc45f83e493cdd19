"""Several processes that send one load: how well each did, and whether the level can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...workloads.workload import Workload
from .http.validity import quantile
from .send_job import SendResult
from .shares import Share, rows_of


@dataclass(frozen=True)
class Client:
    """A sending process; seconds, NaN where nothing is known.

    `requests` is its share of the workload. `machine` is empty for this one. `offset_s` is by how
    much that machine's clock was ahead of ours, `clock_error_s` by how much that may be wrong.
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
    """Why a level that these sent must not be used, or None."""
    for number, client in enumerate(clients, 1):
        who = f"client {number} of {len(clients)}"
        if client.machine:
            who += f", on {client.machine},"
        if client.died:
            return f"{who} died: what became of its {client.requests:,} requests is unknown"
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
