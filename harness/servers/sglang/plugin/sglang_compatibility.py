"""Which policies SGLang can run, and why the others not. Needs no SGLang."""

from __future__ import annotations

from ....core.decisions import Limits
from ....core.policy import AnyPolicy, Policy, overrides
from ....policies.sglang import Sglang
from ...plugin.contract import IdleView

_NOT_OFFERED = {
    "preemption_mode": "SGLang takes KV from a request only by discarding it (no swap, no stall)",
    "next_queue": "SGLang knows one waiting queue, and nobody waits with KV elsewhere",
    "headroom_blocks": "SGLang reserves room by its own estimate of output lengths",
    "reserved_blocks": "SGLang promises no blocks for life",
}


def refusal(policy: AnyPolicy) -> str:
    """Reason why this policy cannot run inside SGLang; empty if it can."""
    if not isinstance(policy, Policy):
        return "it forms static batches, which SGLang does not"
    if isinstance(policy, Sglang):
        return "it is what SGLang does by itself: run the server unpatched"
    for hook, reason in _NOT_OFFERED.items():
        if overrides(policy, hook):
            return f"it decides {hook}: {reason}"
    if policy.dynamic_limits:
        return "its limits change as it runs; SGLang's are set at the start"
    return refusal_of(policy.limits(IdleView(policy)))


def refusal_of(limits: Limits) -> str:
    """Reason why SGLang cannot keep these limits; empty if it can."""
    if not limits.chunked:
        return "it never splits a prompt; SGLang decides itself what it splits"
    if limits.watermark_blocks or limits.decode_headroom_blocks:
        return "it keeps blocks free as a watermark, which SGLang does not"
    return ""
