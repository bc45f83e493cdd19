"""What it costs to move layers or heads to another GPU, once and at every step from then on.

Source: BanaServe (docs/papers.md), §4.3.1, §4.3.2 and Eq. 4-24.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....predictors.dtypes import SIXTEEN_BIT_BYTES
from ....predictors.placement import Placement
from ....predictors.specs import LinkSpec

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
    weights = layers * placement.model.layer_weight_bytes(placement.weight_dtype)
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
