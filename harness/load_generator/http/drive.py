"""Sends every request when it is due and follows each to its end; one event loop, one process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import sys
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import perf_counter, process_time
from typing import Any

from ....workloads.errors import SloBenchError
from ...core.records.request_records import Outcome
from ...core.state import RequestState
from ...engine.cluster.cluster_arrivals import Arrivals
from ...engine.loop.gc_control import collections_off
from ..due_timer import DueTimer
from ..load_progress import LoadWatch, Watch
from ..machine import (
    Found,
    before_other_programs,
    run_event_loop,
    sockets_left,
)
from ..real_cluster import RoutedServers
from .answers import CompletionResult, Raw, read_answer
from .connection import ConnectionPool, Exchange
from .endpoint import Endpoint
from .faults import RequestFault
from .http_options import HttpOptions
from .length_prediction import BatchedPredictions, LengthPrediction, Predicted
from .request_columns import DriveResult, Spool
from .unserved import FirstFailures, LostServers
from .wire_requests import WireRequests

_TICK_S = 0.1
_LOOK_TICKS = 10  # from one look at stalled streams, and one word of progress, to the next
# Another thread, which draws the progress say, gives the interpreter back after this time.
_SWITCH_S = 0.0002
_HELD_BYTES = 64 << 20  # of answers that stay in memory until they are read, about
_PIECE_BYTES = 64  # of a piece in memory, beside its own
_ANSWER_BYTES = 512  # of one without its tokens' times
_STALL_LIMIT_S = 120.0
_FIRST_LIMIT_S = 600.0  # before the first token: a server may load its model when it is asked


class Driver:
    """Sends the requests of one process.

    `time_limit_s`, in seconds from the workload's time zero, ends the requests in progress.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        servers: RoutedServers,
        requests: WireRequests,
        endpoints: Sequence[Endpoint],
        options: HttpOptions,
        time_limit_s: float,
        progress: tuple[LoadWatch, Watch] | None = None,
        lengths: LengthPrediction[int] | None = None,
    ) -> None:
        self._lengths = lengths
        self._together = None if lengths is None else BatchedPredictions(lengths.read)
        self._predictions: dict[int, Any] = {}  # of rows whose lengths were predicted
        self._arrivals = arrivals
        self._servers = servers
        self._requests = requests
        self._endpoints = endpoints
        self._options = options
        self._time_limit_s = time_limit_s
        self._sockets_left = math.inf
        self._progress = progress
        self._spool = Spool()
        self._answers: dict[int, CompletionResult] = {}
        self._room_bytes = _HELD_BYTES
        self._exchanges: list[Exchange] = []
        self._failures = FirstFailures(self._exchanges)
        self._lost = LostServers()
        self._in_flight = 0
        self._dispatching = False
        self._start_s = 0.0
        self._over = False
        self._over_because = ""
        self._lag_s: array[float] = array("d")

    def run(self, start_s: Callable[[], float]) -> DriveResult:
        """Send until all requests have ended; `start_s` is called when sending can begin.

        Raises:
            SloBenchError: a host does not exist.
        """
        self._sockets_left = sockets_left()
        try:
            # A collection or another program would delay timestamps.
            with collections_off(), _switched_fast(), before_other_programs():
                return run_coroutine(self._run(start_s))
        except BaseException:
            self._spool.close()
            raise

    async def _run(self, start_s: Callable[[], float]) -> DriveResult:
        loop = self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = loop.create_future()
        loop.set_exception_handler(self._on_error)
        self._pools = [self._pool(index) for index in range(len(self._endpoints))]
        for pool in self._pools:
            try:
                await pool.resolve()
            except OSError as error:
                raise SloBenchError(f"cannot find {pool.endpoint.host}: {error}") from error
        cpu_before_s = process_time()
        self._start_s = start_s()
        self._timer = DueTimer(loop, self._wake)
        self._tick_due_s = perf_counter() + _TICK_S
        try:
            self._dispatch()
            await self._finished
        finally:
            self._over = True
            self._timer.close()
            for pool in self._pools:
                await pool.close()
        return DriveResult(
            self._start_s,
            self._exchanges,
            self._spool,
            self._answers,
            self._lag_s,
            process_time() - cpu_before_s,
            _peak_rss_bytes(),
        )

    def _pool(self, index: int) -> ConnectionPool:
        endpoint = self._endpoints[index]
        return ConnectionPool(
            endpoint,
            lambda row: self._requests.of(index, row),
            self._ended,
            connect_limit_s=self._options.connect_limit_s,
            has_room=self._has_room,
        )

    def _has_room(self) -> bool:
        """Whether the limit of open files leaves a socket."""
        return sum(pool.sockets for pool in self._pools) < self._sockets_left

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run with an error that a callback raised."""
        if not self._finished.done():
            error = context.get("exception") or RuntimeError(str(context.get("message")))
            self._finished.set_exception(error)

    def _wake(self) -> None:
        """Do what the timer was set for, a tick or requests that are due, and set it again."""
        now_s = perf_counter()
        if now_s >= self._tick_due_s - self._timer.early_s:
            self._tick(now_s)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send all requests that are due, and set the timer for the next one."""
        if self._dispatching or self._over:  # called back from a request that ended at once
            return
        self._dispatching = True
        try:
            while (due_s := self._start_s + self._arrivals.next_s()) != math.inf:
                if due_s - perf_counter() > self._timer.early_s:
                    break
                self._send(self._arrivals.pop())
        finally:
            self._dispatching = False
        if due_s == math.inf:
            self._finish_if_done()
        self._timer.set(min(due_s, self._tick_due_s))

    def _send(self, r: RequestState) -> None:
        endpoint = self._servers.choose(r)
        exchange = Exchange(r.id, endpoint, r.arrival_s, r.notify_on_finish)
        exchange.most_bytes = self._requests.most_bytes(r.id)
        exchange.started_s = perf_counter()
        self._exchanges.append(exchange)
        self._in_flight += 1
        if self._together is None:
            self._pools[endpoint].send(exchange)
        else:
            self._together.of(r.id).add_done_callback(partial(self._predicted, exchange))

    def _predicted(self, exchange: Exchange, done: asyncio.Future[Predicted]) -> None:
        predicted, self._predictions[exchange.row] = done.result()
        self._requests.tell(exchange.row, predicted)
        self._pools[exchange.endpoint].send(exchange)
        if self._over:
            self._give_up()

    def _ended(self, exchange: Exchange) -> None:
        self._in_flight -= 1
        self._servers.ended(exchange.endpoint)
        if self._progress is not None:
            self._progress[0].ended(exchange, self._start_s)
            self._lost.ended(exchange)
            if not self._failures.serves:
                self._failures.ended(exchange, self._raw(exchange))
        if self._lengths is not None and self._lengths.learns:
            prediction = self._predictions.pop(exchange.row, None)
            self._lengths.heard(prediction, self._raw(exchange), exact=True)
        has_room = self._room_bytes > 0
        read_once = exchange.waited_for and has_room
        if not has_room:
            self._spool.keep(exchange)
        elif not read_once:
            pieces = exchange.pieces
            self._room_bytes -= sum(map(len, pieces)) + _PIECE_BYTES * len(pieces)
        conversations = self._requests.conversations
        if exchange.waited_for:
            held = conversations is not None and conversations.needs(exchange.row)
            keep_text = held or self._options.keep_texts
            answer = read_answer(self._raw(exchange), keep_text=keep_text)
            if read_once:
                self._keep(exchange, answer)
            answered = answer.outcome is Outcome.FINISHED
            cancelled = len(self._arrivals.cancelled)
            self._arrivals.ended(exchange.row, exchange.end_s - self._start_s, answered)
            if conversations is not None:
                try:
                    conversations.ended(exchange.row, answer if answered else None)
                except SloBenchError as error:
                    self._on_error(self._loop, {"exception": error})
                    return
                for row in self._arrivals.cancelled[cancelled:]:
                    conversations.ended(row, None)
            self._dispatch()
            return
        if conversations is not None:
            conversations.ended(exchange.row, None)
        if self._in_flight == 0:
            self._finish_if_done()

    def _keep(self, exchange: Exchange, answer: CompletionResult) -> None:
        """Keep what was read of an answer in place of its bytes."""
        self._room_bytes -= _ANSWER_BYTES + answer.token_s.itemsize * len(answer.token_s)
        exchange.pieces, exchange.stamps = [], array("d")
        text = answer.text if self._options.keep_texts else ""
        self._answers[exchange.row] = replace(answer, text=text, content="", token_ids=[])

    def _raw(self, exchange: Exchange) -> Raw:
        return self._spool.raw(exchange, **self._requests.expects(exchange.row))

    def _finish_if_done(self) -> None:
        over = self._over or self._arrivals.next_s() == math.inf
        if over and self._in_flight == 0 and not self._finished.done():
            self._finished.set_result(None)

    def _give_up(self) -> None:
        for pool in self._pools:
            pool.give_up(RequestFault.TIME_LIMIT, self._over_because)

    def _end_level(self, because: str) -> None:
        """Send nothing more, and end the requests in flight."""
        self._over, self._over_because = True, because
        self._timer.set(math.inf)
        self._give_up()
        self._finish_if_done()

    def _tick(self, now_s: float) -> None:
        """Sample the lag of the loop, and check for stalled streams and the time limit."""
        self._lag_s.append(max(0.0, now_s - self._tick_due_s))
        self._tick_due_s = now_s + _TICK_S
        if now_s - self._start_s >= self._time_limit_s:
            self._end_level(f"not ended after {self._time_limit_s:g} s")
        elif len(self._lag_s) % _LOOK_TICKS == 0:
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Tell the progress, and end stalled streams."""
        if self._progress is not None:
            watch, progress = self._progress
            answering = sum(pool.answering for pool in self._pools)
            so_far = self._failures.progress(self._in_flight) + self._lost.progress(answering)
            load = watch.progress(so_far)
            if progress(load, max(0.0, now_s - self._start_s)):
                self._end_level("the level was ended before its time")
                return
        chosen_s = self._options.stall_limit_s
        limit_s, first_limit_s = chosen_s or _STALL_LIMIT_S, chosen_s or _FIRST_LIMIT_S
        for pool in self._pools:
            for connection, waited_s in pool.stalled(now_s, limit_s, first_limit_s):
                connection.break_off(RequestFault.STALLED, f"no token came for {waited_s:g} s")


@contextlib.contextmanager
def _switched_fast() -> Iterator[None]:
    """Let this thread wait no longer than `_SWITCH_S` for another one of this interpreter."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def run_coroutine(main: Coroutine[Any, Any, Found]) -> Found:
    """Run on a new event loop, in another thread if this one already runs a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_event_loop(main)
    with ThreadPoolExecutor(1) as other:  # a notebook's cell
        return other.submit(run_event_loop, main).result()


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
