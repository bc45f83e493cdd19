"""One workload sent from several machines on one schedule.

A `LoadWorkers` on each machine starts its sending processes. Arrivals are drawn once; each process
sends its share of the rows. All count time from one moment, which each machine is given in its own
clock.

The offset of another machine's clock is measured by asking for its time repeatedly. Each reading
was taken between the question and the arrival of the answer, so it bounds the offset however slow
the network is, and all bounds hold together (F. Cristian, Probabilistic clock synchronization,
Distributed Computing 3, 1989; K. Marzullo, Maintaining the time in a distributed system, 1984, for
their intersection).
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from ... import __version__
from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from .http.endpoint import is_loopback
from .http.request_columns import SenderResult
from .load_progress import LoadProgress, Watch
from .send_job import (
    SendJob,
    SendResult,
    SendShares,
    Share,
    processes_for,
    ready_processes,
    rows_of,
)

_AHEAD_S = 1.0  # between "all is ready" and the workload's time zero: everybody must have heard
_ANSWER_S = 10.0
_CLOCK_S = 60.0  # a machine with more processes than cores answers late, and its load counts
_PREPARED_S = 120.0
_GRACE_S = 240.0  # after the time limit, to read what came and bring it here
_LOOK_EVERY_S = 0.5
_READINGS = 20
_VERSION_S = 120.0
_CALLS = 3  # at once: to send, and meanwhile how far it is

Files = Mapping[str, bytes]
_Answers = dict["RayStation", Any]


@dataclass(frozen=True)
class ClockReading:
    """A reading of another clock: it showed `read_s` between `asked_s` and `answered_s` of ours."""

    asked_s: float
    read_s: float
    answered_s: float


@dataclass(frozen=True)
class Offset:
    """Offset of another clock: it shows our time plus `offset_s`, ± `error_s`."""

    offset_s: float
    error_s: float


def offset_of(readings: Sequence[ClockReading]) -> Offset:
    """Intersect the bounds of all readings."""
    low_s = max(reading.read_s - reading.answered_s for reading in readings)
    high_s = min(reading.read_s - reading.asked_s for reading in readings)
    # Clocks that ran apart meanwhile may leave nothing between; then by how much says it.
    return Offset((low_s + high_s) / 2, abs(high_s - low_s) / 2)


def read_offset(read: Callable[[], float]) -> Offset:
    """Measure the offset of another clock, which `read` reads."""
    readings = []
    for _ in range(_READINGS):
        asked_s = perf_counter()
        read_s = read()
        readings.append(ClockReading(asked_s, read_s, perf_counter()))
    return offset_of(readings)


def error_over(before: Offset, after: Offset) -> float:
    """Bound on the error of `before` until `after` was measured, if the drift is constant."""
    return max(before.error_s, abs(after.offset_s - before.offset_s) + after.error_s)


class LoadWorkersLostError(SloBenchError):
    """A machine that sends does not answer any more."""


class LoadWorkers:
    """Sending processes of one machine, called from another machine."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._send: SendShares | None = None
        self._so_far = LoadProgress()
        self._stopped = False

    def prepare(self, files: Files, shares: Sequence[int]) -> None:
        """Start the sending processes of `shares`; `files` are those of the `SendJob`.

        Raises:
            SloBenchError: a process cannot send.
        """
        temporary = tempfile.TemporaryDirectory(prefix="slo-bench-")
        folder = Path(self._stack.enter_context(temporary))
        for name, content in files.items():
            (folder / name).write_bytes(content)
        self._send = self._stack.enter_context(ready_processes(folder, shares))

    def version(self) -> str:
        """Return the version of slo-bench on this machine."""
        return __version__

    def clock(self) -> float:
        """Return this worker's clock, in which the start time is given."""
        return perf_counter()

    def send(self, start_s: float, time_s: float) -> dict[int, SenderResult]:
        """Send this machine's shares from `start_s` of its clock for at most `time_s` seconds.

        Returns results by share; those of processes that died are missing.
        """
        assert self._send is not None

        def told(so_far: LoadProgress) -> bool:
            self._so_far = so_far
            return self._stopped

        return self._send(start_s, time_s, told)

    def so_far(self) -> LoadProgress:
        """What is known so far of what this machine sends."""
        return self._so_far

    def stop(self) -> None:
        """End the level: send nothing more."""
        self._stopped = True

    def close(self) -> None:
        """Stop the running sending processes."""
        self._stack.close()


