"""A gateway in a thread of this process or in a process of its own, until its block is left."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import httpx

from ....workloads.child_process import ChildProcess
from ....workloads.errors import SloBenchError
from ...core.cluster_policy import ClusterPolicy, Routed
from ...load_generator.http.endpoint import Endpoint, is_loopback
from ...policies.routers import router as router_by_name
from ..http.allowed_hosts import AllowedHosts
from ..http.http_limits import DEFAULT_LIMITS, HttpLimits
from ..http.http_server import Clients, Ready, in_thread, serve
from ..plugin.contract import PolicySpec
from .collocated_gateway import CollocatedServing
from .controlled import ControlledServing
from .health_checks import HUNG_AFTER_S, MECHANISMS, CheckedServers, CheckOptions, Say
from .instances import RoutedServerGroup
from .routes import Serving, answer, answer_with_key
from .split import DisaggregatedServing, KvTransferMode

_STOP_S = 20.0


@dataclass(frozen=True)
class GatewayPlan:
    """Servers behind a gateway, and their router.

    With `prefill` servers the others only decode, and KV reaches them as `transfer` says. A
    `controller` replaces the router; `roles` then names the role of each server. A server that
    sends nothing for `hung_after_s`, not even its health, is down. An `embedder`
    stands beside a single server, and `scheduler_socket` is that of the policy that decides on it.
    """

    endpoints: Sequence[Endpoint]
    router: str = "round-robin"
    prefill: Sequence[Endpoint] = ()
    transfer: KvTransferMode = KvTransferMode.FILES
    health_path: str = "/health"
    hung_after_s: float = HUNG_AFTER_S
    controller: ClusterPolicy | None = None
    roles: Sequence[str] = ()
    embedder: Endpoint | None = None
    scheduler_socket: str | None = None

    def to_plain(self) -> dict[str, Any]:
        """The plan as JSON values, for another process."""
        plain = dataclasses.asdict(self)
        if self.controller is not None:
            spec = PolicySpec.of("controller", self.controller)
            plain["controller"] = dataclasses.asdict(spec)
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> GatewayPlan:
        """The plan from the values of `to_plain`."""
        plain = {**plain, "roles": tuple(plain["roles"])}
        for name in ("endpoints", "prefill"):
            plain[name] = tuple(Endpoint(**endpoint) for endpoint in plain[name])
        if plain["embedder"] is not None:
            plain["embedder"] = Endpoint(**plain["embedder"])
        if plain["controller"] is not None:
            plain["controller"] = PolicySpec(**plain["controller"]).build()
        return cls(**{**plain, "transfer": KvTransferMode(plain["transfer"])})

    def check(self) -> None:
        """Check the router and the number of servers.

        Raises:
            SloBenchError: there is no such router, or no server.
        """
        router_by_name(self.router)
        if not self.endpoints:
            raise SloBenchError("a gateway needs a server behind it")

    def build(self, say: Say) -> Serving:
        """The servers with a router or controller of their own."""
        options: CheckOptions = {
            "health_path": self.health_path,
            "say": say,
            "hung_after_s": self.hung_after_s,
        }

        def instances(endpoints: Sequence[Endpoint], role: str) -> CheckedServers:
            router = router_by_name(self.router)
            if not router.measures:
                return RoutedServerGroup(endpoints, self.router, role, **options)
            roles = [role] * len(endpoints)
            return ControlledServing(endpoints, roles, Routed(router=router), role, **options)

        if self.embedder is not None:
            [endpoint] = self.endpoints
            return CollocatedServing(
                endpoint, self.embedder, self.scheduler_socket, self.health_path, say
            )
        if self.controller is not None:
            return ControlledServing(self.endpoints, self.roles, self.controller, **options)
        if not self.prefill:
            return instances(self.endpoints, "serve")
        prefill, decode = instances(self.prefill, "prefill"), instances(self.endpoints, "decode")
        return DisaggregatedServing(prefill, decode, self.transfer)


class GatewayTarget(Protocol):
    """Servers that a gateway can stand before: those of a `GatewayPlan`, or models that are
    activated on demand.
    """

    def check(self) -> None:
        """Raise SloBenchError if the servers cannot be served."""

    def build(self, say: Say) -> Serving:
        """The servers as a `Serving`."""


@contextlib.contextmanager
def serving(
    plan: GatewayTarget,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    limits: HttpLimits = DEFAULT_LIMITS,
    names: tuple[str, ...] | None = None,
    say: Say = lambda line: None,
) -> Iterator[str]:
    """Run a gateway and yield its address; leaving the block closes all its connections.

    Clients must send `api_key`, if it is given, as `authorization: Bearer KEY`. `names` are those
    of `AllowedHosts`.

    Raises:
        SloBenchError: `GatewayPlan.check` refuses the plan, the port is taken, or other machines
            could reach the gateway without a key.
    """
    plan.check()
    if api_key is None and not is_loopback(host):
        raise SloBenchError(f"a gateway at {host} can be reached by others: give it an API key")

    async def start(ready: Ready) -> None:
        behind = plan.build(say)
        clients = Clients(limits, AllowedHosts(host, names))

        try:
            handler = partial(answer, behind, clients)
            if api_key is not None:
                handler = partial(answer_with_key, f"Bearer {api_key}".encode(), behind, clients)
            await serve(handler, host=host, port=port, clients=clients, ready=ready)
        finally:
            for group in behind.groups:
                group.close()
            await asyncio.sleep(0)  # for their last callbacks

    with in_thread(f"gateway at {host}:{port}", start) as server:
        yield server.url


def mechanism_counts(url: str) -> dict[str, int]:
    """Counts of the controller's mechanisms at the gateway `url` so far; empty without any."""
    return _counts(url, MECHANISMS, "mechanism")


def model_counts(url: str, name: str) -> dict[str, int]:
    """A counter of the gateway `url`, by model."""
    return _counts(url, f"slo_bench_gateway_{name}", "model")


def _counts(url: str, metric: str, label: str) -> dict[str, int]:
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).raise_for_status().text
    pattern = rf'^{metric}\{{{label}="([^"]+)"\}} (\d+)$'
    return {name: int(n) for name, n in re.findall(pattern, text, re.MULTILINE)}


class PlainPlan(Protocol):
    """What a gateway in a process of its own is told: a `GatewayPlan`, or a plan of models whose
    servers it starts (`ModelServers`).
    """

    def check(self) -> None:
        """Raise SloBenchError if the servers cannot be served."""

    def to_plain(self) -> dict[str, Any]:
        """The plan as JSON values."""


@contextlib.contextmanager
def serving_apart(plan: PlainPlan, *, stop_s: float = _STOP_S) -> Iterator[str]:
    """Run a gateway in a process of its own and yield its address, so that it does not delay the
    load generator.

    Raises:
        SloBenchError: the plan's `check` refuses it, or the gateway does not start.
    """
    plan.check()
    child = ChildProcess(__package__)
    try:
        child.send(plan.to_plain())
        url = child.receive()
        if url is None:
            raise SloBenchError("the gateway did not start; its error is printed above")
        yield url
    finally:
        child.stop(stop_s)
