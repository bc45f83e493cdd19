"""A policy in a file of its own, with a mechanism that it counts."""

from dataclasses import dataclass

from slo_bench.harness.core.decisions import Admission
from slo_bench.harness.policies.edf import EarliestDeadlineFirst


@dataclass(frozen=True)
class CountsLong(EarliestDeadlineFirst):
    """Counts prompts of more than 45 tokens."""

    def mechanisms(self):
        return {"long": "requests with more than 45 prompt tokens"}

    def admit(self, r, view):
        if r.prompt_tokens > 45:
            view.counters.add("long", r)
        return Admission.ADMIT
