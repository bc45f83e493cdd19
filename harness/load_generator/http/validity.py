"""Was the client late? A level in which it was says more of the client than of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_FEW_REQUESTS = 20  # a rate over fewer says little


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
    due_s: Floats,
    started_s: Floats,
    lag_s: Floats,
    *,
    cpu_s: float,
    peak_rss_bytes: int,
    processes: int,
    client_errors: int,
) -> ClientFigures:
    """Sum up one cell. `due_s` and `started_s` are of the requests that were sent."""
    late_s = np.maximum(0.0, started_s - due_s)
    return ClientFigures(
        send_delay_p50_s=quantile(late_s, 0.5),
        send_delay_p99_s=quantile(late_s, 0.99),
        event_loop_lag_p99_s=quantile(lag_s, 0.99),
        offered_rps=_rate(due_s),
        sent_rps=_rate(started_s),
        cpu_s=cpu_s,
        peak_rss_bytes=peak_rss_bytes,
        processes=processes,
        client_errors=client_errors,
    )


def invalid_because(
    figures: ClientFigures, requests: int, *, send_delay_limit_s: float, rate_limit_share: float
) -> str | None:
    """Why the level must not be used, or None."""
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
    """In the unit of `values`; NaN of nothing."""
    return float(np.quantile(values, q)) if len(values) else float("nan")


def _rate(times_s: Floats) -> float:
    span_s = float(times_s.max() - times_s.min()) if len(times_s) > 1 else 0.0
    return (len(times_s) - 1) / span_s if span_s > 0 else float("nan")
