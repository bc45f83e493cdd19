"""Which policies SGLang can run, and why the others not. Needs no SGLang."""

from __future__ import annotations

from ....core.decisions import Limits
from ....core.policy import AnyPolicy, Policy, overrides
from ....policies.sglang import Sglang
from ...plugin.contract import IdleView

_NO_SWAP = "SGLang takes KV from a request only by discarding it (no swap, no stall)"
_ORDER_HOOKS = ("queue_key", "queue_key_line", "victim_key")


def refusal(policy: AnyPolicy) -> str:
    """Reason why this policy cannot run inside SGLang; empty if it can."""
    if not isinstance(policy, Policy):
        instead = f"; {policy.continuous} is what a server can run of it" * bool(policy.continuous)
        return f"it forms static batches, which SGLang does not{instead}"
    if isinstance(policy, Sglang):
        return "it is what SGLang does by itself: run the server unpatched"
    if overrides(policy, "reserved_blocks"):
        return "it decides reserved_blocks: SGLang promises no blocks for life"
    if _chooses_mode(policy) and not any(overrides(policy, hook) for hook in _ORDER_HOOKS):
        return f"it decides preemption_mode: {_NO_SWAP}"
    return refusal_of(policy.limits(IdleView(policy)))


def limitation(policy: AnyPolicy) -> str:
    """What of a policy that can run inside SGLang does not happen there; empty if nothing."""
    if isinstance(policy, Policy) and _chooses_mode(policy):
        return f"its order decides, and each victim is recomputed: {_NO_SWAP}"
    return ""


def refusal_of(limits: Limits) -> str:
    """Reason why SGLang cannot keep these limits; empty if it can."""
    if limits.mixed_batches and not limits.chunked:
        return "it computes whole prompts beside decodes; SGLang mixes them with chunks alone"
    return ""


def launch_args(policy: Policy) -> list[str]:
    """Options of the server for prompts as the policy's limits have them: whole, or in chunks that
    share steps with decodes.
    """
    limits = policy.limits(IdleView(policy))
    if not limits.chunked:
        return ["--chunked-prefill-size", "-1"]
    return ["--enable-mixed-chunk"] if limits.mixed_batches else []


def _chooses_mode(policy: Policy) -> bool:
    return overrides(policy, "preemption_mode")
