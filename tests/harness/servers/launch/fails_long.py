"""A policy with a mistake, in a file of its own."""

from dataclasses import dataclass

from slo_bench.harness.policies.edf import EarliestDeadlineFirst


@dataclass(frozen=True)
class FailsLong(EarliestDeadlineFirst):
    """Divides by zero where a prompt has 100 tokens or more."""

    def queue_key(self, r, view):
        return r.arrival_s / (r.prompt_tokens < 100)
