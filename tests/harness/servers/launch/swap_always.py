"""A policy in a file of its own, as users write them."""

from dataclasses import dataclass

from slo_bench.harness.core.decisions import PreemptionMode
from slo_bench.harness.policies.vllm import Vllm


@dataclass(frozen=True)
class SwapAlways(Vllm):
    """As vLLM, but the preempted are swapped."""

    def preemption_mode(self, r, view):
        return PreemptionMode.SWAP
