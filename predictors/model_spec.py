"""A transformer by its shape: parameters, weight bytes and KV bytes follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..workloads.arrays import Floats
from .dtypes import AUTO, SIXTEEN_BIT_BYTES, kv_dtype, weight_dtype
from .families import FAMILIES, Kind, Traits

SET_ASIDE_TOKENS = 256  # windows up to this have room of their own


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts in place of the MLP: a router chooses `per_token` of `routed` experts.

    `intermediate` is the width of one of them. Every token also goes through a shared MLP of width
    `shared_intermediate` (0: none). The first `dense_layers` layers have a plain MLP.
    """

    routed: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    dense_layers: int = 0

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
    for every 128, whatever the format of the KV cache (vLLM's and SGLang's layout).
    """

    tokens: int
    heads: int
    head_dim: int

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


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """`layers` of the model have a gated delta rule in place of attention, after a convolution over
    `kernel` tokens (Yang et al., "Gated Delta Networks", ICLR 2025; Qwen3-Next).

    A sequence leaves a matrix of `key_dim` x `value_dim` for each of `value_heads`, in 32 bits, and
    the convolution's last inputs, in 16; neither grows with its length.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def mixed_width(self) -> int:
        """Queries, keys and values of a token, all heads together."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Values of a token, all heads together."""
        return self.value_heads * self.value_dim

    @property
    def projected_width(self) -> int:
        """Columns of the projection of the input: queries, keys, values, gate, decay and rate."""
        return self.mixed_width + self.value_width + 2 * self.value_heads

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one layer's matrices of one sequence."""
        return 4 * self.value_width * self.key_dim

    @property
    def state_bytes(self) -> int:
        """Bytes that one layer keeps of one sequence."""
        return self.matrix_bytes + 2 * self.mixed_width * (self.kernel - 1)

    def parameters(self, hidden: int) -> int:
        """Parameters of one layer's mixing: projections, convolution, decay and norm."""
        small_parameters = self.mixed_width * self.kernel + 2 * self.value_heads + self.value_dim
        return hidden * (self.projected_width + self.value_width) + small_parameters


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a transformer. All counts are for the whole model, not for one GPU.

    With `latent` attention `kv_heads` is 1 and `head_dim` the width of the latent vector.
    `intermediate` is the width of a plain MLP, and that of the first layers before `experts`.
    `checkpoint_dtype` is the weight format in which the model is published. The image encoder takes
    memory alone: requests with images are not simulated.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_tokens: int
    tied_embeddings: bool = False
    origin: str = ""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    sparse: SparseAttention | None = None  # beside `latent`
    window: SlidingWindow | None = None
    linear: LinearAttention | None = None
    image_encoder_parameters: int = 0
    checkpoint_dtype: str = "bf16"

    def dtype_of(self, weights: str) -> str:
        """The weight format called `weights`; `auto`: that of the checkpoint."""
        return self.checkpoint_dtype if weights == AUTO else weights

    @property
    def is_plain(self) -> bool:
        """A dense model all of whose layers attend to all tokens."""
        parts = (self.experts, self.latent, self.window, self.linear)
        return all(part is None for part in parts)

    @property
    def traits(self) -> Traits:
        """What the family says about the shape."""
        return FAMILIES[self.family].traits

    @property
    def kind(self) -> Kind:
        """A decoder generates; an encoder embeds and has no KV cache."""
        return self.traits.kind

    @property
    def query_width(self) -> int:
        """Columns of the query projection, all heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (or value) projection, all KV heads together."""
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def full_kv_layers(self) -> int:
        """Layers whose KV is counted for every token: those that keep it, and those whose windows
        are not set aside, an upper bound.
        """
        return self.attention_layers - self._set_aside_layers

    @property
    def _set_aside_layers(self) -> int:
        """Layers for whose windows room is set aside: of short windows beside full attention.

        The room for many long windows would be mostly empty.
        """
        window = self.window
        if window is None or window.tokens > SET_ASIDE_TOKENS:
            return 0
        return window.layers if window.layers < self.attention_layers else 0

    @property
    def attention_layers(self) -> int:
        """Layers with attention, sliding or full; the others are linear."""
        return self.layers - (self.linear.layers if self.linear else 0)

    @property
    def routed_parameters(self) -> int:
        """Parameters in the matrices of the routed experts, all layers together."""
        if self.experts is None:
            return 0
        return self.expert_layers * self.experts.routed * self._mlp(self.experts.intermediate)

    @property
    def matrix_parameters(self) -> int:
        """Parameters in the matrices of all layers: projections, MLPs, routers and experts."""
        if self.experts is None:
            return self._mixing_parameters + self.layers * self._mlp(self.intermediate)
        experts = self.experts
        always = self.hidden * experts.routed + self._mlp(experts.shared_intermediate)
        return (
            self._mixing_parameters
            + experts.dense_layers * self._mlp(self.intermediate)
            + self.expert_layers * always
            + self.routed_parameters
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, token embeddings left out."""
        if self.experts is None:
            return self.streamed_parameters
        idle = self.experts.routed - self.experts.per_token
        return self.streamed_parameters - self.routed_parameters // self.experts.routed * idle

    def _mlp(self, intermediate: int) -> int:
        return self.traits.mlp_matrices * self.hidden * intermediate

    @property
    def _attention_parameters(self) -> int:
        if self.latent is not None:
            count = self.latent.parameters(self.hidden, self.heads)
            if self.sparse is not None:
                rank = self.latent.query_rank or self.hidden
                count += self.sparse.parameters(self.hidden, rank)
            return count
        gate = self.query_width if self.traits.output_gate else 0
        return self.hidden * (2 * (self.query_width + self.kv_width) + gate)

    @property
    def _mixing_parameters(self) -> int:
        """Parameters that mix tokens, of all layers: attention, full or linear."""
        linear = self.linear.layers * self.linear.parameters(self.hidden) if self.linear else 0
        return self.attention_layers * self._attention_parameters + linear

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters in the matrices of one layer (rounded up where layers differ)."""
        return -(-self.matrix_parameters // self.layers)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, biases and norms included."""
        return self.layer_matrix_parameters + self._layer_vector_parameters

    @property
    def _layer_vector_parameters(self) -> int:
        traits = self.traits
        biases = 0
        if traits.biases != "none":
            biases += self.query_width + 2 * self.kv_width
        if traits.biases == "all":
            biases += 2 * self.hidden + self.intermediate
        if traits.biases == "all" and self.experts:
            biases += self.experts.routed * (2 * self.experts.intermediate + self.hidden)
        biases += self.heads if traits.sinks else 0
        norms = traits.norms_per_layer * self._norm_parameters
        if traits.qk_norm:
            over_heads = traits.qk_norm_over_heads
            norms += self.query_width + self.kv_width if over_heads else 2 * self.head_dim
        return biases + norms

    @property
    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.traits.norm_bias else 1)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one vocabulary-sized matrix."""
        return self.vocab * self.hidden

    @property
    def lookup_parameters(self) -> int:
        """Parameters that are only looked up: token (where not tied), position, type tables."""
        tokens = 0 if self.tied_embeddings and self.kind == "decoder" else self.embedding_parameters
        return tokens + self._table_rows * self.hidden

    @property
    def _table_rows(self) -> int:
        traits = self.traits
        if traits.position_offset is None:
            return traits.token_types
        return traits.token_types + traits.position_offset + self.context_tokens

    @property
    def streamed_parameters(self) -> int:
        """Parameters that every pass reads and multiplies: the layers and the output head."""
        return self.parameters - self.lookup_parameters - self.image_encoder_parameters

    @property
    def parameters(self) -> int:
        """All parameters, shared ones counted once."""
        total = self.matrix_parameters + self.layers * self._layer_vector_parameters
        total += self.embedding_parameters
        total += self._table_rows * self.hidden
        if self.kind == "encoder":  # norm over the embeddings, and the pooler
            return total + self._norm_parameters + self.hidden * (self.hidden + 1)
        total += self._norm_parameters if self.traits.final_norm else 0
        total += self.image_encoder_parameters
        return total + (0 if self.tied_embeddings else self.embedding_parameters)

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Bytes that one more token leaves in the KV cache of all layers; 0 for an encoder.

        Keys and values, or the latent vector, and the keys of an indexer. Layers whose windows are
        set aside are left out: they hold `window_bytes` a sequence.
        """
        if self.kind == "encoder":
            return 0
        each = self.layer_kv_elements * kv_dtype(dtype).bytes
        each += self.sparse.key_bytes if self.sparse else 0
        return round(self.full_kv_layers * each)

    @property
    def layer_kv_elements(self) -> int:
        """Elements that one token leaves in the KV cache of one layer."""
        return (1 if self.latent else 2) * self.kv_width

    def window_bytes(self, dtype: str = "bf16") -> int:
        """KV bytes that are set aside for the windows of one sequence."""
        held = self._set_aside_layers * (self.window.tokens if self.window else 0)
        return round(held * self.layer_kv_elements * kv_dtype(dtype).bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes that layers with linear attention keep of one sequence."""
        return self.linear.layers * self.linear.state_bytes if self.linear else 0

    def dense_dtype(self, dtype: str) -> str:
        """The format of all but the routed experts where those have `dtype`.

        Formats below 8 bits hold for the experts alone, as in the checkpoints that are served
        (gpt-oss in MXFP4, Kimi in INT4, DeepSeek in NVFP4): attention stays at 16 bits.
        """
        return "bf16" if self.experts and weight_dtype(dtype).bytes < 1 else dtype

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of all weights.

        Below 16 bits only the layers' matrices shrink, as in the checkpoints that are served:
        embeddings, output head, norms and biases stay at 16 bits (see also `dense_dtype`).
        """
        return self._bytes(self.parameters, self.matrix_parameters, dtype)

    def routed_weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of the matrices of the routed experts."""
        return round(self.routed_parameters * weight_dtype(dtype).bytes)

    def streamed_weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of the weights that every pass reads (see `streamed_parameters`)."""
        return self._bytes(self.streamed_parameters, self.matrix_parameters, dtype)

    def layer_weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of one layer's weights (their mean where layers differ)."""
        return self._bytes(self.layer_parameters, self.layer_matrix_parameters, dtype)

    def _bytes(self, parameters: int, matrices: int, dtype: str) -> int:
        width = weight_dtype(dtype).bytes
        if width >= SIXTEEN_BIT_BYTES:
            return round(parameters * width)
        if self.dense_dtype(dtype) != dtype:
            matrices = round(matrices * (self.routed_parameters / self.matrix_parameters))
        return round((parameters - matrices) * SIXTEEN_BIT_BYTES + matrices * width)
