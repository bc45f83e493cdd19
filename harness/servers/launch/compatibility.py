"""Which system can run where, and why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ....workloads.errors import SloBenchError
from ...core.collocated_policy import Collocated
from ...core.policy import AnyPolicy, Policy
from ...policies.systems import System, several_models
from ..sglang.plugin.sglang_compatibility import refusal as sglang_refusal
from .backend_names import SIMULATED, TORCH

_ONE_MODEL = (
    "a server has one model; several on shared GPUs are simulated, and serve "
    f"{' or '.join(several_models(on_servers=True))} puts one queue before several servers"
)


def _alone(system: System) -> str:
    """Reason why one server's scheduler cannot run the system alone; empty if it can."""
    if system.cluster is None:
        return ""
    on_servers = system.on_servers
    if on_servers is None:
        return "its controller over several instances runs in the simulator alone"
    return on_servers.refusals.get("", "")


def _on_vllm(system: System) -> str:
    if system.sharing is not None:
        return _ONE_MODEL
    return _alone(system) or _vllm_refusal(system.policy)


def _vllm_refusal(policy: AnyPolicy) -> str:
    """Reason why this policy cannot run inside vLLM; empty if it can."""
    if not isinstance(policy, Policy):
        instead = f"; {policy.continuous} is what a server can run of it" * bool(policy.continuous)
        return f"it forms static batches, which vLLM does not{instead}"
    if getattr(policy, "host_full", None) == "stall":
        return (
            "its victims may keep their blocks and sit out, which vLLM does not know: "
            "set host_full=recompute"
        )
    if getattr(policy, "overlap_swap", False):
        return "its copies to host memory run beside computation, which is not done in vLLM here"
    return ""


def _on_sglang(system: System) -> str:
    if system.sharing is not None:
        return _ONE_MODEL
    if on_servers := system.on_servers:
        if on_servers.splits:
            return "a prefill/decode split is started on vLLM alone"
        if reason := on_servers.refusals.get("sglang"):
            return reason
    return _alone(system) or sglang_refusal(system.policy)


def _on_torch(system: System) -> str:
    if system.sharing is not None:
        return _ONE_MODEL
    if system.cluster is None or system.cluster.executed:
        return ""
    return "what its controller decides is carried out in the simulator alone"


_REFUSALS: Mapping[str, Callable[[System], str]] = {
    SIMULATED: lambda system: "",
    "vllm": _on_vllm,
    "sglang": _on_sglang,
    TORCH: _on_torch,
}
BACKENDS = tuple(_REFUSALS)


def refusal(system: System, backend: str) -> str | None:
    """Reason why this system cannot run on this backend; None if it can, or if no policy runs
    there.
    """
    reason = _REFUSALS.get(backend)
    return (reason(system) or None) if reason else None


def check_embedder(system: System, backend: str) -> None:
    """Raise SloBenchError if no embedder can stand beside the system's server there."""
    if backend != "vllm":
        raise SloBenchError(f"an embedder beside a started server goes with vllm, not {backend}")
    if system.cluster is not None:
        raise SloBenchError(f"{system.name} has several servers: no embedder stands beside them")
    if getattr(system.policy, "merges", False):
        raise SloBenchError(
            f"{system.name} computes texts in the language model's batches, which vLLM does not do "
            "beside generation; use collocation, static-split or collocated-fcfs"
        )


def limitation(system: System, backend: str) -> str:
    """What of a system that can run on this backend does not happen there; empty if nothing."""
    if backend == SIMULATED or not isinstance(system.policy, Collocated):
        return ""
    if backend != "vllm":
        return "it decides on generation requests alone; no embedder runs beside the model there"
    if system.policy.merges:
        return "it decides on generation requests alone; vLLM does not merge texts into its batches"
    return ""


def check(system: System, backend: str) -> None:
    """Raise SloBenchError if the system cannot run there."""
    if reason := refusal(system, backend):
        raise SloBenchError(f"{system.name} cannot run on {backend}: {reason}")


def compatibility_of(system: System) -> Mapping[str, str | None]:
    """Reason of `refusal` for every backend that runs policies."""
    return {backend: refusal(system, backend) for backend in BACKENDS}
