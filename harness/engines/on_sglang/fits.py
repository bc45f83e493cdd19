"""Which policies SGLang can run, and why the others not. Needs no SGLang."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.decisions import Limits, Refill
from ...core.policy import AnyPolicy, Policy, overrides
from ...core.state import RequestState
from ...core.view import Predictions
from ..learned import LearnedPredictions

_NOT_OFFERED = {
    "preempt_by": "SGLang takes KV from a request only by throwing it away (no swap, no stall)",
    "refill": "SGLang knows one waiting queue, and nobody waits with KV elsewhere",
    "reserve": "SGLang reserves room by its own estimate of output lengths",
    "commit": "SGLang promises no blocks for life",
}

# What a policy that runs in SGLang does not decide there, however it answers.
NOTE = "phases and chunks are SGLang's own: prompts go first, without decodes"


def refusal(policy: AnyPolicy) -> str:
    """Why this policy cannot run inside SGLang; empty if it can."""
    if not isinstance(policy, Policy):
        return "it forms static batches, which SGLang does not"
    for hook, reason in _NOT_OFFERED.items():
        if overrides(policy, hook):
            return f"it decides {hook}: {reason}"
    if policy.limits_vary:
        return "its limits change as it runs; SGLang's are set at the start"
    return refusal_of(policy.limits(_Idle(policy)))


def refusal_of(limits: Limits) -> str:
    """Why these limits cannot be kept in SGLang; empty if they can."""
    if not limits.chunked:
        return "it never splits a prompt; SGLang decides itself what it splits"
    if limits.watermark_blocks or limits.headroom_blocks:
        return "it keeps blocks free as a watermark, which SGLang does not"
    return ""


class _Idle:
    """A view of an instance on which nothing is, for limits that are asked once."""

    now_s = 0.0
    block_tokens = 16
    total_blocks = free_blocks = 10_000
    host_free_blocks = 0
    n_waiting = n_resident = n_prefilling = n_decoding = n_running = 0
    decode_kv_tokens = future_tokens = 0

    def __init__(self, policy: Policy) -> None:
        self.predict: Predictions = LearnedPredictions()
        self.state: Any = policy.new_state()

    def waiting(self) -> Iterable[RequestState]:
        return ()

    def running(self) -> Iterable[RequestState]:
        return ()

    def would_enter(self, group: Refill) -> list[RequestState]:
        return []

    def kv_tokens(self, r: RequestState) -> int:
        return 0

    def emitted_tokens(self, r: RequestState) -> int:
        return 0

    def held_blocks(self, r: RequestState) -> int:
        return 0

    def cached_tokens(self, r: RequestState) -> int:
        return 0
