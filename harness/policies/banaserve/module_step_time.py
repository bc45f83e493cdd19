"""Step times of an instance some of whose layers or heads are on another GPU.

Source: BanaServe (docs/papers.md), §4.3.1 and §4.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....predictors.step_time import StepTime
from .module_costs import Toll

_NO_TOLL = Toll(0.0, 0.0)
MICRO_BATCHES = 4
MICRO_BATCH_TOKENS = 512  # below this a prefill reads weights for longer than it computes


@dataclass(frozen=True, slots=True)
class MovedStepTime:
    """`StepTime` of the instance, and what of it another GPU computes (`abroad_s`).

    Layers: `layer_share` of every pass is computed abroad, one part after the other, and each pass
    pays the hop there and back. Steps that only prefill are cut into up to four micro-batches of
    512 tokens or more, on which both GPUs work at once, as pipeline stages do; a decode step needs
    the token of the one before and cannot be.

    Heads: `head_share` of the attention over decoding requests' KV is computed abroad while the
    rest is computed here, and every layer pays its exchange.
    """

    own: StepTime
    layer_share: float = 0.0
    layer_toll: Toll = _NO_TOLL
    head_share: float = 0.0
    head_toll: Toll = _NO_TOLL

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        chunk_tokens = sum(tokens for _, tokens in chunks)
        step_s = self.own.step_s(decode_seqs, decode_kv_tokens, chunks)
        if decode_seqs and self.head_share:
            step_s -= self._parallel * self._attention_s(decode_seqs, decode_kv_tokens)
        if not decode_seqs:
            step_s *= self._pipelined(chunk_tokens)
        tokens = decode_seqs + chunk_tokens
        return step_s + self.layer_toll.step_s(tokens) + self.head_toll.step_s(tokens)

    def span_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        span_s = self.own.span_s(decode_seqs, decode_kv_tokens, steps)
        if self.head_share:
            base_s = steps * self.own.step_s(decode_seqs, 0, ())
            span_s -= self._parallel * (span_s - base_s)
        toll_s = self.layer_toll.step_s(decode_seqs) + self.head_toll.step_s(decode_seqs)
        return span_s + steps * toll_s

    def steps_within(self, decode_seqs: int, decode_kv_tokens: int, duration_s: float) -> int:
        if duration_s <= 0:
            return 0
        most = 1
        while self.span_s(decode_seqs, decode_kv_tokens, most) < duration_s:
            most *= 2
        fewest = most // 2 + 1
        while fewest < most:
            middle = (fewest + most) // 2
            if self.span_s(decode_seqs, decode_kv_tokens, middle) < duration_s:
                fewest = middle + 1
            else:
                most = middle
        return most

    def abroad_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of one step that the other GPU computes."""
        step_s = self.own.step_s(decode_seqs, decode_kv_tokens, chunks)
        attention_s = self._attention_s(decode_seqs, decode_kv_tokens) if self.head_share else 0.0
        return self.layer_share * step_s + self.head_share * attention_s

    def span_abroad_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        """The same of `steps` steps that only decode."""
        span_s = self.own.span_s(decode_seqs, decode_kv_tokens, steps)
        attention_s = span_s - steps * self.own.step_s(decode_seqs, 0, ())
        return self.layer_share * span_s + self.head_share * attention_s

    @property
    def _parallel(self) -> float:
        """By how much of itself attention is shortened: the larger part sets the pace."""
        return min(self.head_share, 1 - self.head_share)

    def _attention_s(self, seqs: int, kv_tokens: int) -> float:
        return self.own.step_s(seqs, kv_tokens, ()) - self.own.step_s(seqs, 0, ())

    def _pipelined(self, tokens: int) -> float:
        """What two stages make of a pass, given the micro-batches that its tokens allow."""
        if not self.layer_share:
            return 1.0
        batches = max(1, min(MICRO_BATCHES, tokens // MICRO_BATCH_TOKENS))
        slowest = max(self.layer_share, 1 - self.layer_share)
        return (1 + (batches - 1) * slowest) / batches
