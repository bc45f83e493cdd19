"""Online monitor of predicted lengths: KV reserved by them, corrected by what really came.

Source: UELLM, §3.3.3 (reserved memory follows the true growth of the KV cache; mispredicted
requests are queued for incremental fine-tuning); S3 doubles what it reserved when an answer
outgrows it. The thesis gives no rule for the correction, and a predictor's distribution is not in
it; the rule here is `reserve_tokens`.
"""

from __future__ import annotations

from collections import deque

from ....workloads.length_buckets import (
    BUCKET_EDGES,
    bucket_last_tokens,
    bucket_middle_tokens,
    bucket_of,
)
from ...core.counters import RECOMPUTES
from ...core.records.request_records import Misprediction
from ...core.state import RequestState
from ...core.view import View

UNDERESTIMATES = "underestimates"
MISPREDICTIONS = {
    UNDERESTIMATES: "answers longer than their predicted bucket",
    RECOMPUTES: "requests put back because their answers outgrew the KV memory",
}

_REMEMBERED = 128  # answers of each predicted bucket that the correction looks back on
_QUEUED = 10_000  # mispredictions kept for retraining; the oldest go first


class LengthMonitor:
    """What one instance has seen of predicted and true lengths; a policy's `new_state()`."""

    def __init__(self) -> None:
        self.finished = 0
        self.in_bucket = 0
        self.mispredicted: deque[Misprediction] = deque(maxlen=_QUEUED)
        self._true_tokens = [deque[int](maxlen=_REMEMBERED) for _ in BUCKET_EDGES]
        self._reserve_tokens = [bucket_last_tokens(bucket) for bucket in range(len(BUCKET_EDGES))]

    @property
    def bucket_accuracy(self) -> float:
        """Share of finished requests with the right predicted bucket; NaN before the first."""
        return self.in_bucket / self.finished if self.finished else float("nan")

    def expected_tokens(self, r: RequestState, view: View) -> int:
        """The predicted length, and twice what an answer already had where it began anew."""
        return max(1, view.predict.output_tokens(r), 2 * view.emitted_tokens(r))

    def alike_tokens(self, r: RequestState, view: View) -> int:
        """The expected length, for comparing requests: the middle of its bucket where the
        predictor is unsure of it (Eq. 3-2's representative value), for it cannot tell lengths
        within a bucket apart; what it is sure of as it is.
        """
        predict, expected = view.predict, self.expected_tokens(r, view)
        if predict.output_tokens_p90(r) <= predict.output_tokens(r):
            return expected
        return bucket_middle_tokens(bucket_of(expected))

    def reserve_tokens(self, r: RequestState, view: View) -> int:
        """Answer tokens to reserve KV for.

        The end of the predicted bucket, the longest answer that lately came out of that bucket, or
        what nine in ten such answers do not exceed, whichever is most; never more than the
        request may have.
        """
        return self.reserve_of(r, self.expected_tokens(r, view), view)

    def reserve_of(self, r: RequestState, expected_tokens: int, view: View) -> int:
        """Tokens to reserve for a length that is known already."""
        of_bucket = self._reserve_tokens[bucket_of(expected_tokens)]
        return min(r.max_output_tokens, max(of_bucket, view.predict.output_tokens_p90(r)))

    def observe(self, r: RequestState, view: View) -> None:
        """`r` has finished: compare, correct, and queue it where it was mispredicted."""
        predicted, true = view.predict.output_tokens(r), view.emitted_tokens(r)
        bucket = bucket_of(predicted)
        self.finished += 1
        lengths = self._true_tokens[bucket]
        lengths.append(true)
        self._reserve_tokens[bucket] = max(bucket_last_tokens(bucket), max(lengths))
        if bucket == bucket_of(true):
            self.in_bucket += 1
        else:
            if bucket_of(true) > bucket:
                view.counters.add(UNDERESTIMATES, r)
            self.mispredicted.append(Misprediction(r.id, r.prompt_tokens, predicted, true))
