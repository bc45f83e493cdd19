"""A load sent from the machines of a Ray cluster: a station on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from ... import __version__
from ...workloads.errors import SloBenchError
from ...workloads.workload import Workload
from .http.endpoint import is_loopback
from .load_progress import Progress
from .load_workers import LoadWorkers, LoadWorkersLostError, RemoteLoadWorkers, send_from
from .send_job import SendJob, SendResult, processes_for

_PATIENCE_S = 120.0
_CALLS = 3  # at once: to send, and meanwhile how far it is


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
        found = [
            _Machine(
                node["NodeManagerAddress"], node["NodeID"], int(node["Resources"].get("CPU", 0))
            )
            for node in self._ray.nodes()
            if node["Alive"] and node["NodeID"] not in self._lost
        ]
        return sorted((one for one in found if one.cores), key=lambda one: (one.address, one.node))

    def count(self, workload: Workload) -> int:
        """Return the number of sending processes: at least one on each machine."""
        machines = self._machines()
        most = max(1, sum(machine.cores for machine in machines))
        return max(len(machines), processes_for(workload, most))

    def send(self, order: SendJob, progress: Progress | None) -> list[SendResult]:
        """Send a level from the processes of all machines."""
        machines = self._machines()[: order.count]
        if not machines:
            raise SloBenchError("no machine of the Ray cluster is up")
        own = self._ray.util.get_node_ip_address()
        apart = [machine.address for machine in machines if machine.address != own]
        for endpoint in order.endpoints:
            if apart and is_loopback(endpoint.host):
                raise SloBenchError(
                    f"{endpoint.url} is this machine to itself alone, and {apart[0]} sends as "
                    "well; give the address by which other machines reach the server"
                )
        stations = [_RayStation(self._ray, machine) for machine in machines]
        try:
            _check_versions(stations)
            return send_from(stations, order, progress)
        finally:
            for machine, station in zip(machines, stations, strict=True):
                station.kill()
                if station.lost:
                    self._lost.add(machine.node)


def _check_versions(stations: Sequence[RemoteLoadWorkers]) -> None:
    asked = {station.call("version"): station for station in stations}
    ended, _ = wait(asked, timeout=_PATIENCE_S)
    for answer in ended:
        if answer.exception() is None and answer.result() != __version__:
            raise SloBenchError(
                f"{asked[answer].machine} has slo-bench {answer.result()}, this machine "
                f"{__version__}; install the same everywhere"
            )


class _RayStation:
    """Load worker in a Ray actor."""

    def __init__(self, ray: Any, machine: _Machine) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = ray
        self.machine = machine.address
        self.lost = False
        there = NodeAffinitySchedulingStrategy(machine.node, soft=False)
        kind = ray.remote(num_cpus=1, max_concurrency=_CALLS, scheduling_strategy=there)
        self._actor = kind(LoadWorkers).remote()

    def call(self, method: str, *given: object) -> Future[Any]:
        """Call a method of the remote load worker."""
        future: Future[Any] = Future()
        answer = getattr(self._actor, method).remote(*given)
        answer.future().add_done_callback(lambda done: self._tell(done, future))
        return future

    def _tell(self, done: Future[Any], future: Future[Any]) -> None:
        error = done.exception()
        known = self._ray.exceptions
        if error is None:
            future.set_result(done.result())
        elif isinstance(error, known.RayTaskError):
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
