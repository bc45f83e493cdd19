"""Sends a workload to several real servers behind one router, and returns the result."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...workloads.arrays import Floats, Ints
from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from ..core.records.request_records import Outcome, Records, Result, Timeline, Totals
from ..policies.routers import router as router_by_name
from .http.endpoint import Endpoint
from .http.faults import RequestFault
from .http.http_options import HttpOptions
from .http.request_columns import FAULTS, RequestColumns, SenderResult, joined_columns, joined_gaps
from .http.unserved import first_fault, is_hopeless, is_lost, unserved_because
from .http.wire_requests import Bodies
from .load_progress import LoadProgress, Progress
from .machine import sockets_left
from .send_job import (
    BODIES,
    Senders,
    SendJob,
    SendResult,
    Share,
    ThisMachine,
    rows_of,
    send_share,
    time_limit_of,
)

_SAMPLES = 300
_UNKNOWN = float("nan")


@dataclass(frozen=True)
class HttpResult:
    """Result of one measured level.

    `result` is as the simulator's, where the client can see it: what happens inside the server
    (batches, KV use, preemptions) is NaN or zero. `columns` has what only a client knows.
    `clients` are the processes that sent.
    `start_s` is the workload's time zero by `time.perf_counter`.
    `failed_as` is how the first request failed if not one was served, else empty.
    `details` says what is known of a fault and `texts` what was answered, both by row; `token_s`
    holds the times of all tokens, request after request, where `HttpOptions` asks for them.
    """

    result: Result
    columns: RequestColumns
    client: ClientFigures
    clients: tuple[Client, ...]
    invalid_because: str | None
    failed_as: str
    details: Mapping[int, str]
    texts: Mapping[int, str]
    token_s: Floats
    start_s: float

    def faults(self) -> dict[RequestFault, int]:
        """Number of requests by fault."""
        counts = Counter(self.columns.fault.tolist())
        return {fault: counts[k] for k, fault in enumerate(FAULTS) if k in counts and fault}


def measure(
    workload: Workload,
    endpoints: Sequence[Endpoint],
    options: HttpOptions | None = None,
    *,
    router: str = "round-robin",
    progress: Progress | None = None,
    senders: Senders | None = None,
    gone: Callable[[], bool] = lambda: False,
) -> HttpResult:
    """Send every request when it is due, follow each to its end, and read what came.

    Open loop: nothing holds a request back, however many are under way. Requests that follow
    others, and those of a workload with a concurrency, wait for real answers.

    Args:
        workload: what arrives; its clock starts when the first connection could be made.
        endpoints: the servers.
        options: API, request fields and limits.
        router: name of the router that chooses among the servers.
        progress: called now and then with what is known so far, and the clock in seconds.
        senders: where requests are sent from; by default this machine.
        gone: asked now and then whether the servers have ended, which ends the level.

    Raises:
        SloBenchError: nothing can be sent: no endpoint, an unknown host, a missing key, a
            prompt that cannot be made. What single requests suffer is their outcome.
    """
    options = options or HttpOptions()
    if not endpoints:
        raise SloBenchError("no server to measure; give its address with --base-url")
    time_limit_s = time_limit_of(workload, options)
    if router_by_name(router).measures:
        raise SloBenchError(
            f"{router} needs load metrics of the servers, which a client does not read: "
            f"put a gateway before them (slo-bench serve, --router {router}) and measure that"
        )
    options.header_fields()
    whence = senders or ThisMachine()
    processes = _processes(workload, options, whence)
    if senders is not None and options.length_predictor:
        raise SloBenchError("lengths are predicted on this machine alone: leave --executor out")
    if processes > 1 and options.length_predictor:
        raise SloBenchError(
            f"lengths are predicted in one process, but --processes is {processes}; leave "
            "--processes out"
        )

    ended_because = ""

    def watch(load: LoadProgress, clock_s: float) -> bool:
        nonlocal ended_because
        if progress is not None:
            progress(load, clock_s)
        if not ended_because:
            ended_because = _end_of(load, clock_s, gone, options.failed_before)
        return bool(ended_because)

    with tempfile.TemporaryDirectory(prefix="slo-bench-") as folder:
        bodies = Bodies.write(workload, options, Path(folder) / BODIES)
        job = SendJob(workload, endpoints, options, router, processes, bodies, time_limit_s)
        try:
            if processes == 1 and senders is None:
                sent = [SendResult(send_share(job, Share(0, 1), progress=watch))]
            else:
                sent = whence.send(job, watch)
        finally:
            bodies.close()
    return _joined(workload, sent, options, ended_because)


def _processes(workload: Workload, options: HttpOptions, whence: Senders) -> int:
    processes = options.processes or (1 if options.length_predictor else whence.count(workload))
    return min(processes, workload.concurrency or processes)


def connections_note(workload: Workload, options: HttpOptions) -> str:
    """How many connections this machine allows, where a level needs more; else empty.

    A closed loop needs its concurrency, an open one at least those of the second in which most
    requests arrive.
    """
    needed, why = workload.concurrency or 0, "are open at once"
    if workload.concurrency is None:
        arrival_s = np.sort(workload.arrival_s[workload.follows < 0])
        ends = np.searchsorted(arrival_s, arrival_s + 1.0, side="right")
        needed = int((ends - np.arange(len(arrival_s))).max(initial=0))
        why = "arrive within a second"
    processes = _processes(workload, options, ThisMachine())
    connections = sockets_left() * processes
    if needed <= connections:
        return ""
    return (
        f"{needed:,} requests of the level {why}, but the limit of open files (ulimit -n) leaves "
        f"{connections:,.0f} connections to {processes} process{'es' * (processes > 1)}: those "
        "beyond it fail and make the level invalid; raise the limit, or give more --processes"
    )


def _end_of(
    load: LoadProgress, clock_s: float, gone: Callable[[], bool], failed_before: str
) -> str:
    """Why a level ends before its time; empty if it goes on."""
    if gone():
        return f"a server ended {clock_s:.0f} s after the level began"
    if is_lost(load):
        return f"no server could be reached from {max(0.0, clock_s - load.lost_s):.0f} s on"
    return "it was ended before its time" if is_hopeless(load, failed_before) else ""


def _joined(
    workload: Workload, sent: Sequence[SendResult], options: HttpOptions, ended_because: str
) -> HttpResult:
    parts = [sender.part for sender in sent if sender.part is not None]
    if not parts:
        reasons = dict.fromkeys(
            f"{sender.machine}: {sender.lost_because}" for sender in sent if sender.lost_because
        )
        raise SloBenchError(
            "every process that sent has died, and nothing is known of the level; use fewer "
            f"--processes if memory or cores are short{''.join(f' ({why})' for why in reasons)}"
        )
    clients = clients_of(workload, sent)
    columns = joined_columns(parts, len(workload))
    gaps = joined_gaps(part.gaps for part in parts)
    client = client_figures(columns, parts, len(sent))
    details = {row: text for part in parts for row, text in part.details.items()}
    died = any(client.died for client in clients)
    unserved = None if died else unserved_because(columns, details, ended_early=bool(ended_because))
    drift = tuple(row for part in parts for row in part.length_drift)
    timeline = replace(_timeline(columns), timeseries=drift)
    return HttpResult(
        result=Result(_records(columns), gaps, timeline, _totals(columns)),
        columns=columns,
        client=client,
        clients=clients,
        invalid_because=unserved
        or _partly(ended_because, columns)
        or untrusted_because(clients, send_delay_limit_s=options.send_delay_limit_s)
        or invalid_because(
            client,
            int((~np.isnan(columns.started_s)).sum()),
            send_delay_limit_s=options.send_delay_limit_s,
            rate_limit_share=options.rate_limit_share,
        ),
        failed_as="" if unserved is None else first_fault(columns),
        details=details,
        texts={row: text for part in parts for row, text in part.texts.items()},
        token_s=_in_row_order(parts),
        start_s=parts[0].start_s,
    )


def _partly(ended_because: str, columns: RequestColumns) -> str | None:
    """Why a level ended before its time, with what was measured of it."""
    if not ended_because:
        return None
    finished = int((columns.outcome == Outcome.FINISHED).sum())
    return f"{ended_because}: {finished:,} of {len(columns.outcome):,} requests were served before"


def _in_row_order(parts: Sequence[SenderResult]) -> Floats:
    """Join the token times of all parts in order of rows."""
    rows = np.concatenate([np.repeat(p.rows, p.columns.output_tokens) for p in parts])
    token_s = np.concatenate([p.token_s for p in parts])
    return token_s[np.argsort(rows, kind="stable")] if len(token_s) else token_s


def _records(columns: RequestColumns) -> Records:
    records = Records.empty(len(columns.arrival_s))
    finished = columns.outcome == Outcome.FINISHED
    for name in ("arrival_s", "first_token_s", "outcome", "output_tokens", "cached_tokens"):
        getattr(records, name)[:] = getattr(columns, name)
    records.finish_s[:] = np.where(finished, columns.last_token_s, np.nan)
    records.instance[:] = columns.endpoint
    return replace(records, untimed_tokens=columns.untimed_tokens)


def _timeline(columns: RequestColumns) -> Timeline:
    """Count requests in progress over time, as seen by the client: waiting for a first token, or
    receiving.
    """
    sent = ~np.isnan(columns.started_s)
    begin = np.sort(columns.started_s[sent])
    if not len(begin):
        nothing = np.zeros(0, dtype=np.int64)
        return Timeline(np.empty(0), nothing, nothing, np.empty(0))
    first = np.fmin(columns.first_token_s, columns.ended_s)[sent]
    first = np.sort(np.where(np.isnan(first), np.inf, first))
    ends = columns.ended_s[sent]
    ends = np.sort(np.where(np.isnan(ends), np.inf, ends))
    last = ends[np.isfinite(ends)].max(initial=begin[-1])
    time_s = np.linspace(min(0.0, begin[0]), last, _SAMPLES)

    def until(moments: Floats) -> Ints:
        return np.searchsorted(moments, time_s, side="right")

    begun = until(first)
    return Timeline(time_s, until(begin) - begun, begun - until(ends), np.full(_SAMPLES, _UNKNOWN))


def _totals(columns: RequestColumns) -> Totals:
    finish_s = columns.last_token_s[columns.outcome == Outcome.FINISHED]
    return Totals(
        makespan_s=float(finish_s.max(initial=0.0)),
        busy_s=_UNKNOWN,
        steps=0,
        prefill_tokens=int(np.maximum(columns.prompt_tokens, 0).sum()),
        decode_tokens=int(columns.output_tokens.sum()),
        padded_tokens=0,
        kv_cache_usage_peak=_UNKNOWN,
        kv_cache_usage_mean=_UNKNOWN,
    )


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
        _client(sender, len(rows_of(workload, Share(index, len(sent)))))
        for index, sender in enumerate(sent)
    )


def _client(sent: SendResult, requests: int) -> Client:
    part = sent.part
    late_s = lag_s = np.empty(0)
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