def send_from(
    stations: Sequence[RayStation], order: SendJob, progress: Watch | None
) -> list[SendResult]:
    """Send a workload from several machines, and close their load workers.

    Raises:
        SloBenchError: a machine cannot send.
    """
    level = _RemoteRun(stations, order)
    try:
        return level.sent(progress)
    finally:
        closing = [station.call("close") for station in stations]
        wait(closing, timeout=_ANSWER_S)


class _RemoteRun:
    def __init__(self, stations: Sequence[RayStation], order: SendJob) -> None:
        self._order = order
        self._lost: dict[RayStation, str] = {}  # why
        self._shares: dict[RayStation, range] = {
            station: range(place, order.count, len(stations))
            for place, station in enumerate(stations)
        }

    def sent(self, progress: Watch | None) -> list[SendResult]:
        results = {share: SendResult(None) for share in range(self._order.count)}
        for station, shares in self._shares.items():
            results |= {share: SendResult(None, station.machine) for share in shares}
        ready = self._prepared()
        before = self._clocks(ready)
        start_s = perf_counter() + _AHEAD_S
        limit_s = self._order.time_limit_s
        begun = {
            station: station.call("send", start_s + offset.offset_s, limit_s)
            for station, offset in before.items()
        }
        self._follow(begun, start_s, start_s + limit_s + _GRACE_S, progress)
        parts = self._answers(begun)
        after = self._clocks(list(parts))
        for station, shares in parts.items():
            offset = before[station]
            error_s = error_over(offset, after[station]) if station in after else math.inf
            for share, part in shares.items():
                part = replace(part, start_s=start_s)
                results[share] = SendResult(part, station.machine, offset.offset_s, error_s)
        for station, why in self._lost.items():
            for share in self._shares[station]:
                results[share] = replace(results[share], lost_because=why)
        return [results[share] for share in range(self._order.count)]

    def _prepared(self) -> list[RayStation]:
        """Prepare all load workers; return those that are ready to send."""
        order = self._order
        common = order.files()
        preparing = {}
        for station, shares in self._shares.items():
            rows = [rows_of(order.workload, Share(share, order.count)) for share in shares]
            files = {**common, **order.bodies.files_of(set().union(*rows))}
            preparing[station] = station.call("prepare", files, list(shares))
        _, waiting = wait(preparing.values(), timeout=_PREPARED_S)
        silent = [station.machine for station, future in preparing.items() if future in waiting]
        if silent:
            raise SloBenchError(
                f"{silent[0]} has no core free to send from, or does not answer, for "
                f"{_PREPARED_S:g} s"
            )
        return list(self._answers(preparing))

    def _clocks(self, stations: Sequence[RayStation]) -> dict[RayStation, Offset]:
        offsets = {}
        for station in stations:
            try:
                offsets[station] = read_offset(partial(_clock, station))
            except LoadWorkersLostError as error:
                self._lost[station] = str(error)
            except TimeoutError:
                self._lost[station] = f"did not tell its clock within {_CLOCK_S:g} s"
        return offsets

    def _answers(self, futures: Mapping[RayStation, Future[Any]]) -> _Answers:
        """Return the answers received from load workers that are not lost.

        Raises:
            SloBenchError: the error of a load worker, with the name of its machine.
        """
        answers = {}
        for station, future in futures.items():
            try:
                answers[station] = future.result(timeout=0)
            except LoadWorkersLostError as error:
                self._lost[station] = str(error)
            except TimeoutError:
                self._lost[station] = "did not answer in time"
            except SloBenchError as error:
                raise SloBenchError(f"{station.machine}: {error}") from error
        return answers

    def _follow(
        self,
        begun: Mapping[RayStation, Future[Any]],
        start_s: float,
        until_s: float,
        progress: Watch | None,
    ) -> None:
        """Wait until all have answered or `until_s` has passed, and report progress."""
        so_far = dict.fromkeys(begun, LoadProgress())
        while perf_counter() < until_s:
            _, running = wait(begun.values(), timeout=_LOOK_EVERY_S)
            if not running:
                return
            answers = {s: s.call("so_far") for s, future in begun.items() if future in running}
            wait(answers.values(), timeout=_ANSWER_S)
            for station, answer in answers.items():
                if answer.done() and answer.exception() is None:
                    so_far[station] = answer.result()
            total = sum(so_far.values(), LoadProgress())
            if progress is not None and progress(total, max(0.0, perf_counter() - start_s)):
                wait([station.call("stop") for station in begun], timeout=_ANSWER_S)


