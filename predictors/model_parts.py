"""Parts of a model: experts, latent and sparse attention, sliding windows, linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..workloads.arrays import Floats


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts in place of the MLP: a router chooses `per_token` of `routed` experts.

    `intermediate` is the width of one of them. Every token also goes through a shared MLP of width
    `shared_intermediate` (0: none). `dense_layers` layers have a plain MLP. With `width` the routed
    experts compute on vectors of that many elements, between two projections of the layer.
    """

    routed: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    dense_layers: int = 0
    width: int = 0  # 0: that of the model

    def distinct(self, tokens: float, skew: float = 0.0, ep: int = 1) -> float:
        """Expected number of experts that a batch of `tokens` touches, on the GPU with most load.

        Every token chooses its experts on its own, expert i with probability proportional to
        i ** -skew (0: balanced). Experts are dealt out to `ep` GPUs in turn, the popular first.
        """
        chosen = np.minimum(1.0, self.per_token * self._shares(skew)[::ep])
        return float((1 - (1 - chosen) ** tokens).sum())

    def most_loaded_share(self, skew: float = 0.0, ep: int = 1) -> float:
        """Share of all tokens' choices that falls on the GPU with most load of `ep`."""
        return float(self._shares(skew)[::ep].sum())

    def _shares(self, skew: float) -> Floats:
        weight = np.arange(1, self.routed + 1, dtype=np.float64) ** -skew
        return np.asarray(weight / weight.sum())


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    A token leaves one vector of `kv_rank + rope_dim` elements a layer, which all heads share.
    `query_rank` is None where queries are not compressed. `key_dim` is without `rope_dim`.
    """

    kv_rank: int
    rope_dim: int
    key_dim: int
    value_dim: int
    query_rank: int | None = None

    def parameters(self, hidden: int, heads: int) -> int:
        """Parameters of the projections of one layer."""
        widened = heads * (self.key_dim + self.rope_dim)
        query = (
            hidden * widened if self.query_rank is None else self.query_rank * (hidden + widened)
        )
        kv = hidden * (self.kv_rank + self.rope_dim)
        kv += self.kv_rank * heads * (self.key_dim + self.value_dim)
        return query + kv + heads * self.value_dim * hidden


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """DeepSeek sparse attention: a token attends to the `tokens` earlier ones that an indexer of
    `heads` scores highest (DeepSeek-V3.2-Exp, section 2.1; GLM-5).

    The indexer keeps a key of `head_dim` elements a token and layer, in FP8 with a scale in 32 bits
    for every 128, whatever the format of the KV cache (vLLM's and SGLang's layout). With `layers`
    only so many have an indexer; the others take the choice of the last one before (GLM-5.2).
    """

    tokens: int
    heads: int
    head_dim: int
    layers: int = 0  # 0: all

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's key in one layer."""
        return self.head_dim + 4 * -(-self.head_dim // 128)

    def parameters(self, hidden: int, query_rank: int) -> int:
        """Parameters of the projections of one layer: queries, keys and the weights of heads."""
        return self.heads * self.head_dim * query_rank + hidden * (self.head_dim + self.heads)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """`layers` of the model attend to the last `tokens` tokens alone."""

    tokens: int
    layers: int


RecurrenceKind = Literal["gated-delta", "mamba2", "kda", "lightning", "convolution"]


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """`layers` of the model have a recurrence in place of attention, or `beside_attention`, after a
    convolution over `kernel` tokens (1: none).

    A sequence leaves a matrix of `key_dim` x `value_dim` for each of `value_heads`, of
    `state_bits` a number, and the convolution's last inputs, in 16; neither grows with its length.

    `kind`: the gated delta rule (Yang et al., "Gated Delta Networks", ICLR 2025; Qwen3-Next), where
    keys are shared between values; state-space layers of Mamba 2 (Dao and Gu, ICML 2024; key heads
    are its groups, `key_dim` is its state's size); Kimi delta attention (Kimi Linear, arXiv
    2510.26692), with `full_gate` without the narrow projection of its output gate; lightning
    attention (MiniMax-01, arXiv 2501.08313); a gated short convolution alone (LFM2).
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    kind: RecurrenceKind = "gated-delta"
    state_bits: int = 32
    beside_attention: bool = False
    full_gate: bool = False

    @property
    def mixed_width(self) -> int:
        """Queries, keys and values of a token, all heads together: what is convolved."""
        if self.kind == "convolution":
            return self.value_width
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Values of a token, all heads together."""
        return self.value_heads * self.value_dim

    @property
    def gates_width(self) -> int:
        """Columns of the projections of the input to decay, rate and narrow gates."""
        of_kind = {"gated-delta": 2 * self.value_heads, "mamba2": self.value_heads}
        if self.kind == "kda":
            return self.value_heads + self.value_dim * (1 if self.full_gate else 2)
        return of_kind.get(self.kind, 0)

    @property
    def projected_width(self) -> int:
        """Columns of the projection of the input: queries, keys, values, gate, decay and rate."""
        gate = 0 if self.kind == "kda" and not self.full_gate else self.value_width
        if self.kind == "convolution":
            gate *= 2
        return self.mixed_width + gate + self.gates_width

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one layer's matrices of one sequence."""
        return self.state_bits // 8 * self.value_width * self.key_dim

    @property
    def state_bytes(self) -> int:
        """Bytes that one layer keeps of one sequence."""
        return self.matrix_bytes + 2 * self.mixed_width * (self.kernel - 1)

    def parameters(self, hidden: int) -> int:
        """Parameters of one layer's mixing: projections, convolution, decay and norm."""
        values, heads = self.value_width, self.value_heads
        widened = 0
        small = self.mixed_width * self.kernel if self.kernel > 1 else 0
        if self.kind == "gated-delta":
            small += 2 * heads + self.value_dim
        elif self.kind == "mamba2":  # biases of the convolution, A, D, dt, and the norm
            small += self.mixed_width + 3 * heads + values
        elif self.kind == "kda":  # decay and, if narrow, gate are widened from one head's width
            widened = self.value_dim * values * (1 if self.full_gate else 2)
            small += heads + values + self.value_dim
        elif self.kind == "lightning":
            small += values
        return hidden * (self.projected_width + values) + widened + small
