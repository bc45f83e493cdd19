"""What it costs to move layers or heads to another GPU, once and at every step from then on, and
the step times of an instance with such modules.

Source: BanaServe (docs/papers.md), §4.3.1, §4.3.2 and Eq. 4-24.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....predictors.dtypes import SIXTEEN_BIT_BYTES
from ....predictors.placement import Placement
from ....predictors.specs import LinkSpec
from ....predictors.step_time import StepTime

SYNC_S = 0.005  # T_sync of Eq. 4-2; the paper gives no figure


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Bytes that go over the link, and the seconds that takes."""

    weight_bytes: int
    kv_bytes: int
    seconds: float

    @property
    def moved_bytes(self) -> int:
        """Bytes that a move transfers (Eq. 4-1)."""
        return self.weight_bytes + self.kv_bytes


def layer_move(
    placement: Placement, layers: int, kv_tokens: int, over: LinkSpec, sync_s: float = SYNC_S
) -> MoveCost:
    """Eq. 4-1 and 4-2: weights and KV of `layers` layers, with `kv_tokens` tokens in KV.

    The paper takes the weights to be much larger than the KV; with a full batch they are not, so
    both count.
    """
    weights = layers * placement.layer_weight_bytes
    kv = kv_tokens * placement.kv_bytes_per_token * layers // placement.model.layers
    return MoveCost(weights, kv, over.transfer_s(weights + kv) + sync_s)


def head_move(
    placement: Placement, kv_heads: int, kv_tokens: int, over: LinkSpec, sync_s: float = SYNC_S
) -> MoveCost:
    """Eq. 4-9 and T_sync of Eq. 4-24: the KV of `kv_heads` heads of all layers, no weights."""
    kv = kv_tokens * placement.kv_bytes_per_token * kv_heads // placement.model.kv_heads
    return MoveCost(0, kv, over.transfer_s(kv) + sync_s)


@dataclass(frozen=True, slots=True)
class Toll:
    """What a move adds to every step: a constant, and for each token computed."""

    s: float
    s_per_token: float

    def step_s(self, tokens: int) -> float:
        """Seconds of a step that computes `tokens` tokens."""
        return self.s + self.s_per_token * tokens


def layer_toll(placement: Placement, over: LinkSpec) -> Toll:
    """Activations go to the layers that moved and come back: two hops a step.

    However many layers have moved: they are consecutive.
    """
    token_bytes = placement.model.hidden * SIXTEEN_BIT_BYTES
    return Toll(2 * over.latency_s, 2 * token_bytes / over.bandwidth_bytes_per_s)


def head_toll(placement: Placement, kv_heads: int, over: LinkSpec) -> Toll:
    """Seconds that offloaded heads add to a step. In every layer the moved heads' part of Q, and of
    the new token's K and V, goes out and their part of O comes back.

    Heads need no shared softmax: the results are concatenated. The paper's Eq. 4-6 to 4-8 add up
    what a split along the sequence would give (`engines.paged.attention`). The helper computes
    attention in parallel to the instance; the exchange is not hidden.
    """
    model = placement.model
    share = kv_heads / model.kv_heads
    width = 2 * model.query_width + 2 * model.kv_width  # Q out, O back, K and V out
    token_bytes = share * width * SIXTEEN_BIT_BYTES
    return Toll(
        model.layers * 2 * over.latency_s,
        model.layers * token_bytes / over.bandwidth_bytes_per_s,
    )


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

    local: StepTime
    layer_share: float = 0.0
    layer_toll: Toll = _NO_TOLL
    head_share: float = 0.0
    head_toll: Toll = _NO_TOLL

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        return self.parts_s(decode_seqs, decode_kv_tokens, chunks)[0]

    def parts_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> tuple[float, float]:
        """Seconds of one step, and of what the other GPU computes for it."""
        step_s = self.local.step_s(decode_seqs, decode_kv_tokens, chunks)
        abroad_s = self.layer_share * step_s
        if self.head_share:
            attention_s = self._attention_s(decode_seqs, decode_kv_tokens)
            abroad_s += self.head_share * attention_s
            if decode_seqs:
                step_s -= self._parallel * attention_s
        tokens = decode_seqs
        for _, chunk_tokens in chunks:
            tokens += chunk_tokens
        if not decode_seqs:
            step_s *= self._pipelined(tokens)
        return step_s + self.layer_toll.step_s(tokens) + self.head_toll.step_s(tokens), abroad_s

    def span_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        span_s = self.local.span_s(decode_seqs, decode_kv_tokens, steps)
        if self.head_share:
            base_s = steps * self.local.step_s(decode_seqs, 0, ())
            span_s -= self._parallel * (span_s - base_s)
        toll_s = self.layer_toll.step_s(decode_seqs) + self.head_toll.step_s(decode_seqs)
        return span_s + steps * toll_s

    def steps_within(self, decode_seqs: int, decode_kv_tokens: int, duration_s: float) -> int:
        if duration_s <= 0:
            return 0
        high = 1
        while self.span_s(decode_seqs, decode_kv_tokens, high) < duration_s:
            high *= 2
        low = high // 2 + 1
        while low < high:
            middle = (low + high) // 2
            if self.span_s(decode_seqs, decode_kv_tokens, middle) < duration_s:
                low = middle + 1
            else:
                high = middle
        return high

    def abroad_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of one step that the other GPU computes."""
        return self.parts_s(decode_seqs, decode_kv_tokens, chunks)[1]

    def span_abroad_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        """The same of `steps` steps that only decode."""
        span_s = self.local.span_s(decode_seqs, decode_kv_tokens, steps)
        attention_s = span_s - steps * self.local.step_s(decode_seqs, 0, ())
        return self.layer_share * span_s + self.head_share * attention_s

    @property
    def _parallel(self) -> float:
        """By how much of itself attention is shortened: the larger part sets the pace."""
        return min(self.head_share, 1 - self.head_share)

    def _attention_s(self, seqs: int, kv_tokens: int) -> float:
        return self.local.step_s(seqs, kv_tokens, ()) - self.local.step_s(seqs, 0, ())

    def _pipelined(self, tokens: int) -> float:
        """What two stages make of a pass, given the micro-batches that its tokens allow."""
        if not self.layer_share:
            return 1.0
        batches = max(1, min(MICRO_BATCHES, tokens // MICRO_BATCH_TOKENS))
        slowest = max(self.layer_share, 1 - self.layer_share)
        return (1 + (batches - 1) * slowest) / batches
