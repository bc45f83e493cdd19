"""A policy in a file of its own that looks at nothing but what it is told of answers' lengths."""

from dataclasses import dataclass
from typing import ClassVar

from slo_bench.harness.core.decisions import Admission
from slo_bench.harness.core.policy import Policy, parameter


@dataclass(frozen=True)
class LongAnswersAway(Policy):
    """Rejects whose answer is said to be long; of the others the shortest goes first."""

    uses_predicted_lengths: ClassVar[bool] = True

    longest_tokens: int = parameter(200, 1, 100000)

    def admit(self, r, view):
        predicted_tokens = view.predict.output_tokens(r)
        return Admission.REJECT if predicted_tokens > self.longest_tokens else Admission.ADMIT

    def queue_key(self, r, view):
        return view.predict.output_tokens(r)
