"""The servers by name: those of this package, and those that installed packages add.

A package adds one by an entry point of the group `slo_bench.servers` whose value is a `ServerKind`,
and the system of its name, which the unpatched server is, by one of `slo_bench.systems`. Names are
known at once; a server's module is imported when something is asked about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Literal, TypeAlias

from ...workloads.errors import SloBenchError, UnknownNameError
from .launch.backend_names import ATTACHED, SIMULATED, TORCH

if TYPE_CHECKING:
    from ..load_generator.server_metrics import MetricsByServer
    from .launch.server_kind import ServerKind

ENTRY_POINT_GROUP = "slo_bench.servers"
_ROOMS = {
    "vllm": "vllm.vllm_kind:VLLM",
    "sglang": "sglang.sglang_kind:SGLANG",
    TORCH: "torch.torch_kind:TORCH_ENGINE",
}
_ENTRIES = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)} | {
    name: EntryPoint(name, f"{__package__}.{place}", ENTRY_POINT_GROUP)
    for name, place in _ROOMS.items()
}
SERVERS = (*_ROOMS, *(name for name in _ENTRIES if name not in _ROOMS))
LAUNCHED = tuple(name for name in SERVERS if name != TORCH)  # in processes of their own
DEFAULT_SERVER = SERVERS[0]
if TYPE_CHECKING:
    BackendName: TypeAlias = str
    LaunchedName: TypeAlias = str
else:
    BackendName, LaunchedName = Literal[SIMULATED, ATTACHED, *SERVERS], Literal[LAUNCHED]


@cache
def server_kind(name: str, among: tuple[str, ...] = SERVERS) -> ServerKind:
    """What is known of a server.

    Raises:
        UnknownNameError: it is not one of those.
        SloBenchError: its package cannot be loaded.
    """
    from .launch.server_kind import ServerKind

    if name not in among:
        raise UnknownNameError("backend", name, among)
    entry = _ENTRIES[name]
    try:
        kind = entry.load()
    except Exception as error:
        raise SloBenchError(
            f"server {name} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(kind, ServerKind) or kind.name != name:
        raise SloBenchError(f"{entry.value} is not the ServerKind of {name} but {kind!r:.80}")
    return kind


def server_kinds() -> dict[str, ServerKind]:
    """All servers by name."""
    return {name: server_kind(name) for name in SERVERS}


def limits_of(system: str) -> Mapping[str, tuple[str, str]]:
    """`ServerKind.limits` of the server that a system is, unpatched; none for other systems."""
    return server_kind(system).limits if system in SERVERS else {}


def servers_with(attribute: str) -> tuple[str, ...]:
    """Names of the servers that have a certain attribute."""
    return tuple(name for name, kind in server_kinds().items() if getattr(kind, attribute))


@cache
def metrics_by_server() -> MetricsByServer:
    """Names of the metrics of all servers that have some."""
    return {name: kind.metrics for name, kind in server_kinds().items() if kind.metrics}
