"""Sends a workload to several real servers behind one router, and returns the result."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from ..core.records import Gaps, Outcome, Records, Result, Timeline, Totals
from ..policies.routers import router as router_by_name
from .client_health import (
    Client,
    ClientFigures,
    client_figures,
    clients_of,
    invalid_because,
    untrusted_because,
)
from .http.columns import FAULTS, RequestColumns, SenderResult, joined_columns, joined_gaps
from .http.endpoint import Endpoint
from .http.faults import RequestFault
from .http.options import HttpOptions
from .http.wire_requests import Bodies
from .load_progress import Progress
from .send_job import (
    BODIES,
    Senders,
    SendJob,
    SendResult,
    Share,
    ThisMachine,
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
    `details` says what is known of a fault and `texts` what was answered, both by row; `token_s`
    holds the times of all tokens, request after request, where `HttpOptions` asks for them.
    """

    result: Result
    columns: RequestColumns
    client: ClientFigures
    clients: tuple[Client, ...]
    invalid_because: str | None
    details: Mapping[int, str]
    texts: Mapping[int, str]
    token_s: NDArray[np.float64]
    start_s: float

    def faults(self) -> dict[RequestFault, int]:
        """Number of requests by fault."""
        found = Counter(self.columns.fault.tolist())
        return {fault: found[k] for k, fault in enumerate(FAULTS) if k in found and fault}


def measure(
    workload: Workload,
    endpoints: Sequence[Endpoint],
    options: HttpOptions | None = None,
    *,
    router: str = "round-robin",
    progress: Progress | None = None,
    senders: Senders | None = None,
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
    options.header_lines()
    whence = senders or ThisMachine()
    processes = options.processes or (1 if options.length_predictor else whence.count(workload))
    if workload.concurrency is not None:
        processes = min(processes, workload.concurrency)
    if senders is not None and options.length_predictor:
        raise SloBenchError("lengths are predicted on this machine alone: leave --executor out")
    if processes > 1 and options.length_predictor:
        raise SloBenchError(
            f"lengths are predicted in one process, but --processes is {processes}; leave "
            "--processes out"
        )
    with tempfile.TemporaryDirectory(prefix="slo-bench-") as folder:
        bodies = Bodies.write(workload, options, Path(folder) / BODIES)
        job = SendJob(workload, endpoints, options, router, processes, bodies, time_limit_s)
        try:
            if processes == 1 and senders is None:
                sent = [SendResult(send_share(job, Share(0, 1), progress=progress))]
            else:
                sent = whence.send(job, progress)
        finally:
            bodies.close()
    return _joined(workload, sent, options)


def _joined(workload: Workload, sent: Sequence[SendResult], options: HttpOptions) -> HttpResult:
    parts = [one.part for one in sent if one.part is not None]
    if not parts:
        known = dict.fromkeys(
            f"{one.machine}: {one.lost_because}" for one in sent if one.lost_because
        )
        raise SloBenchError(
            "every process that sent has died, and nothing is known of the level; use fewer "
            f"--processes if memory or cores are short{''.join(f' ({one})' for one in known)}"
        )
    clients = clients_of(workload, sent)
    columns = joined_columns(parts, len(workload))
    gaps = joined_gaps(part.gaps for part in parts)
    client = client_figures(columns, parts, len(sent))
    timeline = replace(_timeline(columns), timeseries=tuple(t for part in parts for t in part.told))
    return HttpResult(
        result=Result(_records(columns), gaps, timeline, _totals(columns, gaps)),
        columns=columns,
        client=client,
        clients=clients,
        invalid_because=untrusted_because(clients, send_delay_limit_s=options.send_delay_limit_s)
        or invalid_because(
            client,
            int((~np.isnan(columns.started_s)).sum()),
            send_delay_limit_s=options.send_delay_limit_s,
            rate_limit_share=options.rate_limit_share,
        ),
        details={row: text for part in parts for row, text in part.details.items()},
        texts={row: text for part in parts for row, text in part.texts.items()},
        token_s=_in_row_order(parts),
        start_s=parts[0].start_s,
    )


def _in_row_order(parts: Sequence[SenderResult]) -> NDArray[np.float64]:
    """Join the token times of all parts in order of rows."""
    rows = np.concatenate([np.repeat(p.rows, p.columns.output_tokens) for p in parts])
    token_s = np.concatenate([p.token_s for p in parts])
    return token_s[np.argsort(rows, kind="stable")] if len(token_s) else token_s


def _records(columns: RequestColumns) -> Records:
    records = Records.empty(len(columns.arrival_s))
    finished = columns.outcome == Outcome.FINISHED
    records.arrival_s[:] = columns.arrival_s
    records.first_token_s[:] = columns.first_token_s
    records.finish_s[:] = np.where(finished, columns.last_token_s, np.nan)
    records.outcome[:] = columns.outcome
    records.output_tokens[:] = columns.output_tokens
    records.cached_tokens[:] = columns.cached_tokens
    records.instance[:] = columns.endpoint
    return records


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

    def until(moments: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.searchsorted(moments, time_s, side="right")

    begun = until(first)
    return Timeline(time_s, until(begin) - begun, begun - until(ends), np.full(_SAMPLES, _UNKNOWN))


def _totals(columns: RequestColumns, gaps: Gaps) -> Totals:
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
