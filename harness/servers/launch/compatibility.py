"""Which system can run where, and why not."""

from __future__ import annotations

from collections.abc import Mapping

from ....workloads.errors import SloBenchError
from ...core.collocated_policy import Collocated
from ...core.multi_model_policy import SharingPolicy
from ...policies.systems import System
from ..server_kinds import SERVERS, server_kind, server_kinds, servers_with
from .backend_names import SIMULATED
from .server_kind import ServerKind


def _on(kind: ServerKind, system: System) -> str:
    """Reason why the server cannot run the system; empty if it can."""
    if system.name == kind.name:
        return ""  # the server as it is
    if system.sharing is not None:
        return _several_models(kind, system.sharing)
    if system.cluster is None:
        return kind.policy_refusal(system.policy)
    if kind.executes_controllers:
        alone = "what its controller decides is carried out in the simulator alone"
        return "" if system.cluster.executed else alone
    on_servers = system.on_servers
    if on_servers is None:
        return "its controller over several instances runs in the simulator alone"
    if on_servers.splits and not kind.introduce:
        able = " or ".join(server_kind(name).title for name in servers_with("introduce"))
        return f"a prefill/decode split is started on {able} alone"
    return (
        on_servers.refusals.get(kind.name)
        or on_servers.refusals.get("")
        or kind.policy_refusal(system.policy)
    )


def _several_models(kind: ServerKind, sharing: SharingPolicy) -> str:
    if not kind.several_models:
        able = " or ".join(server_kind(name).title for name in servers_with("several_models"))
        return f"several models on shared GPUs are served by {able} alone"
    return "" if sharing.on_servers else "what it decides over several models is simulated alone"


def refusal(system: System, backend: str) -> str | None:
    """Reason why this system cannot run on this backend; None if it can, or if no policy runs
    there.
    """
    return (_on(server_kind(backend), system) or None) if backend in SERVERS else None


def check_embedder(system: System, backend: str) -> None:
    """Raise SloBenchError if no embedder can stand beside the system's server there."""
    if not server_kind(backend).embedder_beside:
        able = " or ".join(servers_with("embedder_beside"))
        raise SloBenchError(f"an embedder beside a started server goes with {able}, not {backend}")
    if system.cluster is not None:
        raise SloBenchError(f"{system.name} has several servers: no embedder stands beside them")
    if getattr(system.policy, "merges", False):
        raise SloBenchError(
            f"{system.name} computes texts in the language model's batches, which "
            f"{server_kind(backend).title} does not do "
            "beside generation; use collocation, static-split or collocated-fcfs"
        )


def limitation(system: System, backend: str) -> str:
    """What of a system that can run on this backend does not happen there; empty if nothing."""
    if system.sharing is not None and backend != SIMULATED:
        return (
            "a model stands on one GPU, and its server has KV memory of its own, which models "
            "share only with kvcached on GPUs; the gateway counts pages as requests enter and end"
        )
    kind = server_kinds().get(backend)
    if kind is None or system.cluster is not None:
        return ""
    if not isinstance(system.policy, Collocated):
        return kind.policy_limitation(system.policy)
    if not kind.embedder_beside:
        return "it decides on generation requests alone; no embedder runs beside the model there"
    if system.policy.merges:
        return (
            f"it decides on generation requests alone; {kind.title} does not merge texts into its "
            "batches"
        )
    return ""


def check(system: System, backend: str) -> None:
    """Raise SloBenchError if the system cannot run there."""
    if reason := refusal(system, backend):
        raise SloBenchError(f"{system.name} cannot run on {backend}: {reason}")


def compatibility_of(system: System) -> Mapping[str, str | None]:
    """Reason of `refusal` for every backend that runs policies."""
    return {backend: refusal(system, backend) for backend in (SIMULATED, *server_kinds())}
