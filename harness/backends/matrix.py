"""Which system can run where, and why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...workloads.errors import SloBenchError
from ..core.policy import AnyPolicy
from ..engines.on_sglang import fits as sglang_fits
from ..engines.on_vllm import fits as vllm_fits
from ..systems import System

SIMULATED = "simulated"

_REFUSALS: Mapping[str, Callable[[AnyPolicy], str]] = {
    "vllm": vllm_fits.refusal,
    "sglang": sglang_fits.refusal,
}
BACKENDS = (SIMULATED, *_REFUSALS)


def refusal(system: System, backend: str) -> str | None:
    """Why this system cannot run inside this server; None: it can, or we decide nothing there."""
    reason = _REFUSALS.get(backend)
    return (reason(system.policy) or None) if reason else None


def check(system: System, backend: str) -> None:
    """Raise SloBenchError if the system cannot run there."""
    if reason := refusal(system, backend):
        raise SloBenchError(f"{system.name} cannot run on {backend}: {reason}")


def matrix(system: System) -> Mapping[str, str | None]:
    """Backend to `refusal`, for every backend that policies run on."""
    return {backend: refusal(system, backend) for backend in BACKENDS}
