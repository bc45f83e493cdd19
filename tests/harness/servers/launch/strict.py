"""A policy in a file of its own: long prompts are turned away, what comes too late is dropped."""

from dataclasses import dataclass

from slo_bench.harness.core.decisions import Admission
from slo_bench.harness.policies.edf_drop import EdfDrop


@dataclass(frozen=True)
class Strict(EdfDrop):
    """Rejects prompts of more than 300 tokens."""

    def admit(self, r, view):
        return Admission.REJECT if r.prompt_tokens > 300 else Admission.ADMIT
