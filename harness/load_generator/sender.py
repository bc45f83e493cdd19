"""One process's share of a workload, sent to real servers behind a router."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from time import perf_counter

from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from ..engine.cluster.arrivals import Arrivals
from ..policies.routers import router as router_by_name
from .http.bodies import Bodies
from .http.columns import SenderResult, read_part
from .http.drive import ClientLimits, Driver, Progress
from .http.endpoint import Endpoint
from .http.heads import WireRequests
from .http.length_prediction import prompt_lengths
from .http.options import HttpOptions
from .routed_servers import RoutedServers
from .shares import Share, rows_elsewhere

_DRAIN_S = 600.0
_CLOSED_LIMIT_S = 3600.0
_AHEAD_S = 0.05  # between "all is ready" and the workload's time zero


def limits_of(workload: Workload, options: HttpOptions) -> ClientLimits:
    """When a cell ends at the latest.

    Raises:
        SloBenchError: before its last request arrives.
    """
    span_s = 0.0 if workload.concurrency is not None else workload.span_s
    time_s = options.time_limit_s
    if time_s is None:
        time_s = _CLOSED_LIMIT_S + span_s if workload.closed else span_s + _DRAIN_S
    elif time_s <= span_s:
        raise SloBenchError(
            f"the time limit of {time_s:g} s ends before the last request arrives, after "
            f"{span_s:g} s; give a longer --time-limit or fewer requests"
        )
    return ClientLimits(time_s, options.connect_limit_s, options.stall_limit_s)


def send_share(
    workload: Workload,
    endpoints: Sequence[Endpoint],
    options: HttpOptions,
    router: str,
    share: Share,
    bodies: Bodies,
    *,
    start_s: Callable[[], float] | None = None,
    progress: Progress | None = None,
) -> SenderResult:
    """Send one process's share of a workload and read the answers."""
    own = share.of(workload)
    arrivals = Arrivals(own, skip=rows_elsewhere(workload, share))
    requests = WireRequests(own, endpoints, options, bodies)
    tls = ssl.create_default_context() if any(e.tls for e in endpoints) else None
    route = RoutedServers(len(endpoints), router_by_name(router), share.index)
    limits = limits_of(workload, options)
    foretold = prompt_lengths(own, options)
    driver = Driver(arrivals, route, requests, endpoints, limits, tls, progress, foretold)
    try:
        driven = driver.run(start_s or (lambda: perf_counter() + _AHEAD_S))
    finally:
        if foretold is not None:
            foretold.close()
    part = read_part(
        driven,
        requests.embeds,
        keep_texts=options.keep_texts,
        save_token_times=options.save_token_times,
    )
    if foretold is not None:
        part.told = foretold.drift(part.start_s)
    return part