def _clock(station: RayStation) -> float:
    read_s: float = station.call("clock").result(timeout=_CLOCK_S)
    return read_s


@dataclass(frozen=True)
class _Machine:
    address: str
    node: str  # its name in Ray
    cores: int


class RaySenders:
    """Senders on a Ray cluster: processes are distributed over the machines that are up when a
    level begins.

    Ray takes a while to notice that a machine is gone; one that was lost once is asked no more.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._lost: set[str] = set()

    def _machines(self) -> list[_Machine]:
        machines = [
            _Machine(
                node["NodeManagerAddress"], node["NodeID"], int(node["Resources"].get("CPU", 0))
            )
            for node in self._ray.nodes()
            if node["Alive"] and node["NodeID"] not in self._lost
        ]
        with_cores = [machine for machine in machines if machine.cores]
        return sorted(with_cores, key=lambda machine: (machine.address, machine.node))

    def count(self, workload: Workload) -> int:
        """Return the number of sending processes: at least one on each machine."""
        machines = self._machines()
        total_cores = max(1, sum(machine.cores for machine in machines))
        return max(len(machines), processes_for(workload, total_cores))

    def send(self, order: SendJob, progress: Watch | None) -> list[SendResult]:
        """Send a level from the processes of all machines."""
        machines = self._machines()[: order.count]
        if not machines:
            raise SloBenchError("no machine of the Ray cluster is up")
        own_address = self._ray.util.get_node_ip_address()
        apart = [machine.address for machine in machines if machine.address != own_address]
        for endpoint in order.endpoints:
            if apart and is_loopback(endpoint.host):
                raise SloBenchError(
                    f"{endpoint.url} is this machine to itself alone, and {apart[0]} sends as "
                    "well; give the address by which other machines reach the server"
                )
        stations = [RayStation(self._ray, machine) for machine in machines]
        try:
            _check_versions(stations)
            return send_from(stations, order, progress)
        finally:
            for machine, station in zip(machines, stations, strict=True):
                station.kill()
                if station.lost:
                    self._lost.add(machine.node)


def _check_versions(stations: Sequence[RayStation]) -> None:
    versions = {station.call("version"): station for station in stations}
    ended, _ = wait(versions, timeout=_VERSION_S)
    for answer in ended:
        if answer.exception() is None and answer.result() != __version__:
            raise SloBenchError(
                f"{versions[answer].machine} has slo-bench {answer.result()}, this machine "
                f"{__version__}; install the same everywhere"
            )


class RayStation:
    """A `LoadWorkers` in a Ray actor on another machine."""

    def __init__(self, ray: Any, machine: _Machine) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = ray
        self.machine = machine.address  # in messages
        self.lost = False
        there = NodeAffinitySchedulingStrategy(machine.node, soft=False)
        kind = ray.remote(num_cpus=1, max_concurrency=_CALLS, scheduling_strategy=there)
        self._actor = kind(LoadWorkers).remote()

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Call a method there; its answer is LoadWorkersLostError if the machine is gone."""
        future: Future[Any] = Future()
        answer = getattr(self._actor, method).remote(*arguments)
        answer.future().add_done_callback(lambda done: self._tell(done, future))
        return future

    def _tell(self, done: Future[Any], future: Future[Any]) -> None:
        error = done.exception()
        ray_errors = self._ray.exceptions
        if error is None:
            future.set_result(done.result())
        elif isinstance(error, ray_errors.RayTaskError):
            cause = error.cause
            future.set_exception(
                SloBenchError(str(cause)) if isinstance(cause, SloBenchError) else error
            )
        else:
            self.lost = True
            future.set_exception(LoadWorkersLostError(str(error).partition("\n")[0]))

    def kill(self) -> None:
        """Kill the actor and its processes."""
        self._ray.kill(self._actor)
