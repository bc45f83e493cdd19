"""Which policies vLLM can run, and why the others not. Needs no vLLM."""

from __future__ import annotations

from ....core.decisions import Limits
from ....core.policy import AnyPolicy, Policy
from ..idle_view import IdleView


def refusal(policy: AnyPolicy) -> str:
    """Why this policy cannot run inside vLLM; empty if it can."""
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


def start_limits(policy: Policy, num_gpu_blocks: int | None) -> Limits:
    """The limits that the server is started with; the policy stays within them."""
    return policy.limits(
        IdleView(policy) if num_gpu_blocks is None else IdleView(policy, num_gpu_blocks)
    )
