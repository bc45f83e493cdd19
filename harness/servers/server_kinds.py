"""The servers by name: those of this package, and those that installed packages add.

A package adds one by an entry point of the group `slo_bench.servers` whose value is a `ServerKind`,
and the system of its name, which the unpatched server is, by one of `slo_bench.systems`. Names are
known at once; a server's module is imported when something is asked about it. One that cannot be
loaded is refused where it is named, and left out elsewhere.
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
_TAKEN = (SIMULATED, ATTACHED, *_ROOMS)
_ADDED = tuple(entry_points(group=ENTRY_POINT_GROUP))
_ENTRIES = {entry.name: entry for entry in _ADDED if entry.name not in _TAKEN} | {
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
        SloBenchError: its package cannot be loaded, or several add it.
    """
    from .launch.server_kind import ServerKind

    if name not in among:
        raise UnknownNameError("backend", name, among)
    entry = _ENTRIES[name]
    values = sorted({added.value for added in _ADDED if added.name == name} - {entry.value})
    if values and name not in _ROOMS:
        raise SloBenchError(f"several packages add server {name}: {entry.value}, {values[0]}")
    try:
        kind = entry.load()
    except (Exception, SystemExit) as error:
        raise SloBenchError(
            f"server {name} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(kind, ServerKind) or kind.name != name:
        raise SloBenchError(f"{entry.value} is not the ServerKind of {name} but {kind!r:.80}")
    if name in LAUNCHED and not kind.builds:
        raise SloBenchError(f"{entry.value} has no builds, so that it cannot be started")
    return kind


@cache
def _loaded() -> tuple[dict[str, ServerKind], list[str]]:
    """The servers that can be loaded, and a line for each that cannot."""
    kinds, problems = {}, []
    for name in SERVERS:
        try:
            kinds[name] = server_kind(name)
        except SloBenchError as error:
            if name in _ROOMS:
                raise
            problems.append(str(error))
    problems += [
        f"server {entry.name} ({entry.value}) is left out: the name is one of slo-bench's"
        for entry in _ADDED
        if entry.name in _TAKEN
    ]
    return kinds, problems


def server_kinds() -> dict[str, ServerKind]:
    """All servers by name, but for those of other packages that cannot be loaded."""
    return _loaded()[0]


def server_problems() -> list[str]:
    """A line for each server of another package that is left out, with the reason."""
    return _loaded()[1]


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
