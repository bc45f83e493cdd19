"""One workload sent by several processes: the share of each, and its life from start to result.

A process receives its share of the requests, reports that it is ready, and starts at a given time.
All processes of a machine read the same clock: `time.perf_counter` counts from the machine's start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from ...workloads.arrays import Ints
from ...workloads.child_process import ChildProcess, Parent
from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from ..engine.cluster.cluster_arrivals import Arrivals
from ..engine.loop.gc_control import collections_off
from ..policies.routers import router as router_by_name
from .http.drive import Driver
from .http.endpoint import Endpoint
from .http.http_options import HttpOptions
from .http.length_prediction import prompt_lengths
from .http.request_columns import SenderResult, read_part
from .http.wire_requests import Bodies, WireRequests
from .load_progress import LoadProgress, LoadWatch, Watch
from .machine import cores
from .real_cluster import RoutedServers

BODIES = "bodies"  # file of all request bodies
_JOB = "job.pickle"
_STOP = "stop"  # message to a sending process: end the level
_DRAIN_S = 600.0
_CLOSED_LIMIT_S = 3600.0
_SOON_S = 0.05  # from ready to the workload's time zero, with one process
_AHEAD_S = 0.2  # the same with several processes
_READY_S = 60.0
_GRACE_S = 120.0  # after the time limit, to read what came
# CPU time that sending takes, generously; `slo-bench selftest` measures it.
REQUEST_CPU_S = 0.4e-3
TOKEN_CPU_S = 10e-6
_LITTLE_WORK_S = 0.5  # less CPU time than this is not worth a second process
_BUSY_SHARE = 0.5  # of a core; above it, timestamps are delayed by other work

# Sends shares: start time, time limit, callback with what is known so far (True ends the level).
SendShares = Callable[[float, float, Callable[[LoadProgress], bool]], dict[int, SenderResult]]
_Messages = queue.SimpleQueue[tuple[int, dict[str, Any] | None]]


@dataclass(frozen=True)
class Share:
    """The `index`-th of `count` equal shares of a workload; a session stays in one share."""

    index: int
    count: int

    def of(self, workload: Workload) -> Workload:
        """The workload as this share sees it: all rows, its part of the concurrency."""
        if self.count == 1 or workload.concurrency is None:
            return workload
        each, more = divmod(workload.concurrency, self.count)
        return dataclasses.replace(workload, concurrency=each + (self.index < more))


def rows_elsewhere(workload: Workload, share: Share) -> Ints:
    """The rows that other shares send."""
    root = np.arange(len(workload))
    for row in np.flatnonzero(workload.follows >= 0).tolist():
        root[row] = root[workload.follows[row]]  # the earlier request of a session comes first
    for row, others in enumerate(workload.joins or ()):
        for other in (joined_row for joined_row in others if root[joined_row] != root[row]):
            root[root == root[other]] = root[row]
    return np.flatnonzero(root % share.count != share.index)


def rows_of(workload: Workload, share: Share) -> set[int]:
    """The rows that a share sends."""
    return set(range(len(workload))).difference(rows_elsewhere(workload, share).tolist())


def processes_for(workload: Workload, max_processes: int | None = None) -> int:
    """Return the number of processes needed to send the workload on time, at most
    `max_processes` (the number of cores).

    In a closed loop the rate is not known beforehand: one process.
    """
    if workload.concurrency is not None or workload.span_s <= 0:
        return 1
    work_s = len(workload) * REQUEST_CPU_S + float(workload.output_tokens.sum()) * TOKEN_CPU_S
    if work_s < _LITTLE_WORK_S:
        return 1
    busy_cores = work_s / workload.span_s
    return max(1, min(math.ceil(busy_cores / _BUSY_SHARE), max_processes or cores()))


def time_limit_of(workload: Workload, options: HttpOptions) -> float:
    """Seconds from the workload's time zero after which a cell ends at the latest.

    Raises:
        SloBenchError: the limit in `options` ends before the last request arrives.
    """
    span_s = 0.0 if workload.concurrency is not None else workload.span_s
    if options.time_limit_s is None:
        return _CLOSED_LIMIT_S + span_s if workload.closed else span_s + _DRAIN_S
    if options.time_limit_s <= span_s:
        raise SloBenchError(
            f"the time limit of {options.time_limit_s:g} s ends before the last request arrives, "
            f"after {span_s:g} s; give a longer --time-limit or fewer requests"
        )
    return options.time_limit_s


@dataclass(frozen=True)
class SendJob:
    """A workload to be sent by `count` processes; `time_limit_s` as in `time_limit_of`."""

    workload: Workload
    endpoints: Sequence[Endpoint]
    options: HttpOptions
    router: str
    count: int
    bodies: Bodies
    time_limit_s: float

    def files(self) -> dict[str, bytes]:
        """Files that a sending process reads, except the bodies, which hold all texts.

        Options have names of environment variables, never what they hold.
        """
        workload = dataclasses.replace(self.workload, texts=None, bodies=None)
        fields = {**vars(self), "workload": workload}
        del fields["bodies"]
        return {_JOB: pickle.dumps(fields)}


@dataclass(frozen=True)
class SendResult:
    """Result of one sending process; `part` is None if it died.

    `machine` is the host name, empty for this machine. `offset_s`: seconds that its clock was ahead
    of ours when the level began; `clock_error_s`: bound on the error of that offset.
    `lost_because`: what is known of the end of its machine.
    """

    part: SenderResult | None
    machine: str = ""
    offset_s: float = 0.0
    clock_error_s: float = 0.0
    lost_because: str = ""


class Senders(Protocol):
    """Set of sending processes on one or several machines."""

    def count(self, workload: Workload) -> int:
        """Number of sending processes for the workload."""

    def send(self, order: SendJob, progress: Watch | None) -> list[SendResult]:
        """Send from all processes on one schedule; return one result for each process.

        Raises:
            SloBenchError: nothing can be sent.
        """


def send_share(
    job: SendJob,
    share: Share,
    *,
    start_s: Callable[[], float] = lambda: perf_counter() + _SOON_S,
    progress: Watch | None = None,
) -> SenderResult:
    """Send one process's share of a workload and read the answers.

    `start_s` is called when all is ready, and returns the workload's time zero by `perf_counter`.
    """
    share_workload, options, endpoints = share.of(job.workload), job.options, job.endpoints
    arrivals = Arrivals(share_workload, skip=rows_elsewhere(job.workload, share))
    servers = RoutedServers(len(endpoints), router_by_name(job.router), share.index)
    requests = WireRequests(share_workload, endpoints, options, job.bodies)
    lengths = prompt_lengths(share_workload, options) if options.length_predictor else None
    watched = None if progress is None else (LoadWatch(share_workload), progress)
    driver = Driver(
        arrivals, servers, requests, endpoints, options, job.time_limit_s, watched, lengths
    )
    try:
        driven = driver.run(start_s)
    finally:
        if lengths is not None:
            lengths.close()
    keeps = {name: getattr(options, name) for name in ("keep_texts", "save_token_times")}
    with collections_off():  # which would look through all exchanges again and again
        part = read_part(driven, requests, **keeps)
    if lengths is not None:
        part.length_drift = lengths.drift(part.start_s)
    return part


class ThisMachine:
    """Sending processes on this machine."""

    def count(self, workload: Workload) -> int:
        """Number of sending processes, at most one per core."""
        return processes_for(workload)

    def send(self, order: SendJob, progress: Watch | None) -> list[SendResult]:
        """Send a level from the processes of this machine."""
        folder = order.bodies.path.parent
        for name, content in order.files().items():
            (folder / name).write_bytes(content)
        with ready_processes(folder, range(order.count)) as send:
            start_s = perf_counter() + _AHEAD_S

            def told(so_far: LoadProgress) -> bool:
                clock_s = max(0.0, perf_counter() - start_s)
                return progress is not None and progress(so_far, clock_s)

            parts = send(start_s, order.time_limit_s, told)
        return [SendResult(parts.get(share)) for share in range(order.count)]


@contextlib.contextmanager
def ready_processes(folder: Path, shares: Sequence[int]) -> Iterator[SendShares]:
    """Sending processes of this machine, one for each of `shares`; all ready when the block begins.

    `folder` holds the files of a `SendJob` and the bodies. The function that the block gets sends
    from `start_s` on, for at most `time_s` seconds, and returns the results of the shares whose
    processes did not die; `report` is called with the progress so far, and ends the level by True.

    Raises:
        SloBenchError: one of the processes cannot send.
    """
    messages: _Messages = queue.SimpleQueue()

    def hear(share: int, message: dict[str, Any] | None) -> None:
        messages.put((share, message))

    def send(
        start_s: float, time_s: float, report: Callable[[LoadProgress], bool]
    ) -> dict[int, SenderResult]:
        for child in children:
            child.send(start_s)
        until_s = start_s + time_s + _GRACE_S
        so_far = dict.fromkeys(shares, LoadProgress())
        left, done = set(shares), set()
        while left:
            share, message = _next(messages, until_s)
            if message is not None and "so_far" in message:
                so_far[share] = LoadProgress(**message["so_far"])
            else:
                left.discard(share)
                so_far[share] = dataclasses.replace(so_far[share], in_flight=0)
                if message is not None:
                    done.add(share)
            if report(sum(so_far.values(), LoadProgress())):
                for child in children:
                    child.send(_STOP)
        return {
            share: pickle.loads(_part_of(folder, share).read_bytes())
            for share in shares
            if share in done
        }

    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(start_sender(folder, share)) for share in shares]
        for child, share in zip(children, shares, strict=True):
            child.listen(partial(hear, share))
        until_s = perf_counter() + _READY_S
        for _ in children:
            _, message = _next(messages, until_s)
            if message is None:
                raise SloBenchError("a sending process died; its error is printed above")
        yield send


def start_sender(folder: Path, share: int) -> ChildProcess:
    """Start the process that sends share number `share` of the requests, and return it."""
    return ChildProcess(__name__, str(folder), str(share))


def _part_of(folder: Path, share: int) -> Path:
    return folder / f"part-{share}.pickle"


def _next(messages: _Messages, until_s: float) -> tuple[int, dict[str, Any] | None]:
    """Return the next message and its process; None if the process died."""
    try:
        index, message = messages.get(timeout=max(0.0, until_s - perf_counter()))
    except queue.Empty:
        raise SloBenchError("a sending process says nothing more; all were stopped") from None
    if message is not None and "error" in message:
        raise SloBenchError(message["error"])
    return index, message


def _work(folder: Path, index: int, parent: Parent) -> None:
    """Main function of a sending process."""
    said_s = 0.0
    stopped = threading.Event()

    def progress(so_far: LoadProgress, clock_s: float) -> bool:
        nonlocal said_s
        if clock_s - said_s > 0.2:
            said_s = clock_s
            parent.send({"so_far": vars(so_far)})
        return stopped.is_set()

    def start_s() -> float:
        parent.send({"ready": True})
        when_s: float = next(parent.messages())
        # Sending stops when the parent process says so, or has ended.
        parent.exit_with(lambda _: stopped.set())
        return when_s

    fields = pickle.loads((folder / _JOB).read_bytes())
    job = SendJob(bodies=Bodies.read(folder / BODIES), **fields)
    try:
        part = send_share(job, Share(index, job.count), start_s=start_s, progress=progress)
    except SloBenchError as error:
        parent.send({"error": str(error)})
        return
    _part_of(folder, index).write_bytes(pickle.dumps(part))
    parent.send({"done": True})


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]), Parent())
