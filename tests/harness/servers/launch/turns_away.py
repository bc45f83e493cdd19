"""A policy in a file of its own, as users write them."""

from dataclasses import dataclass

from slo_bench.harness.core.decisions import Admission
from slo_bench.harness.core.policy import parameter
from slo_bench.harness.policies.edf_drop import EdfDrop


@dataclass(frozen=True)
class TurnsAway(EdfDrop):
    """Rejects long prompts, and drops who is late."""

    longest_prompt_tokens: int = parameter(100, 1, 100000)

    def admit(self, r, view):
        return Admission.REJECT if r.prompt_tokens > self.longest_prompt_tokens else Admission.ADMIT
