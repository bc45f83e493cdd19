"""Self-test: the measurement error of the load generator on this machine.

The mock server records the time of every token that it sends. Client and mock read the same clock,
so the difference is the client's error. The mock shares the machine with the client; a load
generator on a machine of its own does no worse.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ...workloads.arrays import Floats
from ...workloads.workload import Workload
from ..core.records.request_records import Outcome
from ..load_generator.http.endpoint import Endpoint
from ..load_generator.http.http_options import HttpOptions
from ..load_generator.http.wire_requests import REQUEST_ID
from ..load_generator.machine import CoreShare, core_share, started_on
from ..load_generator.routed_load import HttpResult, measure, quantile
from ..servers.mock import MockConfig, serving_apart
from ..servers.mock.service import Truth

RATES_RPS = (50.0, 200.0)
TOKENS = 64
PROMPT_TOKENS = 128
MOCK = MockConfig(ttft_s=0.05, itl_s=0.01)
TTFT_P50_LIMIT_S = 0.001
TTFT_P99_LIMIT_S = 0.01
_MOST_RPS = 6400.0
BUSY_RATES_RPS = (4.0, 16.0, 64.0)


@dataclass(frozen=True)
class SelfTestLevel:
    """Results of one rate: errors (measured minus true times) and the client's CPU time.

    `ttft_error_…` is of the time from send to first token; `arrival_error_…` of the time from the
    scheduled arrival to first token; `token_error_…` of the times at which all tokens arrived.
    """

    rate_rps: float
    requests: int
    tokens: int  # of each answer
    processes: int
    finished: int
    ttft_error_p50_s: float
    ttft_error_p99_s: float
    arrival_error_p50_s: float
    token_error_p50_s: float
    token_error_p99_s: float
    send_delay_p50_s: float
    send_delay_p99_s: float
    event_loop_lag_p99_s: float
    cpu_per_request_s: float
    peak_rss_bytes: int
    problem: str | None  # why the measurement is not trusted; None: it is

    @property
    def truthful(self) -> bool:
        """Whether the measurement error is within bounds."""
        return self.problem is None


@dataclass(frozen=True)
class SelfTest:
    """All levels in the order of their runs, with the cost and capacity derived from them."""

    levels: tuple[SelfTestLevel, ...]
    token_cpu_s: float
    request_cpu_s: float  # beside its tokens
    highest_rps: float | None  # highest correct rate with `TOKENS` tokens an answer; None: no rate
    # Beside a server that keeps its cores busy, on this machine.
    beside_server: tuple[SelfTestLevel, ...] = ()
    cores: CoreShare = field(default_factory=CoreShare)

    @property
    def highest_beside_server_rps(self) -> float | None:
        """Highest correct rate beside a busy server; None: no rate."""
        return max((level.rate_rps for level in self.beside_server if level.truthful), default=None)

    @property
    def at_the_end(self) -> bool:
        """Whether no higher rate was tried, so that the machine may do more."""
        return self.highest_rps == _MOST_RPS


def self_test(
    *,
    rates_rps: Sequence[float] = RATES_RPS,
    seconds: float = 4.0,
    search: bool = True,
    done: Callable[[SelfTestLevel], None] = lambda level: None,
) -> SelfTest:
    """Run levels of `seconds` each: the given rates, then higher ones until one fails.

    Args:
        rates_rps: rates of Poisson arrivals.
        seconds: duration of the arrivals of a level.
        search: whether to look for the highest rate with a correct measurement.
        done: called after each level.
    """
    levels: list[SelfTestLevel] = []

    def run(rate_rps: float, tokens: int = TOKENS) -> SelfTestLevel:
        level = run_level(rate_rps, tokens=tokens, seconds=seconds)
        levels.append(level)
        done(level)
        return level

    run(rates_rps[0], tokens=1)
    for rate_rps in rates_rps:
        run(rate_rps)
    if search:
        _search(run, levels)
    share = core_share()
    busy = []
    with _busy(share):
        for rate_rps in BUSY_RATES_RPS:
            level = run_level(rate_rps, seconds=seconds, server_cores=share.server)
            busy.append(level)
            done(level)
            if not level.truthful:
                break
    single, streamed = levels[0], levels[1]
    token_cpu_s = (streamed.cpu_per_request_s - single.cpu_per_request_s) / (TOKENS - 1)
    truthful = [level.rate_rps for level in levels[1:] if level.truthful]
    return SelfTest(
        tuple(levels),
        token_cpu_s=token_cpu_s,
        request_cpu_s=single.cpu_per_request_s - token_cpu_s,
        highest_rps=max(truthful, default=None),
        beside_server=tuple(busy),
        cores=share,
    )


# Ends with the process that holds the other end of its input, however that one ends; Ctrl-C in the
# terminal is none of its business.
_SPIN = """
import os, sys, threading
def end():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=end).start()
while True: pass
"""


@contextlib.contextmanager
def _busy(share: CoreShare) -> Iterator[None]:
    """Compute on all cores of servers, as a server on a CPU does; on all there are, if unknown."""
    spinning = []
    try:
        with started_on(share.server):
            for _ in share.server or [0]:
                argv = [sys.executable, "-S", "-E", "-c", _SPIN]
                pipe = subprocess.PIPE
                spinning.append(subprocess.Popen(argv, stdin=pipe, start_new_session=True))
        yield
    finally:
        for process in spinning:
            process.kill()
            process.communicate()


def _search(run: Callable[[float], SelfTestLevel], levels: Sequence[SelfTestLevel]) -> None:
    """Double the rate until a level fails, then try once between."""
    last = levels[-1]
    while last.truthful and last.rate_rps < _MOST_RPS:
        last = run(min(2 * last.rate_rps, _MOST_RPS))
    if not last.truthful and len(levels) > 2:
        run(0.75 * last.rate_rps)


def run_level(
    rate_rps: float,
    *,
    tokens: int = TOKENS,
    seconds: float = 4.0,
    server_cores: Sequence[int] = (),
) -> SelfTestLevel:
    """Measure one rate against a new mock server, on these cores if any are given."""
    rng = np.random.default_rng(0)
    n = max(20, round(rate_rps * seconds))
    workload = Workload(
        np.cumsum(rng.exponential(1 / rate_rps, n)), np.full(n, PROMPT_TOKENS), np.full(n, tokens)
    )
    options = HttpOptions(model=MOCK.model, save_token_times=True)
    with contextlib.ExitStack() as stack:
        with started_on(server_cores):
            server = stack.enter_context(serving_apart(MOCK))
        measurement = measure(workload, [Endpoint.parse(server.url)], options)
        truths = {int(t.request_id.removeprefix(REQUEST_ID)): t for t in server.truths()}
    return _level(rate_rps, tokens, measurement, truths)


def _level(
    rate_rps: float, tokens: int, measurement: HttpResult, truths: dict[int, Truth]
) -> SelfTestLevel:
    columns, client = measurement.columns, measurement.client
    whole = np.flatnonzero(columns.outcome == Outcome.FINISHED)
    whole_truths = [truths[row] for row in whole.tolist()]
    zero_s = measurement.start_s
    received_s = np.array([t.received_s for t in whole_truths]) - zero_s
    left_s = np.array([t.first_token_s for t in whole_truths]) - zero_s
    first_s = columns.first_token_s[whole]
    ttft_error_s = (first_s - columns.sent_s[whole]) - (left_s - received_s)
    late_s = first_s - left_s  # one clock: any delay is the client's error
    sent_late_s = received_s - columns.arrival_s[whole]
    token_error_s = _token_errors(measurement, whole, whole_truths)
    level = SelfTestLevel(
        rate_rps=rate_rps,
        requests=len(columns.outcome),
        tokens=tokens,
        processes=client.processes,
        finished=len(whole),
        ttft_error_p50_s=quantile(ttft_error_s, 0.5),
        ttft_error_p99_s=quantile(ttft_error_s, 0.99),
        arrival_error_p50_s=quantile(late_s + sent_late_s, 0.5),
        token_error_p50_s=quantile(token_error_s, 0.5),
        token_error_p99_s=quantile(token_error_s, 0.99),
        send_delay_p50_s=client.send_delay_p50_s,
        send_delay_p99_s=client.send_delay_p99_s,
        event_loop_lag_p99_s=client.event_loop_lag_p99_s,
        cpu_per_request_s=client.cpu_s / len(columns.outcome),
        peak_rss_bytes=client.peak_rss_bytes,
        problem=None,
    )
    return replace(level, problem=measurement.invalid_because or _problem(level))


def _token_errors(
    measurement: HttpResult, rows: NDArray[np.intp], truths: Sequence[Truth]
) -> Floats:
    ends = np.cumsum(measurement.columns.output_tokens)
    token_times_s = np.split(measurement.token_s, ends[:-1])
    errors_s = [
        token_times_s[row] - (np.array(truth.token_s) - measurement.start_s)
        for row, truth in zip(rows.tolist(), truths, strict=True)
    ]
    return np.concatenate([np.empty(0), *errors_s])


def _problem(level: SelfTestLevel) -> str | None:
    if level.finished < level.requests:
        return f"{level.requests - level.finished} of {level.requests} requests failed"
    if level.ttft_error_p50_s > TTFT_P50_LIMIT_S:
        return f"TTFT is {level.ttft_error_p50_s * 1e3:.1f} ms too long at the median"
    if level.ttft_error_p99_s > TTFT_P99_LIMIT_S:
        return f"TTFT is {level.ttft_error_p99_s * 1e3:.1f} ms too long at p99"
    return None
